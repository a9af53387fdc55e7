"""All loops: checkpoints that do not fit are named, and CUDA graphs of training steps."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from lab.helpers import TINY, RecordingObserver, finish, make_data, start_run
from torch import Tensor

from nero_lab.baselines import lamb
from nero_lab.data import DataError, pairs
from nero_lab.loops.cuda_graph import CapturedStep
from nero_lab.loops.supervised import Supervised
from nero_lab.loops.training import matmul_precision
from nero_lab.models.transformer import Translator, language_model
from nero_lab.protocol import SettingError
from nero_lab.store import Store, StoreError
from nero_lab.sweep import train
from nero_lab.tasks import TASKS

LOOPS = ("supervised", "adversarial", "agent")


@pytest.mark.parametrize(
    ("loop", "keys", "value", "cause"),
    [
        ("supervised", ["model", "0.weight"], None, "Missing key"),
        ("supervised", ["model", "0.weight"], torch.ones(2), "size mismatch"),
        ("supervised", ["model", "0.weight"], Tensor.half, "0.weight"),
        ("supervised", ["optimiser", "param_groups"], None, "'param_groups'"),
        ("supervised", ["optimiser", "param_groups"], [], "different number of parameter groups"),
        ("supervised", ["optimiser", "param_groups", 0, "betas"], None, "betas"),
        ("supervised", ["optimiser", "param_groups", 0, "eps"], torch.ones(2), "eps"),
        ("supervised", ["optimiser", "state", 0], None, "exp_avg"),
        ("supervised", ["optimiser", "state", 0, "exp_avg"], None, "exp_avg"),
        ("supervised", ["optimiser", "state", 0, "exp_avg"], torch.ones(1), "exp_avg"),
        ("supervised", ["optimiser", "state", 0, "exp_avg"], Tensor.double, "exp_avg"),
        ("supervised", ["optimiser", "state", 1, "exp_avg_sq"], 0.5, "exp_avg_sq"),
        ("supervised", ["generator"], torch.ones(2), ""),
        ("supervised", ["totals"], torch.ones(3), "totals"),
        ("supervised", ["totals"], 0.5, "totals"),
        ("supervised", ["curve", "test_loss"], None, "test_loss"),
        ("adversarial", ["pair"], None, "'pair'"),
        ("adversarial", ["pair", "generator.first.bias"], torch.ones(2), "size mismatch"),
        ("adversarial", ["optimisers", "generator"], None, "'generator'"),
        ("adversarial", ["optimisers", "generator", "state", 0], None, "exp_avg"),
        ("adversarial", ["totals"], torch.ones(()), "totals"),
        ("adversarial", ["random"], None, "'random'"),
        ("adversarial", ["curve", "generator_loss"], None, "generator_loss"),
        ("agent", ["model", "actor.bias"], torch.ones(2), "size mismatch"),
        ("agent", ["optimiser", "state", 0], None, "exp_avg"),
        ("agent", ["curve", "reward"], None, "reward"),
        ("agent", ["arcade"], None, "'arcade'"),
        ("agent", ["arcade", "episodes"], None, "'episodes'"),
        ("agent", ["arcade", "actions"], [], ""),
        ("agent", ["arcade", "returns", 0], None, "returns"),
        ("agent", ["round", "values"], torch.ones(5), "values"),
        ("agent", ["round", "actions"], Tensor.float, "actions"),
        ("agent", ["round", "frames"], None, "'frames'"),
    ],
)
def test_checkpoint_misfit_names_file_and_cause(loop, keys, value, cause, tmp_path):
    """Replace or remove a part of a checkpoint, as another version of the code might have written it."""
    store = Store(tmp_path)
    task, settings, data = start_run(loop, store)
    path = store.path(task, settings, ".checkpoint")
    state = torch.load(path, weights_only=True)
    part = state
    for key in keys[:-1]:
        part = part[key]
    before = part.pop(keys[-1])
    if value is not None:
        part[keys[-1]] = value(before) if callable(value) else value
    torch.save(state, path)
    content = path.read_bytes()
    with pytest.raises(StoreError, match=rf"{path} .*{cause}.*: delete it to start this run again") as raised:
        train(task, [settings], data, store, RecordingObserver())
    assert "\n" not in str(raised.value)
    assert path.read_bytes() == content


@pytest.mark.parametrize(("optimiser", "option"), [("nero", "depth"), ("sgd", "fused")])
def test_checkpoint_older_than_an_option_resumes(optimiser, option, tmp_path):
    settings, data = TINY.settings(optimiser, epochs=1), make_data()
    (whole,) = train(TINY, [settings], data, Store(tmp_path / "whole"), RecordingObserver())
    store = Store(tmp_path / "older")
    training = Supervised(TINY, settings, data)
    training.advance()
    store.save(training)
    path = store.path(TINY, settings, ".checkpoint")
    state = torch.load(path, weights_only=True)
    for group in state["optimiser"]["param_groups"]:
        del group[option]
    torch.save(state, path)
    (resumed,) = train(TINY, [settings], data, store, RecordingObserver())
    assert resumed["curve"] == whole["curve"]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("_build", KeyError),
        ("restore", torch.OutOfMemoryError),
        ("restore", SettingError),
        ("restore", DataError),
    ],
)
def test_unrelated_error_is_not_blamed_on_checkpoint(loop, where, error, tmp_path, monkeypatch):
    def fail(*_):
        raise error("of its own")

    store = Store(tmp_path)
    task, settings, data = start_run(loop, store)
    kind = task.loop.func if task.loop else Supervised
    monkeypatch.setattr(kind, where, fail)
    with pytest.raises(error, match=r"^'?of its own'?$"):
        train(task, [settings], data, store, RecordingObserver())


def test_products_in_sets_and_restores_precision():
    before = torch.get_float32_matmul_precision()
    for name, precision in (("float32", "highest"), ("tf32", "high")):
        with matmul_precision(name):
            assert torch.backends.cudnn.enabled
            assert torch.backends.cudnn.benchmark
            assert torch.backends.cudnn.allow_tf32 == (name == "tf32")
            assert torch.get_float32_matmul_precision() == precision
    assert torch.get_float32_matmul_precision() == before


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
    def capturing(graph, pool, stream):
        assert (pool, stream) == ("pool", "stream")
        before, random = total.clone(), generator.get_state()
        yield
        total.copy_(before)
        generator.set_state(random)
        places.append(graph)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    step = CapturedStep(add, lambda: [total], "stream", generator=generator, pool="pool")
    capture = step._capture

    def capture_and_keep(held):
        graph, result = capture(held)
        graph.held = held
        return graph, result

    monkeypatch.setattr(step, "_capture", capture_and_keep)
    ones, expected = torch.ones(1), torch.Generator()
    for numbers in (ones, 2 * ones, torch.zeros(3), 2 * ones):
        step(numbers)
        torch.rand((), generator=expected)
    assert total == 5
    assert torch.equal(generator.get_state(), expected.get_state())
    assert list(step.graphs) == [((1,),), ((3,),)]
    assert len(places) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("contender", TINY.contenders)
def test_captured_steps_match_eager_steps(contender, monkeypatch):
    # the fastest kernels sum in any order, and batch norm on four images magnifies the difference
    flags = partial(torch.backends.cudnn.flags, deterministic=True)
    monkeypatch.setattr(torch.backends.cudnn, "flags", lambda **asked: flags(**{**asked, "benchmark": False}))
    monkeypatch.setattr(lamb, "MIN_KERNEL_ELEMENTS", 1)  # use its kernels, too
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
