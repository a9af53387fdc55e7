"""The rule and every backend against the oracle, over one table of cases."""

import functools

import pytest
import torch
from cases import CASES, ROUNDING, TOLERANCE, Case, Oracle
from interpreter import few
from torch import Tensor

import nero
from nero import rule

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
by_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@by_name
@by_dtype
def test_rule_agrees_with_oracle(case: Case, dtype: torch.dtype):
    """The rule is called directly, on weights that are not balanced."""
    generator = torch.Generator().manual_seed(1)
    role, parameter = case.role, case.start(generator, dtype)
    reference = Oracle(case, parameter)
    reference.read(parameter)  # the oracle too starts from what is there
    weights, average = role.view(parameter), torch.zeros((), dtype=dtype)
    if role.kind == "neuron":
        average = average.expand([1 if i in role.axes else n for i, n in enumerate(weights.shape)])
    else:
        average = average.expand(weights.shape)
    options = dict(case.options)
    lr = options.get("lr", 0.01) * (-1 if options.get("maximize") else 1)
    beta, skipped = options.get("beta", 0.999), 0
    for t in range(1, 8):
        grad = case.tensor(generator, dtype)
        reference.step(grad)
        if role.kind == "neuron":
            radius = torch.tensor(reference.radii, dtype=dtype).reshape(average.shape)
            weights, average, skipped_now, _ = rule.turn(
                weights,
                role.view(grad),
                average,
                t,
                axes=role.axes,
                lr=lr,
                beta=beta,
                longest=reference.longest,
                fix_mean=options.get("fix_mean", True),
                fix_norm=bool(options.get("fix_norm", True)),
                scale=options.get("scale"),
                radius=radius,
            )
        else:
            weights, average, skipped_now, _ = rule.nudge(
                weights,
                grad,
                average,
                t,
                lr=lr,
                beta=beta,
                scale=reference.sigma,
                longest=reference.longest,
                pull=reference.pull,
            )
        skipped += int(skipped_now.sum())
    state = {"grad_norm": average, "step": torch.tensor(7.0), "skipped": torch.tensor(skipped)}
    reference.check(weights.reshape(case.shape), state, TOLERANCE[dtype])


def drawn(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """Return three tensors and their gradients in five steps; the first has none at the second step."""
    generator = torch.Generator().manual_seed(2)
    tensors = [case.start(generator, dtype, device) for _ in range(3)]
    grads: list[list[Tensor | None]] = [[case.tensor(generator, dtype, device) for _ in range(3)] for _ in range(5)]
    grads[1][0] = None
    return tensors, grads


def frozen(index: int, step: int) -> bool:
    return index == 1 and 3 <= step <= 4


@functools.cache
def references(name: str, dtype: torch.dtype) -> list[Oracle]:
    """Return the oracle after those steps. Cached, since it is slow and the same for all backends."""
    (case,) = (case for case in CASES if case.name == name)
    tensors, grads = drawn(case, dtype)
    found = [Oracle(case, tensor) for tensor in tensors]
    for step, each in enumerate(grads, 1):
        for index, (reference, grad) in enumerate(zip(found, each, strict=True)):
            if grad is not None and not frozen(index, step):
                reference.step(grad)
    return found


@by_name
@by_dtype
@by_device
def test_backend_agrees_with_oracle(case: Case, backend: str, dtype: torch.dtype, device: str):
    """Five steps, a missing gradient at the second, a frozen layer at the third and fourth."""
    tensors, grads = drawn(case, dtype, device)
    count = few(backend, 3, 2)  # the third is like the first two
    tensors, grads = tensors[:count], [each[:count] for each in grads]
    strides = [tensor.stride() for tensor in tensors]
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
    optimiser = nero.Nero([case.group(parameter) for parameter in parameters], backend=backend)
    for step, each in enumerate(grads, 1):
        for index, (parameter, grad) in enumerate(zip(parameters, each, strict=True)):
            parameter.requires_grad_(not frozen(index, step))
            parameter.grad = grad
        kept = [None if grad is None else grad.clone() for grad in each]
        optimiser.step()
        for parameter, grad in zip(parameters, kept, strict=True):
            assert grad is None or torch.equal(parameter.grad, grad), "the step must not touch the gradient"
    assert [parameter.stride() for parameter in parameters] == strides
    for parameter, reference in zip(parameters, references(case.name, dtype)[:count], strict=True):
        reference.check(parameter, optimiser.state[parameter], TOLERANCE[dtype])


@by_name
@by_device
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_half_precision_rounds_once_per_step(case: Case, backend: str, dtype: torch.dtype, device: str):
    """Each step is the oracle's, rounded; the averages never see the parameter's dtype."""
    generator = torch.Generator().manual_seed(3)
    parameter = torch.nn.Parameter(case.start(generator, dtype, device))
    reference = Oracle(case, parameter)
    optimiser = nero.Nero([case.group(parameter)], backend=backend)
    for _ in range(2):
        reference.read(parameter)
        parameter.grad = case.tensor(generator, dtype, device)
        reference.step(parameter.grad)
        optimiser.step()
        state = optimiser.state[parameter]
        assert parameter.dtype == dtype
        assert state["grad_norm"].dtype == torch.float32
        found, wanted = state["grad_norm"].flatten().tolist(), [each**0.5 for each in reference.mean_squares]
        assert found == pytest.approx(wanted, rel=1e-5)
        reference.mean_squares, kept = [each**2 for each in found], reference.mean_squares
        reference.check(parameter, state, ROUNDING[dtype])
        reference.mean_squares = kept


def test_backend_on_a_whole_model_agrees_with_eager(backend: str):
    """Many tensors of many roles in one step."""
    results = []
    dtype = torch.float32 if backend == "triton" else torch.float64
    for each in ("eager", backend):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, bias=False),  # before batch norm a bias has a gradient of pure rounding
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.ConvTranspose2d(8, 4, 3, groups=2),
            torch.nn.PReLU(),
            torch.nn.Flatten(),
            torch.nn.LayerNorm(4 * 8 * 8),
            torch.nn.Linear(4 * 8 * 8, 32),
            torch.nn.Linear(32, 1),
            torch.nn.Linear(1, 5),
        ).to(dtype)
        optimiser = nero.Nero(model, backend=each, lr=0.02)
        for _ in range(7):
            optimiser.zero_grad()
            model(torch.randn(4, 3, 8, 8, dtype=dtype)).square().mean().backward()
            optimiser.step()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    exact = dtype == torch.float64
    torch.testing.assert_close(*results, rtol=1e-11 if exact else 1e-3, atol=1e-13 if exact else 1e-4)


def test_step_bumps_version_counters_and_leaves_gradients(backend: str):
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 1))
    optimiser = nero.Nero(model, backend=backend)
    model(torch.randn(4, 6)).square().sum().backward()
    versions = [parameter._version for parameter in model.parameters()]
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    optimiser.step()
    assert all(p._version > before for p, before in zip(model.parameters(), versions, strict=True))
    assert all(torch.equal(p.grad, before) for p, before in zip(model.parameters(), grads, strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_compiled_backend_steps_ordinary_tensors_itself(backend: str, momentum: float, monkeypatch: pytest.MonkeyPatch):
    if backend in ("eager", "foreach"):
        pytest.skip("foreach and eager have no fallback to detect")
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Linear(6, 5))
    optimiser = nero.Nero(model, backend=backend, momentum=momentum)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    passed_on = []
    monkeypatch.setattr("nero.backends.foreach.step", lambda jobs, _: passed_on.extend(jobs))
    optimiser.step()
    assert not passed_on
    assert all(state["step"] == 1 for state in optimiser.state.values())
