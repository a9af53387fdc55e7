"""Stable steps, relative steps and deep relative trust against gradients by hand, and inputs that are refused."""

import copy
import math

import pytest
import torch
from networks import linear_network, perceptron, solved_problem, sum_of_parameters, weights_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import nero
from nero import theory


def product(matrices: list[Tensor]) -> Tensor:
    """Return the last matrix times ... times the first."""
    return torch.linalg.multi_dot(matrices[::-1]) if len(matrices) > 1 else matrices[0]


def gradients_by_hand(weights: list[Tensor], slope: Tensor, inputs: Tensor) -> list[Tensor]:
    """Return the gradients of ⟨slope, W_L ... W_1 x⟩: (W_L ... W_{l+1})ᵀ slope (W_{l-1} ... W_1 x)ᵀ."""
    found = []
    for index in range(len(weights)):
        after = product([*weights[index + 1 :]]) if index + 1 < len(weights) else torch.eye(len(weights[-1])).double()
        before = product([*weights[:index]]) @ inputs if index else inputs
        found.append(after.T @ slope @ before.T)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_trust_of_linear_network_matches_matrix_products(seed: int):
    torch.manual_seed(seed)
    model = linear_network(4, 5, 3, 6, 2)
    inputs, slope = torch.randn(4, 7, dtype=torch.float64), torch.randn(2, 7, dtype=torch.float64)
    step = {name: 0.2 * torch.randn_like(weight) for name, weight in weights_of(model).items()}
    found = theory.deep_relative_trust(model, lambda model: (model(inputs.T).T * slope).sum(), step)
    weights = list(weights_of(model).values())
    before = gradients_by_hand(weights, slope, inputs)
    after = gradients_by_hand([w + d for w, d in zip(weights, step.values(), strict=True)], slope, inputs)
    bound = 1.0
    for row, w, d, a, b in zip(found.layers, weights, step.values(), before, after, strict=True):
        assert row.change == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-10)
        assert row.cosine == pytest.approx(float(-(d * a).sum() / d.norm() / a.norm()), rel=1e-10)
        bound *= 1 + float(d.norm() / w.norm())
    assert found.bound == pytest.approx(bound - 1, rel=1e-10)
    assert found.holds == all(row.change <= bound - 1 for row in found.layers)


@pytest.mark.parametrize("depth", [2, 5, 20])
@pytest.mark.parametrize("eta", [0.001, 0.01, 0.1])
def test_trust_holds_where_every_layer_grows(depth: int, eta: float):
    """Check ΔW = η W: each gradient changes by (1+η)^(L-1) - 1, just below the bound (1+η)^L - 1."""
    model = linear_network(*[3] * (depth + 1))
    grown = {name: eta * weight for name, weight in weights_of(model).items()}
    found = theory.deep_relative_trust(model, lambda model: model(torch.ones(2, 3).double()).sum(), grown)
    assert found.bound == pytest.approx((1 + eta) ** depth - 1, rel=1e-10)
    assert [row.change for row in found.layers] == pytest.approx([(1 + eta) ** (depth - 1) - 1] * depth, rel=1e-6)
    assert found.holds
    assert found.share(found.layers[0]) < 1
    assert "deep relative trust holds" in str(found)


def test_trust_can_be_broken():
    """Let W = diag(1, ε) and ΔW = diag(0, δ): small for the matrix, large for the path of the gradient."""
    model = linear_network(2, 2, 2)
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.diag(torch.tensor([1.0, 0.01])))
    step = {f"{index}.weight": torch.diag(torch.tensor([0.0, 0.1])).double() for index in range(2)}
    blind = torch.tensor([[0.0, 1.0]]).double()
    found = theory.deep_relative_trust(model, lambda model: model(blind)[0, 1], step)
    assert [row.change for row in found.layers] == pytest.approx([10.0, 10.0])
    assert found.bound == pytest.approx((1 + 0.1 / math.hypot(1, 0.01)) ** 2 - 1)
    assert not found.holds
    assert str(found).endswith("deep relative trust does not hold for this perturbation")


def test_biases_move_but_do_not_count_as_layers():
    model = perceptron(4, 5, 3, bias=True)
    step = {name: 0.1 * torch.ones_like(weight) for name, weight in weights_of(model).items()}

    def loss(model: nn.Module) -> Tensor:
        return model(torch.ones(2, 4).double()).square().sum()

    found = theory.deep_relative_trust(model, loss, step)
    assert [row.name for row in found.layers] == ["0.weight", "2.weight"]
    still = {name: change for name, change in step.items() if "weight" in name}
    assert theory.deep_relative_trust(model, loss, still).layers[0].change != found.layers[0].change
    counted = theory.deep_relative_trust(model, loss, step, kinds=("neuron", "bias"))
    assert len(counted.layers) == 4
    assert counted.bound > found.bound


