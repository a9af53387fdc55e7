"""Bounds of the robust angle against closed forms and brute force, and data for which it is undefined."""

import copy
import math
import re

import numpy as np
import pytest
import torch
from networks import limit_runs, perceptron, solved_problem, weights_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import nero
from nero import theory
from nero.theory.robustness import binomial_lower_bound


def separable_data(count: int, width: int, seed: int = 0) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(seed)
    neuron = nn.Linear(width, 1, bias=False, dtype=torch.float64)
    inputs = torch.randn(count, width, dtype=torch.float64) * torch.rand(count, 1, dtype=torch.float64) * 5
    return neuron, inputs, neuron(inputs)[:, 0].sign().long()


@pytest.mark.parametrize("fix_mean", [True, False])
@pytest.mark.parametrize("signs", [True, False])
def test_robustness_of_one_neuron_is_its_angular_margin(fix_mean: bool, signs: bool):
    """The hyperplane is asin(w·x / |w||x|) away from x; for a centred neuron, away from the centred x."""
    neuron, inputs, _ = separable_data(30, 6)
    if fix_mean:
        nero.balance_(neuron)
    w = neuron.weight.detach()[0]
    labels = (inputs @ w).sign().long()
    seen = inputs - inputs.mean(1, keepdim=True) if fix_mean else inputs
    angles = (labels * (seen @ w) / w.norm() / seen.norm(dim=1)).asin()
    found = theory.robustness(
        neuron, (inputs, labels if signs else labels.clamp(min=0)), fix_mean=fix_mean, tolerance=1e-4, rotations=20
    )
    assert found.lower <= float(angles.min()) <= found.upper
    assert found.lower == pytest.approx(float(angles.min()), rel=2e-4)
    assert found.upper == pytest.approx(float(angles.min()), rel=2e-4)
    assert found.example == int(angles.argmin())
    with torch.no_grad():
        neuron.weight.add_(found.witness["weight"])
    assert int(((neuron(inputs)[:, 0] * labels) <= 0).sum()) >= 1


def test_bias_changes_the_robust_angle():
    """The output w·x + b reaches zero where |x| cos(φ + α) = -b."""
    neuron = nn.Linear(2, 1, dtype=torch.float64)
    with torch.no_grad():
        neuron.weight.copy_(torch.tensor([[1.0, 0.0]]))
        neuron.bias.fill_(0.5)
    data = torch.tensor([[2.0, 0.0]]).double(), torch.tensor([1])
    found = theory.robustness(neuron, data, fix_mean=False, tolerance=1e-4, rotations=10)
    assert found.upper is None, "cos α = -1/4 is beyond π/2"
    assert found.lower == found.typical == found.limit == math.pi / 2
    assert "no rotation by up to 1.571 was found" in str(found)
    with torch.no_grad():
        neuron.bias.fill_(-0.5)
    found = theory.robustness(neuron, data, fix_mean=False, tolerance=1e-4, rotations=10)
    assert found.lower == pytest.approx(math.acos(0.25), rel=2e-4)
    assert found.upper == pytest.approx(math.acos(0.25), rel=2e-4)


def test_robustness_of_linear_classifier_is_where_cones_meet():
    """Two unit neurons at φ₁ and φ₂ from x tie where cos(φ₁ + α) = cos(φ₂ - α)."""
    model = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[math.cos(0.2), math.sin(0.2)], [math.cos(1.0), math.sin(1.0)]]))
    data = torch.tensor([[3.0, 0.0]]).double(), torch.tensor([0])
    found = theory.robustness(model, data, fix_mean=False, tolerance=1e-4, rotations=10)
    assert found.lower == pytest.approx(0.4, rel=2e-4)
    assert found.upper == pytest.approx(0.4, rel=2e-4)
    assert found.typical >= found.lower


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.ELU(), nn.LeakyReLU()], ids=str)
def test_brute_force_of_two_layers_lies_between_the_bounds(activation: nn.Module):
    """Try all rotations of three neurons in the plane."""
    model = nn.Sequential(
        nn.Linear(2, 2, bias=False, dtype=torch.float64), activation, nn.Linear(2, 1, bias=False, dtype=torch.float64)
    )
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.2], [0.1, 1.0]]))
        model[2].weight.copy_(torch.tensor([[1.0, -0.4]]))
    inputs = torch.tensor([[1.0, 0.2], [0.3, 1.4], [1.0, 1.2]]).double()
    labels = model(inputs)[:, 0].detach().sign().long()
    found = theory.robustness(model, (inputs, labels), fix_mean=False, tolerance=1e-3, rotations=50)
    assert 0 < found.lower <= found.upper < math.pi / 2

    def turned(neuron: Tensor, angle: float) -> Tensor:
        turns = torch.linspace(-angle, angle, 41).double()
        return torch.stack([turns.cos(), -turns.sin(), turns.sin(), turns.cos()], 1).view(-1, 2, 2) @ neuron

    def makes_error(angle: float) -> bool:
        one, other = (activation(inputs @ turned(neuron, angle).T) for neuron in model[0].weight.detach())
        last = turned(model[2].weight.detach()[0], angle)
        outputs = one[:, :, None, None] * last[:, 0] + other[:, None, :, None] * last[:, 1]
        return bool((outputs * labels[:, None, None, None] <= 0).any())

    assert not makes_error(found.lower)
    assert makes_error(found.upper * 1.01)
    least = (
        next(angle for angle in torch.linspace(0.5, 1.02, 105).tolist() if makes_error(angle * found.upper))
        * found.upper
    )
    assert found.lower <= least
    assert found.upper <= 1.03 * least, "the search is nearly as good as brute force"


