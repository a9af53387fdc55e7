"""What must hold for every input (rulings 3 to 6), on the rule and on every backend."""

import functools
import inspect
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from interpreter import few
from torch import Tensor

import nero
from nero import rule
from nero.rule import norm, project

# a hundred examples go by the lines of one, which other tests cover
pytestmark = pytest.mark.no_cover

EVERY_FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False)
ORDINARY_FLOAT = st.floats(min_value=-10, max_value=10, width=32)


@st.composite
def matrices(draw: st.DrawFn, entries: st.SearchStrategy[float], count: int = 1) -> list[Tensor]:
    """Some float32 matrices of one shape, neurons in rows."""
    shape = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    size = shape[0] * shape[1]
    return [torch.tensor(draw(st.lists(entries, min_size=size, max_size=size))).view(shape) for _ in range(count)]


def given_each_backend(**strategies: st.SearchStrategy) -> Callable:
    """Hypothesis's given, on every backend."""

    def decorate(test: Callable[..., None]) -> Callable[[str], None]:
        @functools.wraps(test)
        def run(backend: str) -> None:
            examples = few(backend, settings.default.max_examples, 8)
            settings(max_examples=examples)(given(**strategies)(test))(backend=backend)

        run.__signature__ = inspect.Signature([inspect.signature(test).parameters["backend"]])
        return run

    return decorate


def steps(backend: str, weight: Tensor, grads: list[Tensor], **options: object) -> tuple[Tensor, dict[str, Tensor]]:
    parameter = torch.nn.Parameter(weight.clone())
    optimiser = nero.Nero([parameter], backend=backend, **options)
    for grad in grads:
        parameter.grad = grad.clone()
        optimiser.step()
    return parameter.detach(), optimiser.state[parameter]


@given(matrices(EVERY_FLOAT))
def test_projection_is_balanced_and_idempotent(drawn: list[Tensor]):
    (weight,) = drawn
    once, possible = project(weight, (1,))
    assert once.isfinite().all()
    rows = possible[:, 0]
    # of a nearly constant neuron, the mean is as wrong as its entries are coarse beside what is left of them
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
def test_projection_does_not_know_the_scale(drawn: list[Tensor], factor: float):
    (weight,) = drawn
    weight = torch.where(weight.abs() < 1e-3, 0.0, weight)
    plain, possible = project(weight, (1,))
    scaled, also = project(weight * factor, (1,))
    rows = (possible & also)[:, 0]
    spread = (weight - weight.mean(1, keepdim=True)).norm(dim=1) / weight.norm(dim=1).clamp_min(1e-30)
    rows &= spread > 1e-3  # a nearly constant neuron is its own rounding
    torch.testing.assert_close(scaled[rows], plain[rows], rtol=0, atol=1e-4)


@given(matrices(EVERY_FLOAT))
def test_norm_is_right_over_the_whole_range(drawn: list[Tensor]):
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
def test_no_finite_input_gives_a_weight_that_is_not(backend: str, drawn: list[Tensor], lr: float, flags: dict):
    weight, *grads = drawn
    found, state = steps(backend, weight, grads, lr=lr, **flags)
    assert found.isfinite().all()
    assert state["grad_norm"].isfinite().all()


@given_each_backend(drawn=matrices(EVERY_FLOAT, 3))
def test_no_finite_input_gives_a_gain_that_is_not(backend: str, drawn: list[Tensor]):
    gain, *grads = (each.flatten() for each in drawn)
    found, state = steps(backend, gain, list(grads))
    assert found.isfinite().all()
    assert state["grad_norm"].isfinite().all()


@given_each_backend(drawn=matrices(ORDINARY_FLOAT, 4), factor=st.sampled_from([1e-25, 1e-12, 1e12, 1e25]))
def test_the_trajectory_does_not_know_the_loss_scale(backend: str, drawn: list[Tensor], factor: float):
    """Ruling 5. Entries that a factor of 1e-25 would push out of float32 are taken as zero."""
    weight, *grads = (torch.where(each.abs() < 1e-3, 0.0, each) for each in drawn)
    for role in ("neuron", "gain"):
        results = []
        for scale in (1.0, factor):
            parameter = torch.nn.Parameter(weight.clone())
            optimiser = nero.Nero([{"params": [parameter], "role": role}], backend=backend)
            for grad in grads:
                parameter.grad = grad * scale
                optimiser.step()
            results.append(parameter.detach())
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@given_each_backend(drawn=matrices(EVERY_FLOAT, 2), rows=st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_zero_gradient_changes_no_bit(backend: str, drawn: list[Tensor], rows: list[bool]):
    """Ruling 4, also with signed zeros, and next to neurons that do move."""
    weight, grad = drawn
    still = torch.tensor(rows[: len(weight)])
    parameter = torch.nn.Parameter(weight.clone())
    optimiser = nero.Nero([parameter], backend=backend)
    entered = parameter.detach().clone()
    parameter.grad = torch.where(still[:, None], 0.0, grad)
    optimiser.step()
    assert torch.equal(parameter.detach()[still].view(torch.int32), entered[still].view(torch.int32))


@given_each_backend(drawn=matrices(EVERY_FLOAT, 2))
def test_lr_zero_changes_no_bit(backend: str, drawn: list[Tensor]):
    weight, grad = drawn
    for lr in (0.0, torch.tensor(0.0)):
        parameter = torch.nn.Parameter(weight.clone())
        optimiser = nero.Nero([parameter, bias := torch.nn.Parameter(weight[0].clone())], lr=lr, backend=backend)
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
def test_one_bad_entry_stops_one_neuron_for_one_step(backend: str, drawn: list[Tensor], bad: float, where: tuple):
    """Ruling 6: the others are as if nothing had happened, and the next step moves all of them."""
    weight, grad, after = drawn
    row, column = where[0] % weight.shape[0], where[1] % weight.shape[1]
    clean, state = steps(backend, weight, [grad])
    spoilt_grad = grad.clone()
    spoilt_grad[row, column] = bad
    parameter = torch.nn.Parameter(weight.clone())
    optimiser = nero.Nero([parameter], backend=backend)
    entered = parameter.detach().clone()
    parameter.grad = spoilt_grad
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
def test_a_step_turns_a_balanced_neuron_by_about_lr(drawn: list[Tensor], lr: float):
    """Section 4: for a gradient at right angles to a balanced neuron, tan(angle) is lr."""
    weight, grad = (each.double() for each in drawn)
    assume(weight.shape[1] > 3)
    weight, possible = project(weight, (1,))
    aside = grad - (grad * weight).sum(1, keepdim=True) * weight
    aside = aside - aside.mean(1, keepdim=True)
    assume(float((norm(aside, (1,)) / norm(grad, (1,)).clamp_min(1e-30)).min()) > 1e-6)  # else it is rounding
    tangent, also = project(aside, (1,))
    tangent = tangent - (tangent * weight).sum(1, keepdim=True) * weight
    assume(bool(possible.all() and also.all()) and float(torch.linalg.vector_norm(tangent, dim=1).min()) > 0.5)
    new = rule.turn(weight, tangent, torch.zeros(len(weight), 1).double(), 1, axes=(1,), lr=lr, beta=0.999).parameter
    cosine = (new * weight).sum(1).clamp(-1, 1)
    torch.testing.assert_close(cosine.acos(), torch.full_like(cosine, math.atan(lr)), rtol=1e-6, atol=0)
