"""Properties of every input (rulings 3 to 6 and 10), of the rule and of every backend."""

import functools
import inspect
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from interpreter import few
from torch import Tensor, nn

import nero
from nero import rule
from nero.balance import balance_tensor_
from nero.rule import norm, project

# examples run the same lines, which other tests cover
pytestmark = pytest.mark.no_cover

#: (shape, fan-in axes) of the weights of Linear, Conv1d, Conv2d, Embedding and a transposed linear layer.
WEIGHTS = [
    ((4, 5), (1,)),
    ((2, 2), (1,)),
    ((3, 2, 3), (1, 2)),
    ((2, 3, 3, 3), (1, 2, 3)),
    ((6, 8), (1,)),
    ((7, 3), (0,)),
]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

EVERY_FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False)
ORDINARY_FLOAT = st.floats(min_value=-10, max_value=10, width=32)
LARGEST = 2.0**120
#: Magnitudes whose rounding is relative, unlike that of subnormal numbers, and whose norms are finite.
NORMAL_FLOAT = st.floats(-LARGEST, LARGEST, width=32).map(lambda value: value if abs(value) > 1e-25 else 0.0)
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@st.composite
def weights(draw: st.DrawFn) -> tuple[Tensor, nero.Role]:
    """Draw a weight of any dtype, with elements of many magnitudes, or nearly constant."""
    dtype, (shape, axes) = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(WEIGHTS))
    size = math.prod(shape)
    if draw(st.booleans()):
        values = torch.tensor(draw(st.lists(NORMAL_FLOAT, min_size=size, max_size=size)), dtype=torch.float64)
    else:
        spacing = torch.finfo(dtype).eps * 2.0 ** draw(st.integers(0, 12))
        steps = torch.tensor(draw(st.lists(st.integers(-9, 9), min_size=size, max_size=size)))
        values = draw(NORMAL_FLOAT) * (1 + steps.double() * spacing)
    values = values.clamp(-LARGEST, LARGEST)
    return values.to(dtype).view(shape), nero.Role("neuron", axes).on(shape)


def bits(tensor: Tensor) -> Tensor:
    """View a tensor as integers, which tell apart what floats do not: the signs of zeros."""
    return tensor.detach().view(INTEGERS[tensor.element_size()])


@st.composite
def matrices(draw: st.DrawFn, elements: st.SearchStrategy[float], count: int = 1) -> list[Tensor]:
    """Draw float32 matrices of one shape, neurons in rows."""
    shape = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    size = shape[0] * shape[1]
    return [torch.tensor(draw(st.lists(elements, min_size=size, max_size=size))).view(shape) for _ in range(count)]


def given_each_backend(**strategies: st.SearchStrategy) -> Callable:
    """Run hypothesis's ``given`` on every backend."""

    def decorate(test: Callable[..., None]) -> Callable[[str], None]:
        @functools.wraps(test)
        def run(backend: str) -> None:
            examples = few(backend, 20, 4)
            settings(max_examples=examples)(given(**strategies)(test))(backend=backend)

        run.__signature__ = inspect.Signature([inspect.signature(test).parameters["backend"]])
        return run

    return decorate


def steps(backend: str, weight: Tensor, grads: list[Tensor], **options: object) -> tuple[Tensor, dict[str, Tensor]]:
    parameter = nn.Parameter(weight.clone())
    optimiser = nero.Nero([parameter], backend=backend, **options)
    for grad in grads:
        parameter.grad = grad.clone()
        optimiser.step()
    return parameter.detach(), optimiser.state[parameter]