def quadratic(model: nn.Module) -> Tensor:
    return 0.5 * model.weight.square().sum()


def test_trust_bound_that_overflows_is_infinite():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(50)]).double()
    step = {name: 1e8 * torch.randn_like(weight) for name, weight in weights_of(model).items()}
    found = theory.deep_relative_trust(model, lambda model: model(torch.ones(3, 4).double()).square().sum(), step)
    assert found.bound == math.inf
    assert found.holds
    assert str(found).splitlines()[2].split()[3:] == ["inf", "0"]


@pytest.mark.parametrize(("size", "stable"), [(0.1, True), (0.999, True), (1.001, False), (1.9, False), (-0.1, False)])
def test_step_on_quadratic_is_stable_up_to_minimum(size: float, stable: bool):
    model = nn.Linear(4, 3, bias=False, dtype=torch.float64)
    step = {"weight": -size * model.weight.detach()}
    (row,) = theory.relative_change(model, quadratic, step).layers
    assert row.change == pytest.approx(abs(size))
    assert row.size == pytest.approx(abs(size))
    assert row.cosine == pytest.approx(math.copysign(1, size))
    assert theory.is_stable_step(model, quadratic, step) == stable


def test_stable_step_decreases_loss():
    """Try steps of all sizes down the gradient of a network, checked on the whole way."""
    torch.manual_seed(0)
    model = perceptron(6, 8, 3, bias=True)
    inputs, labels = torch.randn(20, 6, dtype=torch.float64), torch.randint(3, (20,))

    def loss(model: nn.Module) -> Tensor:
        return cross_entropy(model(inputs), labels)

    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss(model), parameters)
    seen = set()
    for size in (0.01, 0.1, 1.0, 10.0, 100.0):
        step = {name: -size * gradient for name, gradient in zip(names, gradients, strict=True)}
        stable = theory.is_stable_step(model, loss, step, points=20)
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for name, parameter in moved.named_parameters():
                parameter.add_(step[name])
        if stable:
            assert loss(moved) < loss(model)
        seen.add(stable)
    assert seen == {True, False}