def test_trained_deep_network_has_proof_and_witness():
    torch.manual_seed(0)
    inputs = torch.randn(40, 8, dtype=torch.float64)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    model = perceptron(8, 32, 32, 2)
    optimiser = nero.Nero(model, lr=0.02)
    for _ in range(300):
        optimiser.zero_grad()
        cross_entropy(5 * model(inputs), labels).backward()
        optimiser.step()
    before = weights_of(model)
    model.train()
    found = theory.robustness(model, (inputs, labels), rotations=20, examples=4)
    assert 0 < found.lower <= found.upper <= found.limit
    assert found.upper < found.typical, "the worst rotation is rare"
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    again = theory.robustness(model, (inputs, labels), rotations=20, examples=4)
    assert again == found, "one seed, one answer"
    # the witness turns neurons by at most the upper bound, keeps them balanced, and makes an error
    steps = theory.relative_step(model, found.witness)
    assert steps.neuron <= 2 * math.sin(found.upper / 2) + 1e-9
    turned = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in turned.named_parameters():
            parameter.add_(found.witness[name])
    assert nero.is_balanced(turned)
    assert int(turned(inputs)[found.example].argmax()) != int(labels[found.example])
    lines = str(found).splitlines()
    lower, upper = map(float, lines[0].split(" ≤ α ≤ "))
    assert lower <= found.lower <= found.upper <= upper
    assert re.search(r"with confidence 0\.95, at least 0\.\d+ of all such rotations make none$", lines[3])
    bound = theory.generalisation_bound(model, found.typical, 40, log_solutions=math.log(found.share))
    assert bound.exact.bound < theory.generalisation_bound(model, found.upper, 40).exact.bound
    assert bound.vacuous


def test_printed_robustness_is_rounded_to_the_safe_side():
    found = theory.Robustness(0.123456, 0.234512, 3, {}, 0.987654, 100, 3, 0.924379, 0.95, 1.0)
    assert str(found) == (
        "0.1234 ≤ α ≤ 0.2346\n"
        "  at least 0.1234: proved, layer by layer\n"
        "  at most 0.2346: a rotation by this angle gets example 3 wrong\n"
        "  of 100 random rotations by up to 0.9876, 3 made an error: "
        "with confidence 0.95, at least 0.9243 of all such rotations make none"
    )


def test_network_without_proof_has_witness():
    torch.manual_seed(0)
    convolutional = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
    nero.balance_(convolutional)
    inputs = torch.randn(20, 1, 8)
    convolutional.eval()
    labels = convolutional(inputs).argmax(1)
    found = theory.robustness(convolutional, (inputs, labels), rotations=20, examples=4)
    assert found.lower is None
    assert 0 < found.upper < math.pi / 2
    assert "no proof is known for such a network" in str(found)


def test_layer_run_twice_turns_in_both_places():
    torch.manual_seed(0)
    layer, norm = nn.Linear(6, 6, bias=False).double(), nn.BatchNorm1d(6).double()
    model = nn.Sequential(layer, norm, nn.ReLU(), layer, norm, nn.Linear(6, 3).double())
    nero.balance_(model)
    inputs = torch.randn(10, 6, dtype=torch.float64)
    before, weight, mean = copy.deepcopy(model.state_dict()), layer.weight, norm.running_mean
    theory.preactivations(model, inputs)
    labels = model.eval()(inputs).argmax(1)
    found = theory.robustness(model.train(), (inputs, labels), rotations=8, examples=2)
    assert layer.weight is weight
    assert norm.running_mean is mean
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        for name, parameter in model.eval().named_parameters():
            parameter.add_(found.witness.get(name, 0.0))
    assert int(model(inputs)[found.example].argmax()) != int(labels[found.example])


