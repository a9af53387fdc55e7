"""Statistics of pre-activations against direct computation."""

import copy
import math

import pytest
import torch
from networks import perceptron
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import nero
from nero import theory


def whitened_inputs(count: int, width: int, mean: float) -> Tensor:
    """Return a batch of exactly uncorrelated inputs with this mean and variance one."""
    raw = torch.randn(count, width, dtype=torch.float64)
    raw = raw - raw.mean(0)
    return mean + torch.linalg.qr(raw).Q * math.sqrt(count)


def test_balanced_neurons_standardise_whitened_inputs():
    """Check Section 3.1: uncorrelated inputs of mean μ and variance 1 give mean 0 and variance 1."""
    inputs = whitened_inputs(200, 30, mean=7.0)
    layer = nn.Linear(30, 12, bias=False, dtype=torch.float64)
    (before,) = theory.preactivations(layer, inputs).layers
    assert before.spread > 0.1
    (after,) = theory.preactivations(nero.balance_(layer), inputs).layers
    torch.testing.assert_close(after.means, torch.zeros(12, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(after.variances, torch.ones(12, dtype=torch.float64), atol=1e-12, rtol=0)
    assert (after.samples, after.layer) == (200, "Linear")


def test_table_shows_vanishing_activations_and_hides_rounding():
    layers = [each for _ in range(20) for each in (nn.Linear(64, 64), nn.ReLU())]
    for layer in layers[::2]:
        nn.init.zeros_(layer.bias)
    found = theory.preactivations(nn.Sequential(*layers), torch.randn(100, 64))
    last = str(found).splitlines()[-1].split()
    assert float(last[5]) == pytest.approx(found.layers[-1].variance, rel=0.01)
    assert 0 < found.layers[-1].variance < 1e-10
    exact = theory.preactivations(nero.balance_(nn.Linear(30, 12, bias=False).double()), whitened_inputs(200, 30, 7.0))
    assert str(exact).splitlines()[-1].split()[2:5] == ["0", "0", "1"]


def test_statistics_of_every_layer_type_match_direct_computation():
    torch.manual_seed(0)
    conv, up, head = nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Linear(6, 5)
    model = nn.Sequential(conv, nn.ReLU(), up, nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), head)
    batch = torch.randn(8, 2, 6, 6)
    found = theory.preactivations(model, batch)
    assert [each.name for each in found.layers] == ["0", "2", "6"]
    assert [each.samples for each in found.layers] == [8 * 16, 8 * 36, 8]
    sums = conv(batch)
    for row, wanted in zip(found.layers, (sums, up(sums.relu()), model(batch)), strict=True):
        by_neuron = wanted.detach().transpose(0, 1).flatten(1).double()
        torch.testing.assert_close(row.means, by_neuron.mean(1), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(row.variances, by_neuron.var(1, correction=0), atol=1e-6, rtol=1e-5)
        assert row.mean == pytest.approx(float(by_neuron.mean()), abs=1e-6)
        assert row.spread == pytest.approx(float(by_neuron.mean(1).square().mean().sqrt()), abs=1e-6)
        assert row.variance == pytest.approx(float(by_neuron.var(1, correction=0).mean()), abs=1e-6)
    lines = str(found).splitlines()
    assert lines[0].split()[:4] == ["layer", "class", "neurons", "mean"]
    assert lines[3].split()[:3] == ["2", "ConvTranspose2d", "6"]


class InPlaceAdd(nn.Module):
    """A layer that adds in place, as many residual networks do."""

    def forward(self, inputs: Tensor) -> Tensor:
        inputs += 3
        return inputs


@pytest.mark.parametrize("after", [nn.ReLU(inplace=True), InPlaceAdd()], ids=["relu", "sum"])
def test_in_place_layer_after_keeps_statistics(after: nn.Module):
    torch.manual_seed(0)
    layer, batch = nero.balance_(nn.Linear(100, 50, bias=False)), torch.randn(1000, 100)
    (wanted,) = theory.preactivations(layer, batch).layers
    found, _ = theory.preactivations(nn.Sequential(layer, after, nn.Linear(50, 10)), batch).layers
    torch.testing.assert_close(found.means, wanted.means)
    torch.testing.assert_close(found.variances, wanted.variances)


def test_preactivations_leave_model_and_batch_unchanged():
    model = nn.Sequential(InPlaceAdd(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    batch = torch.zeros(9, 6)
    theory.preactivations(model, batch)
    assert not batch.any()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())


def test_layers_run_twice_are_pooled_and_recurrent_left_out():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(7, 4)
            self.layer = nero.centred_weight_norm(nn.Linear(4, 4))
            self.rnn = nn.RNN(4, 3, batch_first=True)

        def forward(self, tokens: Tensor, shift: float) -> Tensor:
            return self.rnn(self.layer(self.layer(self.table(tokens) + shift)))[0]

    model = Twice()
    found = theory.preactivations(model, (torch.randint(7, (5, 6)), 0.5))
    (row,) = found.layers
    assert (row.name, row.layer, row.samples) == ("layer", "Linear", 2 * 30)
    assert found.left_out == ("table.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0")
    assert str(found).endswith("not measured: table.weight, rnn.weight_ih_l0, rnn.weight_hh_l0")


def test_tied_and_frozen_layers_are_measured():
    table, encoder, decoder, frozen = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    head, unseen = nn.Linear(4, 7, bias=False), nn.Embedding(3, 4)
    decoder.weight, head.weight = encoder.weight, table.weight
    model = nn.Sequential(table, encoder, decoder, frozen, encoder, head)
    model.add_module("unseen", unseen.requires_grad_(False))
    frozen.requires_grad_(False)
    model.forward = lambda tokens: nn.Sequential(*list(model)[:-1])(tokens)
    found = theory.preactivations(model, torch.randint(7, (9,)))
    assert [(row.name, row.samples) for row in found.layers] == [("1", 18), ("2", 9), ("3", 9), ("5", 9)]
    assert found.left_out == ("0.weight", "unseen.weight")
    evaluated = nero.balance_(nn.Linear(4, 3)).requires_grad_(False)
    assert theory.preactivations(evaluated, torch.randn(5, 4)).layers[0].samples == 5


def test_layer_that_returns_no_tensor_is_left_out():
    class Pair(nn.Linear):
        def forward(self, inputs: Tensor) -> tuple[Tensor, None]:
            return super().forward(inputs), None

    class First(nn.Module):
        def forward(self, pair: tuple[Tensor, None]) -> Tensor:
            return pair[0]

    found = theory.preactivations(nn.Sequential(Pair(4, 4), First(), nn.Linear(4, 3)), torch.randn(5, 4))
    assert [row.name for row in found.layers] == ["2"]
    assert found.left_out == ("0.weight",)


def compile_part(model: nn.Sequential) -> nn.Module:
    model[2] = torch.compile(model[2], backend="eager")
    return model


@pytest.mark.parametrize(
    "compiled", [lambda model: torch.compile(model, backend="eager"), compile_part], ids=["whole", "in part"]
)
def test_compiled_model_is_measured(compiled):
    inputs = torch.randn(9, 4, dtype=torch.float64)
    plain = perceptron(4, 6, 3)
    model = compiled(copy.deepcopy(plain))
    with torch.no_grad():
        model(inputs)  # compiles it without hooks
    for row, wanted in zip(*(theory.preactivations(each, inputs).layers for each in (model, plain)), strict=True):
        assert row.name.replace("_orig_mod", "").strip(".") == wanted.name
        torch.testing.assert_close(row.means, wanted.means)


@pytest.mark.parametrize("norm", [weight_norm, nero.centred_weight_norm])
def test_model_that_is_a_parametrised_layer_is_measured(norm):
    layer, inputs = norm(nn.Linear(8, 4)), torch.randn(9, 8)
    (row,) = theory.preactivations(layer, inputs).layers
    assert (row.name, row.layer, row.samples) == ("", "Linear", 9)
    torch.testing.assert_close(row.means.float(), layer(inputs).mean(0))


def test_unbatched_image_counts_its_positions():
    (row,) = theory.preactivations(nn.Conv2d(2, 4, 3), torch.randn(2, 6, 6)).layers
    assert (row.samples, row.means.numel()) == (16, 4)


@pytest.mark.parametrize("batch", [torch.zeros(0, 4), ()])
def test_empty_batch_raises(batch):
    with pytest.raises(ValueError, match="the batch is empty"):
        theory.preactivations(nn.Linear(4, 3), batch)


@pytest.mark.parametrize("batch", [torch.zeros(1, 4), torch.zeros(4)])
def test_batch_of_one_example_raises(batch):
    with pytest.raises(ValueError, match="one example, which has no variance"):
        theory.preactivations(nn.Linear(4, 3), batch)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_preactivations_raise(bad):
    batch = torch.ones(3, 4)
    batch[1, 2] = bad
    with pytest.raises(ValueError, match="layer '0' returns NaN or infinite values: check the batch"):
        theory.preactivations(nn.Sequential(nn.Linear(4, 3)), batch)


def test_model_without_observable_sums_raises():
    with pytest.raises(ValueError, match="no pre-activations can be observed"):
        theory.preactivations(nn.Embedding(4, 3), torch.tensor([1, 2]))
