"""Tiny tasks, made-up data and an observer for the tests of the lab."""

import math
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import replace
from functools import cache, partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("typer")
from rich.console import Console

from nero_lab import sweep
from nero_lab.data import ImageDataset, Images, pairs
from nero_lab.data.augmentation import crop_flip_rotate
from nero_lab.data.corpus import build_corpus
from nero_lab.loops.supervised import Supervised
from nero_lab.models.mlp import reparameterised
from nero_lab.models.resnet import resnet18
from nero_lab.models.vgg import vgg11
from nero_lab.progress import Display
from nero_lab.protocol import Contender, Seconds, Task, decay_each_epoch

CPU = torch.device("cpu")
#: Relative agreement of float32 losses over a few steps, between two ways to group the same arithmetic.
FLOAT32_RTOL = 1e-4


def make_data(name="cifar10", examples=20, tests=10, seed=0):
    """Make labelled noise in a data set's shape, brighter from class to class, or sequences of words."""
    if name == "wikitext2":
        text = [f"word{i * i % 7}" for i in range(20 * (examples // 20 * 35 + 1))]
        return build_corpus(name, text, text[: 10 * 36 + 5], text[: 10 * 36])
    if name == "multi30k":
        sentences = [[f"wort{i * k % 5}" for k in range(1 + i % 9)] for i in range(examples)]
        both = [(one, [word.replace("o", "") for word in one]) for one in sentences]
        return pairs.build_pairs(name, both, both[:tests], both[:tests])
    shape = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}[name]
    generator = torch.Generator().manual_seed(seed)

    def images(count):
        labels = torch.arange(count) % 10
        noise = torch.randint(100, (count, *shape), generator=generator)
        return Images((noise + 15 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels)

    channels = shape[0]
    return ImageDataset(name, images(examples), images(tests), (0.5,) * channels, (0.25,) * channels)


class Killed(BaseException):
    """A stand-in for the end of the process."""


class RecordingObserver:
    """Observer that records all calls, and raises Killed after some steps."""

    def __init__(self, kill_after=math.inf):
        self.steps_left, self.planned, self.begun_at, self.ended_runs = kill_after, [], [], []
        self.stop_requests = 0

    def plan(self, _, runs, done):
        self.planned.append((len(runs), len(done)))

    def begun(self, training):
        self.begun_at.append(training.steps_done)

    def stepped(self, _):
        self.steps_left -= 1
        if self.steps_left < 0:
            raise Killed

    def ended(self, training):
        self.ended_runs.append(training)

    def blocked(self, _):
        pass

    def stopping(self):
        self.stop_requests += 1


def small_mlp():
    """Make a perceptron on pooled images: the cheapest network for tests of everything around it."""
    return nn.Sequential(nn.AvgPool2d(8), reparameterised(3, 100.0, width=48))


TINY = Task(
    name="tiny",
    shows="",
    title="",
    dataset="cifar10",
    model=partial(vgg11, width=1 / 32),
    contenders={
        "nero": Contender("nero", 0.01),
        "nero-neither": Contender("nero", 0.02, {"fix_mean": False, "fix_norm": False, "fixed_scale": True}),
        "sgd": Contender("sgd", 0.1),
        "adam": Contender("adam", 0.001, {"beta1": 0.9}),
        "lamb": Contender("lamb", 0.01),
        "lamb-balanced": Contender("lamb", 0.06, {"balanced": True}),
        "madam": Contender("madam", 0.02),
        "resnet": Contender("nero", 0.01, model=partial(resnet18, width=1 / 32)),
        "sigma-100": Contender("adam", 0.01, model=small_mlp),
    },
    grid=(0.01, 0.1),
    epochs=3,
    batch=8,
    schedule=decay_each_epoch(0.5),
    metric="test_accuracy",
    seconds=Seconds(1, 1, 1),
    augment=crop_flip_rotate,
)
#: The same with a network that costs next to nothing.
FAST = replace(TINY, model=small_mlp)


class Slow(Supervised):
    """A run that takes its time over each step."""

    def advance(self):
        time.sleep(0.2)
        super().advance()


def find_fast(settings, *_):
    """Find the task and the data of a run, in a process of its own."""
    if settings.optimiser not in FAST.contenders:
        raise KeyError(settings.optimiser)
    return FAST, make_data()


def find_slow(*_):
    """Find a task that is slow enough to notice an interrupt."""
    return replace(FAST, loop=Slow), make_data()


def find_and_interrupt(*_):
    """Interrupt the command that has started this process, and find a slow task."""
    os.kill(multiprocessing.parent_process().pid, signal.SIGINT)
    return find_slow()


class Awaited(Slow):
    """A run that leaves a file when it is under way, and goes on when another process has found it."""

    def advance(self):
        Path(self.data.name, "begun").touch()
        wait_for(Path(self.data.name, "dies"))
        super().advance()


def wait_for(file):
    while not file.exists():
        time.sleep(0.05)


def find_and_die(settings, folder, _):
    """Find a slow task, or kill this process for seed 0 when another run is under way."""
    if settings.seed == 0:
        wait_for(folder / "begun")
        (folder / "dies").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(FAST, loop=Awaited), replace(make_data(), name=str(folder))


class Orphaned(Slow):
    """A run that kills the command which has started its process, and leaves the number of the process in a file."""

    def advance(self):
        if self.steps_done == 1:
            Path("worker").write_text(str(os.getpid()))
            os.kill(os.getppid(), signal.SIGKILL)
        super().advance()


def find_orphaned(*_):
    """Find a task whose run kills the command."""
    return replace(FAST, loop=Orphaned), make_data()


def comparable(record):
    """Return a record without the fields that differ from one run to the next."""
    varying = ("seconds", "finished", "side_by_side", "path", "resumed")
    return {key: value for key, value in record.items() if key not in varying}


def assert_close_records(found, wanted, rtol=FLOAT32_RTOL):
    """Assert that records agree: settings exactly, curves to float32's rounding."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        one, other = comparable(one), comparable(other)
        curves = one.pop("curve"), other.pop("curve")
        assert one == other
        assert curves[0].keys() == curves[1].keys()
        for name, values in curves[1].items():
            assert curves[0][name] == pytest.approx(values, rel=rtol), name


def checkpoint_every_step(monkeypatch):
    """Make every round of steps end with checkpoints."""
    monkeypatch.setattr(sweep, "CHECKPOINT_EVERY_S", 0.0)
    monkeypatch.setattr(sweep, "MIN_TRAIN_TO_SAVE_RATIO", 0.0)


def finish(training):
    """Train to the end."""
    while not training.is_finished:
        training.advance()
    return training


def start_run(loop, store, epochs=None):
    """Save a run of a tiny task of the loop after one step. Return the task, the settings and the data."""
    training, data = _started(loop, epochs)
    store.save(training)
    return training.task, training.settings, data


@cache
def _started(loop, epochs):
    from lab.loop_cases import ECHO, TINY_GAME, TINY_GAN, noise_images

    task, data = {
        "supervised": (TINY, make_data()),
        "adversarial": (TINY_GAN, noise_images()),
        "agent": (TINY_GAME, ECHO),
    }[loop]
    training = (task.loop or Supervised)(task, task.settings("adam", epochs=epochs), data, None)
    training.advance()
    return training, data


def make_display(terminal, out):
    """Return a display and the stream that it prints to."""
    stream = StringIO()
    console = Console(file=stream, width=200, force_terminal=terminal, markup=False, highlight=False)
    return Display(console, out, CPU), stream


def run_command(monkeypatch, *arguments):
    """Run `nero ...` in this process. Return its exit code and what it printed."""
    from nero_lab import cli, command  # which processes that only train need not wait for

    stream = StringIO()
    monkeypatch.setattr(cli, "console", Console(file=stream, width=200, markup=False, highlight=False))
    monkeypatch.setattr(sys, "argv", ["nero", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        command.main()
    return end.value.code or 0, stream.getvalue()