@given(matrices(EVERY_FLOAT))
def test_projection_is_balanced_and_nearly_idempotent(drawn: list[Tensor]):
    (weight,) = drawn
    once, possible = project(weight, (1,))
    assert once.isfinite().all()
    rows = possible[:, 0]
    # the mean of a nearly constant neuron is as inaccurate as its elements, relative to what is left of them
    exact = weight.double()[rows]
    apart = torch.linalg.vector_norm(exact - exact.mean(1, keepdim=True), dim=1)
    coarse = torch.finfo(torch.float32).eps * exact.abs().amax(1) / apart
    if weight.shape[1] > 2:
        sums = once.double().sum(1)[rows]
        assert (sums.abs() <= 1e-6 * math.sqrt(weight.shape[1]) + weight.shape[1] * coarse).all()
    sizes = torch.linalg.vector_norm(once.double(), dim=1)[rows]
    assert ((sizes - 1).abs() <= 1e-6).all()
    assert torch.equal(once[~rows], weight[~rows])
    twice, still = project(once, (1,))
    assert ((twice - once)[rows].abs().amax(1) <= 1e-6 + (coarse if weight.shape[1] > 2 else 0)).all()
    assert still[rows].all()


@given(matrices(ORDINARY_FLOAT), st.sampled_from([1e-20, 1e-10, 1e10, 1e20]))
def test_projection_does_not_depend_on_the_scale(drawn: list[Tensor], factor: float):
    (weight,) = drawn
    weight = torch.where(weight.abs() < 1e-3, 0.0, weight)
    plain, possible = project(weight, (1,))
    scaled, also = project(weight * factor, (1,))
    rows = (possible & also)[:, 0]
    spread = (weight - weight.mean(1, keepdim=True)).norm(dim=1) / weight.norm(dim=1).clamp_min(1e-30)
    rows &= spread > 1e-3  # a nearly constant neuron is mostly rounding error
    torch.testing.assert_close(scaled[rows], plain[rows], rtol=0, atol=1e-4)


@given(matrices(EVERY_FLOAT))
def test_norm_is_accurate_over_the_range_of_float32(drawn: list[Tensor]):
    (values,) = drawn
    wanted = torch.linalg.vector_norm(values.double(), dim=1, keepdim=True)
    assume(float(wanted.max()) < 3e38)
    assume(float(wanted[wanted > 0].min()) > 1e-36 if (wanted > 0).any() else True)
    torch.testing.assert_close(norm(values, (1,)).double(), wanted, rtol=1e-6, atol=0)


@given_each_backend(
    drawn=matrices(EVERY_FLOAT, 3),
    lr=st.sampled_from([1e-8, 0.01, 1.0, 30.0]),
    flags=st.sampled_from(
        [{}, {"fix_mean": False}, {"fix_norm": False}, {"fix_norm": "initial"}, {"fix_mean": False, "fix_norm": False}]
    ),
)
def test_finite_input_gives_finite_neurons(backend: str, drawn: list[Tensor], lr: float, flags: dict):
    weight, *grads = drawn
    found, state = steps(backend, weight, grads, lr=lr, **flags)
    assert found.isfinite().all()
    assert state["grad_norm"].isfinite().all()


@given_each_backend(drawn=matrices(EVERY_FLOAT, 3))
def test_finite_input_gives_finite_gains(backend: str, drawn: list[Tensor]):
    gain, *grads = (each.flatten() for each in drawn)
    found, state = steps(backend, gain, list(grads))
    assert found.isfinite().all()
    assert state["grad_norm"].isfinite().all()


