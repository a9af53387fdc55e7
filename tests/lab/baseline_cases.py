"""Cases for the tests of the baselines: their formulas as loops over lists of float64, a network and gradients."""

import math
import random

import oracle
import pytest
import torch
from torch import Tensor, nn

import nero
from nero_lab.baselines import make

TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5}
#: Every optimiser but Nero, with the options that :class:`Loops` knows.
OTHERS = [
    ("sgd", {}),
    ("adam", {}),
    ("adam", {"beta1": 0.9}),
    ("lamb", {}),
    ("lamb", {"beta1": 0.9}),
    ("madam", {}),
]
others = pytest.mark.parametrize(("name", "options"), OTHERS, ids=lambda value: str(value) if value else "")


def length(vector: list[float]) -> float:
    return math.sqrt(sum(x * x for x in vector))


class Loops:
    """One tensor, flattened, under one optimiser, written from the formulas of the paper's appendix."""

    def __init__(self, name: str, w: list[float], lr: float, beta1: float = 0.0) -> None:
        self.name, self.w, self.lr, self.beta1, self.t = name, w, lr, beta1, 0
        self.start = list(w)
        self.m, self.v = [0.0] * len(w), [0.0] * len(w)
        self.limit = 3 * math.sqrt(sum(x * x for x in w) / len(w))
        self.met: set[str] = set()  # special cases that occurred

    def step(self, g: list[float]) -> None:
        self.t += 1
        self.m = [self.beta1 * m + (1 - self.beta1) * x for m, x in zip(self.m, g, strict=True)]
        self.v = [0.999 * v + 0.001 * x * x for v, x in zip(self.v, g, strict=True)]
        getattr(self, f"step_{self.name}")(g)

    def step_sgd(self, g: list[float]) -> None:
        self.w = [w - self.lr * x for w, x in zip(self.w, g, strict=True)]

    def step_adam(self, _: list[float]) -> None:
        for i, (m, v) in enumerate(zip(self.m, self.v, strict=True)):
            m_hat, v_hat = m / (1 - self.beta1**self.t), v / (1 - 0.999**self.t)
            self.w[i] -= self.lr * m_hat / (math.sqrt(v_hat) + 1e-8)

    def step_lamb(self, _: list[float]) -> None:
        u = [m / (math.sqrt(v) + 1e-6) for m, v in zip(self.m, self.v, strict=True)]
        if length(self.w) > 10:
            self.met.add("norm over 10")
        trust = min(length(self.w), 10) / length(u) if length(self.w) and length(u) else 1.0
        self.met |= {"no trust"} if not (length(self.w) and length(u)) else set()
        self.w = [w - self.lr * trust * x for w, x in zip(self.w, u, strict=True)]

    def step_madam(self, g: list[float]) -> None:
        for i, (w, v, x) in enumerate(zip(self.w, self.v, g, strict=True)):
            n = x / math.sqrt(v / (1 - 0.999**self.t)) if v else 0.0
            if abs(n) > 10:
                self.met.add("clipped")
            n = max(-10.0, min(10.0, n))
            w *= math.exp(-self.lr * n * ((w > 0) - (w < 0)))
            if abs(w) > self.limit:
                self.met.add("held")
            self.w[i] = max(-self.limit, min(self.limit, w))

    def project(self, neurons: int) -> None:
        fan_in = len(self.w) // neurons
        rows = [self.w[i * fan_in : (i + 1) * fan_in] for i in range(neurons)]
        # a neuron that is zero has no direction and stays there; one that started there is held inside the ball
        starts = [any(self.start[i * fan_in : (i + 1) * fan_in]) for i in range(neurons)]
        projected = (
            oracle.project(row, radius=1.0 if start else -1.0) if any(row) else row
            for row, start in zip(rows, starts, strict=True)
        )
        self.w = [x for row in projected for x in row]


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build matrices, filters and vectors: one of norm over 10, one at zero, one whose gradients are all zero."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "matrix": nn.Linear(3, 4),
            "filters": nn.Conv2d(2, 3, 2),
            "large": nn.Linear(4, 5),
            "zero": nn.Linear(3, 3),
            "unmoved": nn.Linear(4, 3),
            "norm": nn.LayerNorm(3),
        }
    ).to(dtype)
    with torch.no_grad():
        model["large"].weight.copy_(20 * torch.randn(5, 4))
        model["zero"].weight.zero_()
        model["zero"].bias.zero_()
    return model


def give_gradients(model: nn.Module, step: int) -> dict[str, list[float] | None]:
    """Set gradients of many sizes and return them as lists."""
    chance = random.Random(step)
    given: dict[str, list[float] | None] = {}
    for name, parameter in model.named_parameters():
        if (name, step) in (("matrix.weight", 2), ("norm.bias", 0)):
            parameter.grad = None
            given[name] = None
            continue
        still = name.startswith("unmoved")
        values = [0.0 if still else chance.gauss(0, 1) * 10 ** chance.uniform(-3, 1) for _ in range(parameter.numel())]
        if name == "filters.weight":
            values[step] = 0.0
        grad = torch.tensor(values, dtype=torch.float64).to(parameter.dtype).reshape(parameter.shape)
        parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(grad)  # in the parameter's layout
        given[name] = grad.double().flatten().tolist()  # as rounded
    return given


def flat(parameter: Tensor) -> list[float]:
    return parameter.detach().double().flatten().tolist()


def follow(model: nn.Module, name: str, options: dict, balanced: bool) -> None:
    """Make six steps and compare each with :class:`Loops`."""
    lr, dtype = 0.25 if name == "madam" else 0.02, next(model.parameters()).dtype
    before = [flat(parameter) for parameter in model.parameters()]
    optimiser = make(name, model, lr, **options, balanced=balanced)
    assert [flat(parameter) for parameter in model.parameters()] == before, "none is projected at initialisation"
    loops = {each: Loops(name, flat(parameter), lr, **options) for each, parameter in model.named_parameters()}
    roles = nero.roles_of(model)
    for step in range(6):
        grads = give_gradients(model, step)
        optimiser.step()
        for each, parameter in model.named_parameters():
            loop, g = loops[each], grads[each]
            if g is not None:
                loop.step(g)
                if balanced and roles[each].kind == "neuron":
                    loop.project(parameter.shape[0])
            assert flat(parameter) == pytest.approx(loop.w, rel=TOLERANCES[dtype], abs=TOLERANCES[dtype]), (each, step)
    met = set().union(*(loop.met for loop in loops.values()))
    assert met >= {"lamb": {"norm over 10", "no trust"}, "madam": {"held"}}.get(name, set())


def run(optimiser: torch.optim.Optimizer, model: nn.Module, steps: range) -> list[Tensor]:
    """Step by the gradients of those steps and return copies of the parameters."""
    for step in steps:
        give_gradients(model, step)
        optimiser.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def assert_close(one: list[Tensor], other: list[Tensor]) -> None:
    for found, wanted in zip(one, other, strict=True):
        tolerance = TOLERANCES[wanted.dtype]
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
