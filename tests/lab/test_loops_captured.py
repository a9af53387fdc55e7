"""CUDA graphs of training steps."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from lab.helpers import TINY, finish, make_data

from nero_lab.baselines import lamb
from nero_lab.data import pairs
from nero_lab.loops.cuda_graph import CapturedStep
from nero_lab.loops.supervised import Supervised
from nero_lab.models.transformer import Translator, language_model
from nero_lab.tasks import TASKS


def test_captured_on_cpu_calls_function():
    seen = []
    step = CapturedStep(lambda one, two: seen.append(one + two), list, None)
    step(torch.ones(2), torch.ones(2))
    assert seen[0].tolist() == [2, 2]
    assert not step.graphs


def test_capture_restores_state_and_generator(monkeypatch):
    """Uses stand-ins for streams and graphs: a capture executes nothing, and a replay does."""
    total, generator, places = torch.zeros(()), torch.Generator(), []

    def add(numbers):
        assert total < 5  # warm-ups must not accumulate
        total.add_(numbers.sum() + 0 * torch.rand((), generator=generator))

    class Graph:
        def register_generator_state(self, registered):
            assert registered is generator

        def replay(self):
            add(*self.held)

    @contextmanager
    def capturing(graph, pool, stream, capture_error_mode):
        assert (pool, stream, capture_error_mode) == ("pool", "stream", "global")
        before, random = total.clone(), generator.get_state()
        yield
        total.copy_(before)
        generator.set_state(random)
        places.append(graph)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    step = CapturedStep(add, lambda: [total], "stream", generator=generator, pool="pool")
    capture = step._capture
    monkeypatch.setattr(step, "_capture", lambda held: (graph := capture(held), setattr(graph, "held", held))[0])
    ones, expected = torch.ones(1), torch.Generator()
    for numbers, kind in [(ones, None), (2 * ones, None), (torch.zeros(3), None), (ones, "last"), (ones, None)]:
        step(numbers, kind=kind)
        torch.rand((), generator=expected)
    assert total == 5
    assert torch.equal(generator.get_state(), expected.get_state())
    assert list(step.graphs) == [(None, (1,)), (None, (3,)), ("last", (1,))]
    assert len(places) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("contender", TINY.contenders)
def test_captured_steps_match_eager_steps(contender, monkeypatch):
    # the fastest kernels sum in any order, and batch norm on four images magnifies the difference
    flags = partial(torch.backends.cudnn.flags, deterministic=True)
    monkeypatch.setattr(torch.backends.cudnn, "flags", lambda **asked: flags(**{**asked, "benchmark": False}))
    monkeypatch.setattr(lamb, "LARGE", 1)  # use its kernels, too
    data, settings = make_data().to("cuda"), TINY.settings(contender)
    captured = finish(Supervised(TINY, settings, data))
    assert len(captured._learn.graphs) == 2  # for batches of eight, and for the last of four
    monkeypatch.setattr(CapturedStep, "__call__", lambda self, *inputs, **_: self.function(*inputs))
    plain = finish(Supervised(TINY, settings, data))
    assert captured.curve["train_loss"] == pytest.approx(plain.curve["train_loss"], rel=1e-3)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(captured.model.state_dict()[name], value, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("contender", TASKS["wikitext2"].contenders)
@pytest.mark.parametrize(("name", "graphs"), [("wikitext2", 1), ("translation", 2)])
def test_captured_text_steps_match_eager_steps(name, graphs, contender, monkeypatch):
    monkeypatch.setattr(pairs, "POSITIONS_MULTIPLE", 8)
    data = make_data(TASKS[name].dataset, examples=60).to("cuda")
    small = {"width": 16, "hidden": 16, "layers": 1}
    models = {"wikitext2": partial(language_model, 7, **small), "translation": partial(Translator, 14, **small)}
    task = replace(TASKS[name], model=models[name], batch=10 if name == "translation" else 20)
    settings = task.settings(contender, epochs=2)
    captured = finish(Supervised(task, settings, data))
    assert len(captured._learn.graphs) >= graphs
    monkeypatch.setattr(CapturedStep, "__call__", lambda self, *inputs, **_: self.function(*inputs))
    plain = finish(Supervised(task, settings, data))
    for name, values in plain.curve.items():
        assert captured.curve[name] == pytest.approx(values, rel=1e-3, abs=2e-3)