@given_each_backend(drawn=matrices(ORDINARY_FLOAT, 4), factor=st.sampled_from([1e-25, 1e-12, 1e12, 1e25]))
def test_loss_scale_does_not_change_the_trajectory(backend: str, drawn: list[Tensor], factor: float):
    """Ruling 5. Elements that a factor of 1e-25 would move out of float32 are taken as zero."""
    weight, *grads = (torch.where(each.abs() < 1e-3, 0.0, each) for each in drawn)
    results = []
    for scale in (1.0, factor):
        neurons, gains = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
        optimiser = nero.Nero([{"params": [neurons]}, {"params": [gains], "role": "gain"}], backend=backend)
        for grad in grads:
            neurons.grad, gains.grad = grad * scale, grad * scale
            optimiser.step()
        results.append(torch.cat([neurons.detach(), gains.detach()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@given_each_backend(drawn=matrices(EVERY_FLOAT, 2), rows=st.lists(st.booleans(), min_size=4, max_size=4))
def test_zero_gradient_changes_no_bit(backend: str, drawn: list[Tensor], rows: list[bool]):
    """Ruling 4, also for signed zeros, and beside neurons that move."""
    weight, grad = drawn
    still = torch.tensor(rows[: len(weight)])
    parameter = nn.Parameter(weight.clone())
    optimiser = nero.Nero([parameter], backend=backend)
    entered = parameter.detach().clone()
    parameter.grad = torch.where(still[:, None], 0.0, grad)
    optimiser.step()
    assert torch.equal(parameter.detach()[still].view(torch.int32), entered[still].view(torch.int32))


@given_each_backend(drawn=matrices(EVERY_FLOAT, 2))
def test_lr_zero_changes_no_bit(backend: str, drawn: list[Tensor]):
    weight, grad = drawn
    for lr in (0.0, torch.tensor(0.0)):
        parameter = nn.Parameter(weight.clone())
        optimiser = nero.Nero([parameter, bias := nn.Parameter(weight[0].clone())], lr=lr, backend=backend)
        entered = parameter.detach().clone()
        parameter.grad, bias.grad = grad, grad[0].clone()
        optimiser.step()
        assert torch.equal(parameter.detach().view(torch.int32), entered.view(torch.int32))
        assert torch.equal(bias.detach().view(torch.int32), weight[0].view(torch.int32))


@given_each_backend(
    drawn=matrices(ORDINARY_FLOAT, 3),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
    where=st.tuples(st.integers(0, 3), st.integers(0, 5)),
)
def test_nonfinite_element_skips_one_neuron_for_one_step(backend: str, drawn: list[Tensor], bad: float, where: tuple):
    """Ruling 6: other neurons step as usual, and the next step moves all neurons."""
    weight, grad, after = drawn
    row, column = where[0] % weight.shape[0], where[1] % weight.shape[1]
    clean, state = steps(backend, weight, [grad])
    bad_grad = grad.clone()
    bad_grad[row, column] = bad
    parameter = nn.Parameter(weight.clone())
    optimiser = nero.Nero([parameter], backend=backend)
    entered = parameter.detach().clone()
    parameter.grad = bad_grad
    optimiser.step()
    others = torch.arange(len(weight)) != row
    torch.testing.assert_close(parameter.detach()[others], clean[others], rtol=0, atol=1e-6)
    torch.testing.assert_close(optimiser.state[parameter]["grad_norm"][others], state["grad_norm"][others])
    assert torch.equal(parameter.detach()[row], entered[row])
    assert optimiser.state[parameter]["grad_norm"][row].item() == 0
    assert optimiser.skipped == {"parameter 0 of group 0": 1}
    parameter.grad = after + torch.linspace(1, 2, weight.shape[1])  # neither zero nor constant
    before = parameter.detach().clone()
    optimiser.step()
    assert not torch.equal(parameter.detach()[row], before[row])
    assert optimiser.skipped == {"parameter 0 of group 0": 1}


@given(matrices(ORDINARY_FLOAT, 2), st.floats(1e-4, 0.1))
def test_step_turns_a_balanced_neuron_by_the_angle_lr(drawn: list[Tensor], lr: float):
    """Section 4: for a gradient at right angles to a balanced neuron, tan(angle) is lr."""
    weight, grad = (each.double() for each in drawn)
    assume(weight.shape[1] > 3)
    weight, possible = project(weight, (1,))
    aside = grad - (grad * weight).sum(1, keepdim=True) * weight
    aside = aside - aside.mean(1, keepdim=True)
    assume(float((norm(aside, (1,)) / norm(grad, (1,)).clamp_min(1e-30)).min()) > 1e-6)  # else mostly rounding error
    tangent, also = project(aside, (1,))
    tangent = tangent - (tangent * weight).sum(1, keepdim=True) * weight
    assume(bool(possible.all() and also.all()) and float(torch.linalg.vector_norm(tangent, dim=1).min()) > 0.5)
    new = rule.turn(weight, tangent, torch.zeros(len(weight), 1).double(), 1, axes=(1,), lr=lr, beta=0.999).parameter
    cosine = (new * weight).sum(1).clamp(-1, 1)
    torch.testing.assert_close(cosine.acos(), torch.full_like(cosine, math.atan(lr)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@given(drawn=weights(), fix_mean=st.booleans(), fix_norm=st.booleans())
def test_balancing_twice_changes_no_bit(device: str, drawn: tuple[Tensor, nero.Role], fix_mean: bool, fix_norm: bool):
    """Ruling 10."""
    weight, role = drawn
    once = balance_tensor_(weight.to(device, copy=True), role, fix_mean=fix_mean, fix_norm=fix_norm)
    twice = balance_tensor_(once.clone(), role, fix_mean=fix_mean, fix_norm=fix_norm)
    assert torch.equal(bits(twice), bits(once))


@given(drawn=weights())
def test_balancing_twice_to_the_initial_norm_changes_no_bit(drawn: tuple[Tensor, nero.Role]):
    weight, role = drawn
    parameter = nn.Parameter(weight.clone())
    group = {"params": [parameter], "role": "neuron", "fan_in_axes": role.fan_in_axes}
    nero.Nero([group], fix_norm="initial")
    once = parameter.detach().clone()
    nero.Nero([{**group, "params": [parameter]}], fix_norm="initial")
    assert torch.equal(bits(parameter), bits(once))


def layer_of(kind: str, dtype: torch.dtype, values: list[float]) -> nn.Module:
    """Make a layer whose weight has the given elements, on top of a fixed pattern that no neuron cancels."""
    layers = {
        "linear": lambda: nn.Linear(6, 2),
        "conv": lambda: nn.Conv1d(2, 2, 3),
        "embedding": lambda: nn.Embedding(2, 6),
    }
    layer = layers[kind]().to(dtype)
    pattern = torch.tensor([1.0, -2.0, 4.0, -8.0, 16.0, 32.0]) * 10
    with torch.no_grad():
        layer.weight.copy_((torch.tensor(values).view(2, 6) + pattern).view(layer.weight.shape))
    return layer


@given_each_backend(
    kind=st.sampled_from(["linear", "conv", "embedding"]),
    dtype=st.sampled_from(DTYPES),
    values=st.lists(ORDINARY_FLOAT, min_size=12, max_size=12),
    grads=st.lists(st.lists(ORDINARY_FLOAT, min_size=12, max_size=12), max_size=3),
    lr=st.sampled_from([1e-3, 0.01, 0.1]),
)
@pytest.mark.filterwarnings("ignore:.*loses most of a step")  # not of balancing
def test_balancing_after_steps_changes_no_bit(
    backend: str, kind: str, dtype: torch.dtype, values: list[float], grads: list[list[float]], lr: float
):
    """Ruling 10: a loaded model that is balanced again, or enters another optimiser, resumes exactly."""
    assume(backend != "triton" or dtype != torch.float64)
    layer = layer_of(kind, dtype, values)
    optimiser = nero.Nero(layer, lr=lr, backend=backend)
    for elements in grads:
        layer.weight.grad = torch.tensor(elements, dtype=dtype).view(layer.weight.shape)
        optimiser.step()
    stepped = bits(layer.weight).clone()
    nero.balance_(layer)
    assert torch.equal(bits(layer.weight), stepped)
    nero.Nero(layer)
    assert torch.equal(bits(layer.weight), stepped)


def test_balancing_after_first_step_of_constant_neuron(backend: str):
    """Ruling 10, where a step removes nearly all of a neuron: its constant part."""
    torch.manual_seed(0)
    layer = nn.Linear(9, 3, bias=False)
    nn.init.ones_(layer.weight)
    optimiser = nero.Nero(layer, lr=1e-3, backend=backend)
    layer.weight.grad = torch.randn(3, 9)
    optimiser.step()
    stepped = bits(layer.weight).clone()
    nero.balance_(layer)
    assert torch.equal(bits(layer.weight), stepped)