def test_neurons_at_the_origin_do_not_turn():
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    data = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([0])
    found = theory.robustness(model, data, fix_mean=False, rotations=10, tolerance=1e-3)
    assert found.lower == pytest.approx(math.pi / 2, rel=1e-3)


@pytest.mark.parametrize(("kept", "draws"), [(300, 300), (295, 300), (10, 300), (1, 5)])
def test_binomial_bound_is_clopper_pearson(kept: int, draws: int):
    """At the lower bound, at least this many successes have probability 0.05, by the binomial sum."""
    share = binomial_lower_bound(kept, draws, 0.95)
    tail = sum(math.comb(draws, k) * share**k * (1 - share) ** (draws - k) for k in range(kept, draws + 1))
    assert tail == pytest.approx(0.05, rel=1e-6)
    assert binomial_lower_bound(0, draws, 0.95) == 0
    if kept == draws:
        assert share == pytest.approx(0.05 ** (1 / draws))


def test_binomial_bound_covers_at_its_confidence():
    """Of the bounds from 4,000 experiments with a true share of 0.9, at least 95 % are below it."""
    kept = torch.distributions.Binomial(40, torch.tensor(0.9)).sample((4000,)).long().tolist()
    bounds = {count: binomial_lower_bound(count, 40, 0.95) for count in set(kept)}
    assert sum(bounds[count] <= 0.9 for count in kept) >= 0.95 * 4000 - 3 * math.sqrt(0.05 * 0.95 * 4000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, r"limit must be an angle in \(0, π/2\]"),
        ({"limit": 2.0}, r"limit must be an angle in \(0, π/2\]"),
        ({"rotations": 0}, "rotations must be an integer"),
        ({"examples": 1.5}, "examples must be an integer"),
        ({"steps": True}, "steps must be an integer"),
        *(({"seed": seed}, "seed must be an integer, got") for seed in ("a", 1.5, True, None)),
        ({"seed": 2**64}, "seed must be an integer of at most 64 bits"),
        ({"confidence": 1.0}, "confidence must be between 0 and 1"),
        ({"tolerance": 0}, "tolerance must be between 0 and 1"),
    ],
)
def test_robustness_with_bad_option_raises(options, message):
    model, inputs, labels = solved_problem()
    with pytest.raises(ValueError, match=message):
        theory.robustness(model, (inputs, labels), **options)


def test_search_with_tiny_tolerance_terminates():
    model, inputs, labels = solved_problem()
    limit_runs(model)
    fine = theory.robustness(model, (inputs, labels), rotations=1, examples=1, tolerance=1e-300)
    coarse = theory.robustness(model, (inputs, labels), rotations=1, examples=1)
    assert fine.upper == pytest.approx(coarse.upper, rel=0.01)


def test_search_with_nan_slope_terminates():
    """Finite inputs give a gradient norm that overflows float32."""
    model = nn.Linear(40, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(0.5, 1, 40))
    data = torch.full((3, 40), 3e38), torch.ones(3).long()
    limit_runs(model)
    found = theory.robustness(model, data, fix_mean=False, rotations=4, examples=2, steps=2)
    assert found.upper is None or 0 < found.upper <= found.limit


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64 - 1, np.int64(7)])
def test_seed_wraps_like_torch(seed):
    model, inputs, labels = solved_problem()
    found = theory.robustness(model, (inputs, labels), rotations=4, examples=1, seed=seed)
    same = torch.Generator().manual_seed(int(seed)).initial_seed()
    assert found == theory.robustness(model, (inputs, labels), rotations=4, examples=1, seed=same)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (lambda x, y: (x[:0], y[:0]), ValueError, "at least one, got 0 and 0"),
        (lambda x, y: (x[:3], y), ValueError, "as many inputs as labels, .*got 3 and 6"),
        (lambda x, _: x, TypeError, "a pair of tensors"),
        (lambda x, y: (x.sum(), y), TypeError, "inputs must have one example per row"),
        (lambda x, y: (x.double(), y), ValueError, r"fails on an example of torch\.float64 and shape \(1, 4\): "),
        (lambda x, y: (x[:, :3], y), ValueError, r"fails on an example of torch\.float32 and shape \(1, 3\): "),
        (lambda x, y: (x, y.tolist()), TypeError, "a pair of tensors"),
        (lambda x, y: (x, y.float()), TypeError, "labels must be integers"),
        (lambda x, y: (x, y + 2), ValueError, "labels must be from 0 to 2 for a model of 3 outputs"),
        (lambda x, y: (x, y - 1), ValueError, "labels must be from 0 to 2 for a model of 3 outputs"),
        (lambda x, y: (x, (y + 1) % 3), ValueError, "makes 6 errors on 6 examples, .*Definition 6.$"),
        (
            lambda x, y: (torch.cat([x, x[:1]]), torch.cat([y, (y[:1] + 1) % 3])),
            ValueError,
            "1 errors on 7 examples.*equal inputs have different labels",
        ),
    ],
)
def test_data_that_is_not_solved_raises(data, error, message):
    model, inputs, labels = solved_problem()
    with pytest.raises(error, match=message):
        theory.robustness(model, data(inputs, labels))