def test_step_stable_at_its_end_alone_may_climb():
    """Use a loss that climbs on the way and has the same slope at both ends: stable by Definition 3."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)

    def loss(model: nn.Module) -> Tensor:
        x = model.weight[0, 0]
        return 3 * x**2 - 2 * x**3 - 0.1 * x  # its slope is -0.1 at 0 and at 1

    step = {"weight": torch.tensor([[1.0, 0.0]], dtype=torch.float64)}
    assert theory.is_stable_step(model, loss, step)
    assert not theory.is_stable_step(model, loss, step, points=4)
    nn.init.ones_(model.weight)
    assert loss(model).item() == pytest.approx(0.9)


def test_step_without_gradient_is_not_stable():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 2, bias=False))
    first = {"0.weight": -1e-4 * torch.randn(3, 3)}
    rows = theory.relative_change(model, lambda model: model[0].weight.square().sum(), first).layers
    assert (rows[1].size, rows[1].change) == (0.0, 0.0)
    assert math.isnan(rows[1].cosine)
    assert rows[1].stable
    both = {**first, "1.weight": torch.ones(2, 3)}
    rows = theory.relative_change(model, lambda model: model[0].weight.square().sum(), both).layers
    assert not rows[1].stable
    printed = str(theory.relative_change(model, lambda model: model[0].weight.square().sum(), both))
    assert printed.endswith("not a stable step")
    assert printed.splitlines()[0].split() == ["layer", "|ΔW|/|W|", "|Δ∇|/|∇|", "cos", "θ", "stable"]


def test_unrequested_kinds_count_for_stability():
    model = nn.Linear(3, 2)
    step = {"weight": -0.1 * model.weight.detach(), "bias": -1.5 * model.bias.detach()}  # too long for the bias

    def loss(model: nn.Module) -> Tensor:
        return model.weight.square().sum() + model.bias.square().sum()

    found = theory.relative_change(model, loss, step, kinds=("neuron",))
    assert [layer.name for layer in found.layers] == ["weight"]
    assert found.layers[0].stable
    assert not found.stable
    assert str(found).endswith("not a stable step")
    assert found.stable == theory.is_stable_step(model, loss, step)
    assert theory.relative_change(model, loss, {"weight": step["weight"]}, kinds=("bias",)).stable


def test_relative_change_leaves_model_unchanged():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))
    inputs = torch.randn(9, 6)
    model(inputs).sum().backward()
    before, grads = copy.deepcopy(model.state_dict()), [each.grad.clone() for each in model.parameters()]
    state = torch.get_rng_state()
    step = {name: torch.randn_like(weight) for name, weight in weights_of(model).items()}
    torch.set_rng_state(state)
    theory.relative_change(model, lambda model: model(inputs).square().sum(), step, points=3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(each.grad, grad) for each, grad in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), state)

    def failing_loss(model: nn.Module) -> Tensor:
        if not torch.equal(model[0].weight, before["0.weight"]):
            raise KeyError("perturbed")
        return model(inputs).sum()

    with pytest.raises(KeyError, match="perturbed"):
        theory.relative_change(model, failing_loss, step)
    assert torch.equal(model[0].weight, before["0.weight"])


def test_step_lost_to_rounding_raises():
    """A thousandth of a weight is mostly lost in bfloat16; a change rounded to bfloat16 is not."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False).bfloat16()
    weights = model.weight.detach().clone()

    def loss(model):
        return model.weight.float().square().sum()

    with pytest.raises(ValueError, match=r"torch\.bfloat16 is too coarse for .* 'weight': measure a copy"):
        theory.relative_change(model, loss, {"weight": 0.001 * weights})
    assert torch.equal(model.weight, weights)
    rounded = (weights * 1.05).float() - weights.float()
    [found] = theory.relative_change(model, loss, {"weight": rounded}).layers
    assert found.change == pytest.approx((rounded.norm() / weights.float().norm()).item(), rel=1e-2)
    [found] = theory.relative_change(model.float(), loss, {"weight": 0.001 * weights.float()}).layers
    assert found.change == pytest.approx(0.001, rel=1e-3)
    with pytest.raises(ValueError, match=r"torch\.float32 is too coarse .*: measure a copy .* in float64, or a lon"):
        theory.relative_change(model, loss, {"weight": 1e-9 * weights.float()})


def test_perturbation_with_autograd_history_is_accepted():
    model = linear_network(3, 2)
    step = {"0.weight": 0.1 * model[0].weight}  # not detached
    found = theory.relative_change(model, lambda model: model[0].weight.square().sum(), step)
    assert (found.layers[0].change, found.layers[0].cosine) == pytest.approx((0.1, -1.0))


@pytest.mark.gpu
def test_perturbation_on_another_device_is_accepted():
    model = linear_network(3, 2).cuda()
    step = {"0.weight": 0.1 * model[0].weight.detach().cpu()}
    found = theory.relative_change(model, lambda model: model[0].weight.square().sum(), step)
    assert (found.layers[0].change, found.layers[0].cosine) == pytest.approx((0.1, -1.0))


