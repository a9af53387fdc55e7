"""The paper's tasks, on small networks and made data: their time, and the trust of their neurons."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import end_to_end
import numpy as np
import pytest
import suite
import torch
import torch.nn.functional as F  # noqa: N812
import trust
from records import RESULTS

import nero
from nero_lab.data import ImageDataset, Images, corpus, pairs
from nero_lab.data.arcade import Game
from nero_lab.image_metrics import FrechetMetric
from nero_lab.loops.adversarial import Adversarial
from nero_lab.loops.ppo import PPO
from nero_lab.models.actor_critic import ActorCritic
from nero_lab.models.airbench import Airbench
from nero_lab.models.biggan import GANPair
from nero_lab.models.mlp import mlp
from nero_lab.models.transformer import Translator, language_model
from nero_lab.models.vgg import vgg11
from nero_lab.models.vit import VisionTransformer
from nero_lab.protocol import Precision

EXAMPLES = 160


class BlankEmulator:
    """Games that show nothing and never end; the real ones take seconds to start."""

    def __init__(self, games: int, _: bool) -> None:
        self.frames, self.never = np.zeros((games, 4, 84, 84), np.uint8), np.zeros(games, bool)

    def reset(self, **_: object):
        return self.frames, {}

    def send(self, actions: object) -> None: ...

    def recv(self):
        return self.frames, np.zeros(len(self.never)), self.never, self.never, {}


def made(name: str, _: object = None):
    """Make a little data in the form of a data set."""
    if name == "pong":
        return Game(name, BlankEmulator)
    if name == "wikitext2":
        text = [f"word{i * i % 7}" for i in range(20 * (EXAMPLES // 20 * 35 + 1))]
        return corpus.build_corpus(name, text, text[: 10 * 36 + 5], text[: 10 * 36])
    if name == "multi30k":
        sentences = [[f"wort{i * k % 5}" for k in range(1 + i % 9)] for i in range(EXAMPLES)]
        both = [(one, [word.replace("o", "") for word in one]) for one in sentences]
        return pairs.build_pairs(name, both, both[:10], both[:10])
    channels, size = {"mnist": (1, 28), "cifar10": (3, 32)}[name]

    def images(count: int) -> Images:
        pixels = torch.randint(256, (count, channels, size, size), dtype=torch.uint8)
        return Images(pixels, torch.arange(count) % 10)

    return ImageDataset(name, images(EXAMPLES), images(10), (0.5,) * channels, (0.25,) * channels)


def tiny_metrics(_: torch.device) -> list[FrechetMetric]:
    return [
        FrechetMetric(
            "Fréchet distance, quarters", "distance", lambda pixels: F.avg_pool2d(pixels.float(), 4).flatten(1)
        )
    ]


@pytest.fixture
def small_suite(monkeypatch: pytest.MonkeyPatch):
    """Replace networks, batches and data by small ones."""
    pair, loop = partial(GANPair, base=1), partial(Adversarial, metrics=tiny_metrics)
    monkeypatch.setitem(suite.TASKS, "cgan", replace(suite.TASKS["cgan"], model=pair, loop=loop, batch=8))
    pong = replace(suite.TASKS["pong"], model=partial(ActorCritic, width=1 / 32))
    monkeypatch.setitem(suite.TASKS, "pong", pong)
    models = {
        "mnist": partial(mlp, 2),
        "cifar10": partial(vgg11, width=1 / 32),
        "wikitext2": partial(language_model, 7, width=8, hidden=8),
        "multi30k": partial(Translator, 14, width=16, hidden=16, layers=1),
    }
    for name in suite.EPOCH_TASKS:
        task = suite.TASKS[name]
        contenders = {key: replace(each, model=None) for key, each in task.contenders.items()}
        small = replace(task, model=models[task.dataset], contenders=contenders, batch=8)
        monkeypatch.setitem(suite.TASKS, name, small)
    monkeypatch.setattr(suite, "load", made)
    monkeypatch.setattr(suite, "Perceptron", lambda _: end_to_end.Perceptron(2))
    monkeypatch.setattr(suite, "host_batches", partial(suite.host_batches, batch=8))


@pytest.mark.usefixtures("small_suite")
def test_times_of_all_tasks_are_recorded(tmp_path: Path):
    asked = ["--share", "0.1", "--seconds", "0.1", "--epochs", "1"]
    assert suite.main(["--device", "cpu", "--out", str(tmp_path), *asked]) == 0
    found = json.loads((tmp_path / "suite-cpu.json").read_text())
    rows = {row["task"]: row for row in found["rows"]}
    assert list(rows) == ["mnist-deep", suite.SCRIPT_TASK, *suite.EPOCH_TASKS[1:], *suite.STEP_TASKS]
    for name, steps in (("cgan", 20), ("pong", 80 * 144)):
        row = rows.pop(name)
        assert row["seconds_an_epoch"] == pytest.approx(steps * row["milliseconds_a_step"] / 1e3, rel=0.02)
        assert row["seconds_in_full"] >= 0.9 * suite.TASKS[name].epochs * row["seconds_an_epoch"] - 0.05  # of rounding
    script = rows.pop(suite.SCRIPT_TASK)
    ours = rows["mnist-deep"]["milliseconds_a_step"]
    assert script["times_ours"] == pytest.approx(script["milliseconds_a_step"] / ours, rel=0.02, abs=0.01)
    for name, row in rows.items():
        # a tenth of 160 examples is two batches of eight; the recorded epoch has twenty
        assert row["seconds_an_epoch"] == pytest.approx(20 * row["milliseconds_a_step"] / 1e3, rel=0.02, abs=2e-3)
        assert row["seconds_in_full"] >= 0.9 * suite.TASKS[name].epochs * row["seconds_an_epoch"] - 0.05  # of rounding


@pytest.mark.usefixtures("small_suite")
def test_task_timed_again_leaves_other_rows_alone(tmp_path: Path):
    asked = ["--device", "cpu", "--out", str(tmp_path), "--share", "0.1", "--epochs", "1", "--tasks", "translation"]
    assert suite.main(asked) == 0
    path = tmp_path / "suite-cpu.json"
    found = json.loads(path.read_text())
    other = {**found["rows"][0], "task": "wikitext2"}
    path.write_text(json.dumps({**found, "rows": [{**found["rows"][0], "seconds_in_full": -1}, other]}))
    assert suite.main(asked) == 0
    rows = {row["task"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["wikitext2", "translation"]
    assert rows["wikitext2"] == other
    assert rows["translation"]["seconds_in_full"] > 0
    for broken in (json.dumps({**found, "torch": "1.0"}), "{", "[]", json.dumps({**found, "rows": [{}]})):
        path.write_text(broken)
        with pytest.raises(SystemExit):
            suite.main(asked)
        assert path.read_text() == broken


@pytest.mark.usefixtures("small_suite")
def test_contenders_of_today_are_timed_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suite, "TODAY_BURST", 2)
    monkeypatch.setattr(suite, "SPEED_RUNS", 2)
    models = {
        "vit": (partial(VisionTransformer, width=16, layers=1, head_width=8), 8),
        "airbench": (partial(Airbench, width=1 / 16), 40),
    }
    for name, (model, batch) in models.items():
        few = {key: replace(suite.TASKS[name].contenders[key], model=None) for key in ("nero", "muon")}
        small = replace(suite.TASKS[name], model=model, contenders=few, batch=batch, epochs=4, precision="float32")
        monkeypatch.setitem(suite.TASKS, name, small)
    assert suite.main(["--device", "cpu", "--out", str(tmp_path), "--tasks", *models]) == 0
    rows = json.loads((tmp_path / "suite-cpu.json").read_text())["rows"]
    assert [(row["task"], row["optimiser"]) for row in rows] == [(t, c) for t in models for c in ("nero", "muon")]
    for row in rows:
        fastest, slowest = row["range"]
        assert 0 < fastest <= row["milliseconds_a_step"] <= slowest
        steps = 4 * EXAMPLES / models[row["task"]][1]
        assert row["seconds_of_steps"] == pytest.approx(steps * row["milliseconds_a_step"] / 1e3, rel=0.01, abs=1e-3)


def test_interrupted_suite_keeps_the_record_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    row = {"task": "wikitext2", "precision": "float32", "milliseconds_a_step": 1.0}

    def rows(*_: object):
        yield row
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "timed_rows", rows)
    path = tmp_path / "suite-cpu.json"
    path.write_text(other := json.dumps({"machine": "another", "torch": "1.0", "rows": [row]}))
    with pytest.raises(KeyboardInterrupt):
        suite.main(["--device", "cpu", "--out", str(tmp_path)])
    assert path.read_text() == other
    assert len(json.loads(path.with_suffix(".unfinished").read_text())["rows"]) == 1


@pytest.mark.usefixtures("small_suite")
def test_cells_side_by_side_are_timed_together():
    data = suite.load("mnist", None)
    row = suite.time_cells(suite.TASKS["mnist-deep"], [("nero", 0.001), ("sgd", 0.1)], data, "float32", 1, 1.0)
    assert row["side_by_side"] == 2
    assert row["optimiser"] == "all"


def test_warm_up_covers_every_capture():
    """The GAN's smaller last batch, and Pong's learner, are captured before steps are timed."""
    game = PPO()
    assert max(50_000 / suite.TASKS["cgan"].batch, 2 * (game.steps + game.round_updates)) < suite.WARM_UP_STEPS


@pytest.mark.parametrize("epochs", ["0", "5"])
def test_epochs_beyond_a_task_are_refused(epochs: str):
    with pytest.raises(SystemExit):
        suite.main(["--epochs", epochs])


def test_plain_nero_is_algorithm_1():
    torch.manual_seed(0)
    ours, plain = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    plain.load_state_dict(ours.state_dict())
    optimisers = (nero.Nero(ours, lr=0.01), suite.PlainNero(plain, lr=0.01))
    inputs = torch.randn(16, 8)
    for _ in range(5):
        for model, optimiser in zip((ours, plain), optimisers, strict=True):
            model.zero_grad()
            model(inputs).square().sum().backward()
            optimiser.step()
    torch.testing.assert_close(plain.weight, ours.weight)
    torch.testing.assert_close(plain.bias, ours.bias)


SAME_NETWORK = {
    "cifar10-ablation": "cifar10-vgg11",
    "cifar10-granularity": "cifar10-vgg11",
    "mnist-deep-balanced": "mnist-deep",
    "cgan-momentum": "cgan",
    "pong-variants": "pong",
}


@pytest.mark.parametrize(("device", "precision"), [("cuda", "float32"), ("cuda", "tf32"), ("cpu", "float32")])
def test_times_of_nero_list_match_the_record(device: str, precision: Precision):
    """To a tenth; tasks on one network share its time, and a task without a record has none."""
    path = RESULTS / f"suite-{device}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    found = {
        row["task"]: row["seconds_in_full"]
        for row in rows
        if row.get("side_by_side") == 1 and row["precision"] == precision
    }
    for name, task in suite.TASKS.items():
        wanted = found.get(SAME_NETWORK.get(name, name))
        assert task.seconds.on(device, precision) == (wanted if wanted is None else pytest.approx(wanted, rel=0.1)), (
            name
        )


def test_main_measures_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    noise = torch.Generator().manual_seed(0)

    def images(count: int) -> Images:
        pixels = torch.randint(256, (count, 1, 8, 8), generator=noise, dtype=torch.uint8)
        return Images(pixels[:1].expand_as(pixels), torch.arange(count) % 10)  # one image of all classes: unlearnable

    monkeypatch.setattr(trust, "load", lambda *_: ImageDataset("mnist", images(40), images(10), (0.5,), (0.25,)))
    task = replace(trust.TASKS["perceptron-5"], model=partial(mlp, 2, width=64))
    networks = (("perceptron of 2 layers", "perceptron-5", 20), ("other", "imagenet", 20))
    monkeypatch.setattr(trust, "NETWORKS", networks)
    monkeypatch.setattr(trust, "TASKS", dict.fromkeys(("perceptron-5", "imagenet"), task))
    record, figure = tmp_path / "trust.json", tmp_path / "trust.png"
    places = ["--out", str(tmp_path), "--figure", str(figure)]
    assert trust.main(places) == 0
    assert [row["network"] for row in json.loads(record.read_text())["rows"]] == ["perceptron of 2 layers"]
    assert trust.main(["--images", str(tmp_path), *places]) == 0
    rows = json.loads(record.read_text())["rows"]
    assert [row["network"] for row in rows] == ["perceptron of 2 layers", "other"]
    for row in rows:
        assert (row["layers"], row["depth"]) == (2, 2.0)
        assert all(a <= b <= c for a, b, c in zip(row["least"], row["median"], row["most"], strict=True))
        assert row["median"][0] < 0.1 < 0.5 < row["median"][-1]
        assert trust.ANGLES[0] < row["trusted"] < trust.ANGLES[-1]
    figure.unlink()
    assert trust.main(["--draw", *places]) == 0
    assert figure.stat().st_size > 10_000


def test_first_step_turns_neurons_and_restores_model():
    model = nero.balance_(torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = torch.randn(16, 64)
    change = trust.first_step(model, lambda model: model(inputs).square().mean())(0.01)
    assert set(change) == {"0.weight", "2.weight"}
    assert change["0.weight"].norm(dim=1) == pytest.approx(0.01, rel=0.1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_trusted_angle_is_where_change_passes_one():
    changes = [100 * angle for angle in trust.ANGLES]
    assert trust.trusted_angle(changes) == pytest.approx(0.01)
    assert trust.trusted_angle([angle**0.5 * 20 for angle in trust.ANGLES]) == pytest.approx(0.0025)
    for never in ([0.1] * len(changes), [2.0] * len(changes)):
        assert math.isnan(trust.trusted_angle(never))