def test_tokens_are_accepted_as_examples():
    torch.manual_seed(0)
    model = nero.balance_(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)))
    tokens = torch.arange(5)
    labels = model(tokens).argmax(1)
    assert theory.robustness(model, (tokens, labels), rotations=2, examples=1).upper is not None
    with pytest.raises(ValueError, match=r"makes 5 errors on 5 examples, .*Definition 6.$"):
        theory.robustness(model, (tokens, 1 - labels))
    with pytest.raises(ValueError, match="equal inputs have different labels"):
        theory.robustness(model, (tokens[[0, 0]], torch.tensor([0, 1])))
    with pytest.raises(ValueError, match=r"torch\.int64 and shape \(1,\): index out of range"):
        theory.robustness(model, (tokens + 5, labels))


def test_more_classes_than_outputs_raise():
    for labels in ([0, 1, 2], [0, 1, -1]):
        with pytest.raises(ValueError, match=r"model of one output, got .* an output for each class"):
            theory.robustness(nero.balance_(nn.Linear(4, 1)), (torch.randn(3, 4), torch.tensor(labels)))


def test_outputs_that_are_not_one_row_per_example_raise():
    with pytest.raises(TypeError, match="one row of outputs per example"):
        theory.robustness(nero.balance_(nn.Conv1d(2, 3, 2)), (torch.randn(4, 2, 5), torch.zeros(4).long()))


class SignedRoot(nn.Module):
    """A signed square root whose gradient is NaN, from the branch that is not taken."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.where(inputs > 0, inputs.sqrt(), -(-inputs).sqrt())


@pytest.mark.parametrize(("activation", "scale"), [(SignedRoot(), 1.0), (nn.ReLU(), 2e38)], ids=["root", "overflow"])
def test_margin_with_nonfinite_gradient_raises(activation: nn.Module, scale: float):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), activation, nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        model[2].weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    data = torch.tensor([[scale, scale], [scale, -scale]]), torch.zeros(2).long()
    limit_runs(model)
    with pytest.raises(ValueError, match=r"gradient of '0\.weight', in the margin of example \d, .*NaN or infinite"):
        theory.robustness(model, data, fix_mean=False, rotations=4, examples=2, steps=2)


@pytest.mark.parametrize("closed", [torch.no_grad(), torch.inference_mode()], ids=["no_grad", "inference_mode"])
def test_model_that_runs_without_gradients_raises(closed):
    class Closed(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            with closed:
                return super().forward(inputs)

    model = nero.balance_(Closed(4, 3))
    inputs = torch.randn(6, 4)
    with pytest.raises(ValueError, match=r"have no gradient: .* without torch\.no_grad"):
        theory.robustness(model, (inputs, model(inputs).argmax(1)), rotations=4)


def test_neurons_off_centre_or_too_coarse_raise():
    _, inputs, labels = solved_problem()
    with pytest.raises(ValueError, match=r"means .* are not zero.*nero\.balance_.*fix_mean=False"):
        theory.robustness(nn.Linear(4, 3), (inputs, labels))
    with pytest.raises(TypeError, match=r"bfloat16, too coarse for angles: call model\.float\(\)"):
        theory.robustness(nn.Linear(4, 3).bfloat16(), (inputs, labels))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"bfloat16, too coarse .* autocast"):
        theory.robustness(nero.balance_(nn.Linear(4, 3)), (inputs, labels))