@pytest.mark.parametrize(("weight", "scale"), [(1e-165, 1.0), (1e160, 1.0), (1.0, 1e-170), (1.0, 1e160)])
def test_step_whose_squares_overflow_is_measured(weight: float, scale: float):
    """All measurements are relative, so neither the scale of the weights nor of the loss matters."""
    torch.manual_seed(0)
    plain, step = nn.Linear(4, 3, bias=False, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    model = copy.deepcopy(plain)
    with torch.no_grad():
        model.weight.mul_(weight)

    def loss(model: nn.Module) -> Tensor:
        return scale * (model.weight / weight).pow(3).sum()

    def same(model: nn.Module) -> Tensor:
        return model.weight.pow(3).sum()

    for size in (0.01, 1.0):
        small, large = {"weight": weight * size * step}, {"weight": size * step}
        [found] = theory.relative_change(model, loss, small).layers
        [wanted] = theory.relative_change(plain, same, large).layers
        assert (found.size, found.change) == pytest.approx((wanted.size, wanted.change), rel=1e-12)
        assert found.cosine == pytest.approx(wanted.cosine, rel=1e-12)
        assert theory.relative_step(model, small).layer == pytest.approx(theory.relative_step(plain, large).layer)
    down = {"weight": -0.1 * model.weight.detach() * model.weight.detach().sign()}
    assert theory.is_stable_step(model, loss, down)
    assert not theory.is_stable_step(model, loss, {"weight": -down["weight"]})


def test_both_gradients_see_the_same_dropout():
    model = nn.Sequential(nn.Linear(50, 50), nn.Dropout(), nn.Linear(50, 1))
    step = {"0.weight": 1e-6 * torch.randn(50, 50)}
    rows = theory.relative_change(model, lambda model: model(torch.ones(4, 50)).sum(), step).layers
    assert max(row.change for row in rows) < 1e-3


def test_relative_step_matches_hand_computation():
    """Move neurons of norm 5 and 13 by 0.5 and 0.13, in a matrix of norm √194."""
    model = nn.Linear(2, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0], [5.0, 12.0]]))
        model.bias.copy_(torch.tensor([2.0, -4.0]))
    step = {
        "weight": torch.tensor([[0.3, 0.4], [0.13, 0.0]], dtype=torch.float64),
        "bias": torch.tensor([-0.1, 0.1], dtype=torch.float64),
    }
    found = theory.relative_step(model, step)
    weight, bias = found.layers
    assert (weight.neuron, weight.layer) == (pytest.approx(0.1), pytest.approx(math.hypot(0.5, 0.13) / math.sqrt(194)))
    assert (bias.neuron, bias.layer) == (pytest.approx(0.05), pytest.approx(math.sqrt(0.02 / 20)))
    assert found.neuron == pytest.approx(0.1)
    assert found.layer == weight.layer
    assert theory.is_per_neuron_relative(model, step, 0.1)
    assert not theory.is_per_neuron_relative(model, step, 0.0999)
    assert theory.is_per_neuron_relative(model, step, 0.0999, tolerance=0.001)
    assert theory.relative_step(model, {"bias": step["bias"]}).layers[0] == theory.LayerStep("weight", "neuron", 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_step_per_layer_is_at_most_step_per_neuron(seed: int):
    """Check Eq. (pnpl) on neurons of every layout."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Linear(5, 3), nn.BatchNorm2d(6))
    with torch.no_grad():
        model[3].bias.add_(1)
    step = {name: torch.rand(()) * torch.randn_like(weight) for name, weight in weights_of(model).items()}
    found = theory.relative_step(model, step)
    assert all(0 < row.layer <= row.neuron for row in found.layers)
    assert theory.is_per_neuron_relative(model, step, found.neuron)
    grouped = step["1.weight"].unflatten(0, (2, 2)).transpose(1, 2).flatten(2).norm(dim=2)
    sizes = model[1].weight.detach().unflatten(0, (2, 2)).transpose(1, 2).flatten(2).norm(dim=2)
    (row,) = [row for row in found.layers if row.name == "1.weight"]
    assert row.neuron == pytest.approx(float((grouped / sizes).max()), rel=1e-5)


def test_first_step_of_nero_is_per_neuron_relative():
    """At the first step ḡ is |g|, so a neuron moves by η before its projection, and by at most η after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.ReLU(), nn.Linear(30, 5, bias=False))
    optimiser = nero.Nero(model, lr=0.01)
    before = copy.deepcopy(model)
    model(torch.randn(8, 20)).square().sum().backward()
    optimiser.step()
    step = {name: weight - weights_of(before)[name] for name, weight in weights_of(model).items()}
    assert theory.is_per_neuron_relative(before, step, 0.0101)
    assert not theory.is_per_neuron_relative(before, step, 0.008)


def test_moving_zero_bias_is_infinitely_far():
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    assert theory.is_per_neuron_relative(model, {"weight": 1e-3 * model.weight.detach()}, 0.01)
    step = {"bias": torch.tensor([0.0, 1e-9])}
    assert theory.relative_step(model, step).neuron == math.inf
    assert not theory.is_per_neuron_relative(model, step, 1e6)


@pytest.mark.parametrize("eta", [0, -1, math.nan, True, "0.1"])
def test_eta_that_is_not_positive_raises(eta):
    with pytest.raises(ValueError, match="eta must be a positive number"):
        theory.is_per_neuron_relative(nn.Linear(3, 2), {"bias": torch.ones(2)}, eta)


