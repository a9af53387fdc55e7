"""The proof of a robust angle, and the networks that have none."""

import math
import sys

import pytest
import torch
from networks import linear_network, perceptron, solved_problem
from torch import nn

import nero
from nero import theory


@pytest.mark.parametrize("seed", range(8))
def test_search_finds_no_rotation_below_the_proof(seed: int):
    """Compare the search with the proof on many kinds of networks."""
    torch.manual_seed(seed)
    fix_mean, bias, outputs = bool(seed % 2), seed % 3 == 0, (1, 2, 4)[seed % 3]
    model = perceptron(5, *[7] * (seed % 4), outputs, bias=bias)
    if fix_mean:
        nero.balance_(model)
    inputs = torch.randn(15, 5, dtype=torch.float64)
    with torch.no_grad():
        made = model(inputs)
    labels = made.argmax(1) if outputs > 1 else (made[:, 0] > 0).long()
    found = theory.robustness(model, (inputs, labels), fix_mean=fix_mean, rotations=8, examples=3, tolerance=0.02)
    assert 0 < found.lower <= found.upper * (1 + 1e-9)
    assert found.upper <= found.lower * 1.03 or seed % 4, "the proof is exact for one layer"


@pytest.mark.parametrize("fix_mean", [False, True])
@pytest.mark.parametrize(("shape", "width"), [((2, 1, 3), 3), ((6, 3, 8), 5), ((4, 2, 3, 4), 3)], ids=str)
def test_neurons_act_on_the_last_axis(shape: tuple[int, ...], width: int, fix_mean: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(shape[-1], width, bias=False), nn.Flatten()).double()
    nero.balance_(model, fix_mean=fix_mean)
    inputs = torch.randn(shape, dtype=torch.float64)
    data = inputs, model(inputs).argmax(1)
    found = theory.robustness(model, data, rotations=20, fix_mean=fix_mean, tolerance=1e-3)
    assert 0 < found.lower <= found.upper
    # one layer: the first example to fail does so where the cones of two neurons meet
    if shape[1] == 1 and not fix_mean:
        cones = [
            math.acos(float(inputs[row, 0] @ neuron / inputs[row, 0].norm()))
            for row in range(shape[0])
            for neuron in model[0].weight.detach()
        ]
        gaps = [sorted(cones[row * width : (row + 1) * width]) for row in range(shape[0])]
        assert found.lower == pytest.approx(min((second - first) / 2 for first, second, *_ in gaps), rel=2e-3)


@pytest.mark.parametrize(
    "activation",
    [
        nn.ReLU(),
        nn.ReLU6(),
        nn.Hardtanh(),
        nn.Tanh(),
        nn.Sigmoid(),
        nn.Softplus(),
        nn.Softsign(),
        nn.ELU(),
        nn.ELU(2.0, inplace=True),
        nn.LeakyReLU(),
        nn.LeakyReLU(0.0),
        nn.LeakyReLU(1.5, inplace=True),
        nn.SELU(),
        nn.CELU(0.3),
        nn.CELU(-0.3),
        nn.LogSigmoid(),
        nn.Hardsigmoid(),
        nn.Hardshrink(0.01),
        nn.Softshrink(0.01),
        nn.Tanhshrink(),
    ],
    ids=str,
)
def test_monotone_activation_has_proof(activation: nn.Module):
    torch.manual_seed(0)
    points = torch.linspace(-30, 30, 6_001, dtype=torch.float64)
    assert float(activation(points.clone()).diff().min()) > -1e-8, "not monotone"
    model = perceptron(4, 6, 3)
    model[1] = activation
    nero.balance_(model)
    inputs = torch.randn(10, 4, dtype=torch.float64)
    found = theory.robustness(model, (inputs, model(inputs).argmax(1)), rotations=2, examples=1)
    assert 0 < found.lower <= found.upper


@pytest.mark.parametrize(
    "activation",
    [
        nn.ELU(-1.0),
        nn.LeakyReLU(-0.1),
        nn.Softplus(threshold=0.1),
        nn.Softplus(beta=-1.0),
        nn.SiLU(),
        nn.GELU(),
        nn.Mish(),
    ],
    ids=str,
)
def test_activation_that_is_not_monotone_has_no_proof(activation: nn.Module):
    torch.manual_seed(0)
    model = perceptron(4, 6, 3)
    model[1] = activation
    nero.balance_(model)
    inputs = torch.randn(10, 4, dtype=torch.float64)
    found = theory.robustness(model, (inputs, model(inputs).argmax(1)), rotations=4, examples=1)
    assert found.lower is None


