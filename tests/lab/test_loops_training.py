"""Checkpoints of all loops: what does not fit is named, and unrelated errors are not blamed on them."""

import pytest
import torch
from lab.helpers import TINY, RecordingObserver, make_data, start_run
from torch import Tensor

from nero_lab.data import DataError
from nero_lab.loops.supervised import Supervised
from nero_lab.loops.training import matmul_precision
from nero_lab.protocol import SettingError
from nero_lab.store import Store, StoreError
from nero_lab.sweep import train

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
        ("supervised", ["optimiser", "state", 0, "step"], torch.ones(2), "step"),
        ("supervised", ["optimiser", "state", 1, "exp_avg_sq"], 0.5, "exp_avg_sq"),
        ("supervised", ["generator"], torch.ones(2), ""),
        ("supervised", ["totals"], torch.ones(1), "totals"),
        ("supervised", ["totals"], torch.ones(3), "totals"),
        ("supervised", ["totals"], Tensor.zero_, "totals"),
        ("supervised", ["totals"], 0.5, "totals"),
        ("supervised", ["curve", "test_loss"], None, "test_loss"),
        ("supervised", ["curve", "test_loss"], [1.0], "test_loss"),
        ("supervised", ["epoch"], 1, "train_loss"),
        ("supervised", ["epoch"], 4, "epoch 4"),
        ("supervised", ["step"], 4, "step 4"),
        ("adversarial", ["epoch"], 99, "epoch 99"),
        ("adversarial", ["pair"], None, "'pair'"),
        ("adversarial", ["pair", "generator.first.bias"], torch.ones(2), "size mismatch"),
        ("adversarial", ["pair", "generator.first.bias"], Tensor.bfloat16, "first.bias"),
        ("adversarial", ["optimisers", "generator"], None, "'generator'"),
        ("adversarial", ["optimisers", "generator", "state", 0], None, "exp_avg"),
        ("adversarial", ["optimisers", "generator", "state", 0, "exp_avg"], torch.ones(1), "exp_avg"),
        ("adversarial", ["totals"], torch.ones(()), "totals"),
        ("adversarial", ["random"], None, "'random'"),
        ("adversarial", ["curve", "generator_loss"], None, "generator_loss"),
        ("agent", ["step"], 10**6, "step 1000000"),
        ("agent", ["model", "actor.bias"], torch.ones(2), "size mismatch"),
        ("agent", ["model", "actor.bias"], Tensor.double, "actor.bias"),
        ("agent", ["optimiser", "state", 0], None, "exp_avg"),
        ("agent", ["optimiser", "state", 0, "exp_avg"], torch.ones(1), "exp_avg"),
        ("agent", ["curve", "reward"], None, "reward"),
        ("agent", ["arcade"], None, "'arcade'"),
        ("agent", ["arcade", "episodes"], None, "'episodes'"),
        ("agent", ["arcade", "actions"], [], ""),
        ("agent", ["arcade", "returns", 0], None, "returns"),
        ("agent", ["totals"], torch.ones(1), "totals"),
        ("agent", ["round", "values"], torch.ones(5), "values"),
        ("agent", ["round", "outcomes"], torch.ones(2, 1), "outcomes"),
        ("agent", ["round", "actions"], Tensor.float, "actions"),
        ("agent", ["round", "frames"], None, "'frames'"),
        ("agent", ["round", "returns"], None, "'returns'"),
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