def test_frozen_integer_parameter_is_ignored():
    model = nn.Linear(3, 2)
    model.table = nn.Parameter(torch.ones(2, 3, dtype=torch.int8), requires_grad=False)
    assert theory.is_per_neuron_relative(model, {"weight": 0.1 * model.weight.detach()}, 0.1)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model: model(torch.ones(2, 3)), "a tensor of one element"),
        (lambda _: 1.0, "a tensor of one element"),
        (lambda model: model(torch.ones(0, 3)).mean(), "must be finite, got nan.*is the batch empty"),
        (lambda model: torch.where(model.weight == 1, math.inf, model.weight).sum(), "got inf .*is the step too long"),
        (lambda _: torch.ones((), requires_grad=True), "does not depend on the parameters of the model"),
        (lambda _: torch.ones(()), "does not depend on the parameters of the model"),
        (lambda model: (0 * model.weight).sqrt().sum(), "gradient of 'weight' holds NaN or infinite values"),
    ],
)
def test_loss_that_is_not_one_finite_number_raises(loss, message):
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    with pytest.raises(ValueError, match=message):
        theory.relative_change(model, loss, {"weight": torch.ones(2, 3)})


def test_sparse_gradients_match_dense_gradients():
    table = nn.Embedding(5, 4)
    sparse = nn.Embedding(5, 4, sparse=True, _weight=table.weight.detach().clone())
    one, other = (
        theory.relative_change(
            each, lambda model: model(torch.tensor([1, 2])).square().sum(), {"weight": torch.ones(5, 4)}
        )
        for each in (table, sparse)
    )
    for dense, from_sparse in zip(one.layers, other.layers, strict=True):
        found, wanted = ((each.size, each.change, each.cosine) for each in (from_sparse, dense))
        assert found == pytest.approx(wanted)


def test_inference_mode_raises():
    model, inputs, labels = solved_problem()
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match=r"torch\.inference_mode\(\) records no gradients"):
            theory.robustness(model, (inputs, labels))
        with pytest.raises(RuntimeError, match=r"torch\.inference_mode\(\) records no gradients"):
            theory.relative_change(model, lambda model: model(inputs).sum(), {"weight": torch.ones(3, 4)})


def test_step_to_a_nonfinite_gradient_raises():
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    step = {"weight": -model.weight.detach().clone()}
    with pytest.raises(ValueError, match="gradient of 'weight' holds NaN or infinite values"):
        theory.is_stable_step(model, lambda model: (model.weight * model.weight).sqrt().sum(), step)
    assert torch.equal(model.weight, torch.ones(1, 2)), "the model is restored"


def test_loss_that_is_not_callable_raises():
    with pytest.raises(TypeError, match=r"loss must be a function of the model.*got 3"):
        theory.relative_change(nn.Linear(3, 2), 3, {"weight": torch.ones(2, 3)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"points": 0}, "points must be"),
        *(
            ({"kinds": kinds}, "kinds must be a collection of some of")
            for kinds in ("neuron", (), None, 3, [["gain"]], ["neurons"])
        ),
        ({"kinds": ("gain",)}, r"Linear has no trainable gain; nero\.describe"),
    ],
)
def test_relative_change_with_bad_option_raises(options, message):
    with pytest.raises(ValueError, match=message):
        theory.relative_change(nn.Linear(3, 2), sum_of_parameters, {"weight": torch.ones(2, 3)}, **options)


@pytest.mark.parametrize(
    ("perturbation", "error", "message"),
    [
        ([torch.ones(2, 3)], TypeError, "a dict from parameter names"),
        ({"weight": 1.0}, TypeError, "a dict from parameter names"),
        ({"wait": torch.ones(2, 3)}, ValueError, "'wait' is not a trained parameter.*has weight, bias"),
        ({"weight": torch.ones(3, 2)}, ValueError, r"must have shape \(2, 3\), got \(3, 2\)"),
        ({"weight": torch.full((2, 3), math.nan)}, ValueError, "NaN or infinite"),
        *(
            ({"weight": torch.ones(2, 3, dtype=dtype)}, TypeError, f"dense floating-point tensor, got {dtype}")
            for dtype in (torch.int64, torch.bool, torch.complex64)
        ),
        ({"weight": torch.ones(2, 3).to_sparse()}, TypeError, r"dense .* layout torch\.sparse_coo"),
        ({"weight": torch.zeros(2, 3)}, ValueError, "zero everywhere"),
        ({}, ValueError, "zero everywhere"),
    ],
)
def test_perturbation_that_does_not_fit_raises(perturbation, error, message):
    with pytest.raises(error, match=message):
        theory.relative_step(nn.Linear(3, 2), perturbation)
    with pytest.raises(error, match=message):
        theory.is_stable_step(nn.Linear(3, 2), sum_of_parameters, perturbation)