def test_first_layer_in_place_leaves_data_unchanged():
    torch.manual_seed(0)
    inputs = torch.randn(10, 4, dtype=torch.float64)
    found, before = [], inputs.clone()
    model = nero.balance_(linear_network(4, 3))
    for inplace in (False, True):
        whole = nn.Sequential(nn.LeakyReLU(0.5, inplace=inplace), model)
        labels = whole(before.clone()).argmax(1)
        found.append(theory.robustness(whole, (inputs, labels), rotations=8, examples=3))
        assert torch.equal(inputs, before)
    for bound in ("lower", "upper"):
        assert getattr(found[0], bound) == pytest.approx(getattr(found[1], bound))


def test_rounding_of_the_mean_has_no_part_in_the_proof():
    """Neurons are centred exactly, so even a large mean of the inputs neither makes nor prevents an error."""
    torch.manual_seed(0)
    model = nero.balance_(nn.Linear(4, 1, bias=False, dtype=torch.float64))
    inputs = torch.randn(6, 4, dtype=torch.float64)
    labels = (model(inputs)[:, 0] > 0).long()
    exact = theory.robustness(model, (inputs, labels), rotations=20, tolerance=1e-4)
    with torch.no_grad():
        model.weight += 2e-6
    initial = model.weight.detach().clone()
    shifted = inputs + torch.where(labels > 0, 1e4, -1e4)[:, None]  # a mean in favour of the label
    found = theory.robustness(model, (shifted, labels), rotations=20, tolerance=1e-4)
    assert (found.lower, found.upper) == pytest.approx((exact.lower, exact.upper), rel=1e-3)
    assert float((initial + found.witness["weight"]).mean()) == pytest.approx(0, abs=1e-15)
    against = inputs - torch.where(labels > 0, 1e6, -1e6)[:, None]
    with pytest.raises(ValueError, match="makes 6 errors on 6 examples"):
        theory.robustness(model, (against, labels))
    with pytest.raises(ValueError, match=r"decide some examples: call nero\.balance_"):
        theory.robustness(model, (against, 1 - labels))


def test_witness_below_the_proof_raises(monkeypatch: pytest.MonkeyPatch):
    model, inputs, labels = solved_problem()
    monkeypatch.setattr(sys.modules[theory.robustness.__module__], "is_certified", lambda *_: True)
    with pytest.raises(RuntimeError, match=r"proved to be at least 1\.571, but a rotation by .* makes an error"):
        theory.robustness(model, (inputs, labels), rotations=8, examples=2)


def test_proof_with_frozen_layers_and_hooks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), perceptron(4, 6, 3, bias=True))
    nero.balance_(model)
    inputs = torch.randn(10, 2, 2, dtype=torch.float64)
    data = inputs, model(inputs).argmax(1)
    whole = theory.robustness(model, data, rotations=10, examples=2)
    model[1][0].weight.requires_grad_(False)
    frozen = theory.robustness(model, data, rotations=10, examples=2)
    assert frozen.lower > whole.lower, "fewer neurons turn"
    assert set(frozen.witness) == {"1.2.weight"}
    handle = model[1][1].register_forward_hook(lambda *_: None)
    assert theory.robustness(model, data, rotations=10, examples=2).lower is None
    handle.remove()
    waiting = nero.Nero(model, lr="auto")  # its hook only measures
    assert theory.robustness(model, data, rotations=10, examples=2).lower == frozen.lower
    assert waiting.param_groups[0]["depth"] == "auto"


def tie_transposed_weight(model: nn.Sequential) -> None:
    """Make the last weight a transposed view of the first."""
    first, last = model[0], model[2]
    del last.weight
    last.weight = first.weight.T


def tie_bias(model: nn.Sequential) -> None:
    """Make the last bias a column of the first weight."""
    first, last = model[0], model[2]
    del last.bias
    last.bias = first.weight.detach()[:4, 0]


@pytest.mark.parametrize(
    "alter",
    [
        lambda model: setattr(model[1], "forward", torch.sin),
        lambda model: setattr(model[0], "forward", lambda inputs: inputs @ model[0].weight.detach().T),
        lambda model: setattr(model, "forward", lambda inputs: model[2](model[0](inputs).sin())),
        tie_transposed_weight,
        tie_bias,
    ],
    ids=["activation", "layer", "model", "weight", "bias"],
)
def test_altered_module_has_no_proof(alter):
    torch.manual_seed(0)
    model = nero.balance_(perceptron(4, 6, 4))
    alter(model)
    inputs = torch.randn(10, 4, dtype=torch.float64)
    found = theory.robustness(model, (inputs, model(inputs).argmax(1)), rotations=10, examples=2)
    assert found.lower is None
