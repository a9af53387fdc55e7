"""Cases of shapes, roles, memory layouts and options, for the tests of the rule and the backends."""

import math
from dataclasses import dataclass, field
from typing import Any

import oracle
import torch
from torch import Tensor

from nero.role import Role

#: Relative agreement with the float64 oracle over five to seven steps.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
#: Relative agreement of a single step, which rounds the parameter to its dtype.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@dataclass(frozen=True)
class Case:
    """A parameter, its role and its group's options."""

    name: str
    shape: tuple[int, ...]
    kind: str = "neuron"
    axes: tuple[int, ...] | None = None
    groups: int = 1
    layout: str = "contiguous"
    options: dict[str, Any] = field(default_factory=dict)
    starts_at_zero: bool = False

    @property
    def role(self) -> Role:
        return Role(self.kind, self.axes, self.groups).on(self.shape)

    def tensor(self, generator: torch.Generator, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        """Make a random tensor of the case's shape and memory layout."""
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64).to(device, dtype)
        if self.layout == "channels_last":
            return values.to(memory_format=torch.channels_last)
        if self.layout == "transposed":
            return values.transpose(0, -1).contiguous().transpose(0, -1)
        if self.layout == "gaps":
            wide = torch.zeros(*self.shape[:-1], 2 * self.shape[-1], dtype=dtype, device=device)
            return wide[..., ::2].copy_(values)
        return values

    def start(self, generator: torch.Generator, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        """Make a parameter's first values: every second neuron is zero if the case starts at zero."""
        values = self.tensor(generator, dtype, device)
        if self.starts_at_zero:
            average = self.role.view(values).sum(self.role.axes, keepdim=True)
            self.role.view(values).mul_(torch.arange(average.numel(), device=device).view(average.shape) % 2)
        return values

    def group(self, parameter: Tensor) -> dict[str, Any]:
        """Make a parameter group of the case's role and options."""
        role = self.role
        group = {"params": [parameter], "role": role.kind, "fan_in_axes": role.fan_in_axes}
        return {**group, "fan_in_groups": role.fan_in_groups, **self.options}


def _neurons(
    name: str, shape: tuple[int, ...], axes: tuple[int, ...] | None = None, groups: int = 1, **more: Any
) -> Case:
    layout, zero = more.pop("layout", "contiguous"), more.pop("starts_at_zero", False)
    return Case(name, shape, "neuron", axes, groups, layout, more, zero)


CASES = [
    _neurons("linear", (5, 7)),
    _neurons("wide linear", (3, 300)),
    _neurons("tall linear", (300, 3)),
    _neurons("one neuron", (1, 9)),
    _neurons("fan-in 3", (4, 3)),
    _neurons("fan-in 2", (6, 2)),
    _neurons("long fan-in", (2, 33_000)),
    _neurons("conv2d", (4, 3, 3, 3)),
    _neurons("conv2d channels last", (4, 3, 3, 3), layout="channels_last"),
    _neurons("conv3d", (3, 2, 2, 3, 2)),
    _neurons("1x1 conv", (6, 4, 1, 1)),
    _neurons("depthwise conv", (6, 1, 3, 3)),
    _neurons("transposed conv", (4, 3, 3, 3), (0, 2, 3)),
    _neurons("grouped transposed conv", (4, 3, 3, 3), (0, 2, 3), groups=2),
    _neurons("depthwise transposed conv", (4, 1, 3, 3), (0, 2, 3), groups=4),
    _neurons("transposed linear", (7, 5), (0,)),
    _neurons("long transposed linear", (301, 4), (0,)),
    _neurons("columns", (40, 24), (0,)),
    _neurons("long columns", (1_100, 8), (0,)),
    _neurons("long columns, side by side", (2, 600, 8), (1,), fix_norm="initial"),
    _neurons("long transposed conv", (140, 3, 3, 3), (0, 2, 3)),
    _neurons("position table", (1, 5, 8), (2,)),
    _neurons("experts", (3, 4, 5), (2,)),
    _neurons("transposed experts", (3, 5, 4), (1,)),
    _neurons("strided", (5, 6), layout="gaps"),
    _neurons("transposed in memory", (5, 6), layout="transposed"),
    _neurons("mean free", (5, 7), fix_mean=False),
    _neurons("norm free", (5, 7), fix_norm=False),
    _neurons("both free", (5, 7), fix_mean=False, fix_norm=False),
    _neurons("norm at its start", (5, 7), fix_norm="initial"),
    _neurons("conv at its start", (4, 3, 3, 3), fix_norm="initial", layout="channels_last"),
    _neurons("transposed at its start", (7, 5), (0,), fix_norm="initial"),
    _neurons("given scale", (5, 7), scale=0.5),
    _neurons("given scale, norm free", (5, 7), scale=0.5, fix_norm=False),
    _neurons("large step", (5, 7), lr=0.7),
    _neurons("no memory", (5, 7), beta=0.0),
    _neurons("short memory", (5, 7), beta=0.5),
    _neurons("bounded", (5, 7), longest_step=1.05),
    _neurons("bounded conv", (4, 3, 3, 3), layout="channels_last", longest_step=1.05),
    _neurons("bounded, transposed", (7, 5), (0,), longest_step=1.05),
    _neurons("bounded, norm at its start", (5, 7), longest_step=1.05, fix_norm="initial"),
    _neurons("bounded, given scale, large step", (5, 7), longest_step=1.05, scale=0.5, lr=0.9, maximize=True),
    _neurons("maximize", (5, 7), maximize=True),
    _neurons("tensor lr", (5, 7), lr=torch.tensor(0.03, dtype=torch.float64)),
    _neurons("from zero", (5, 7), starts_at_zero=True),
    _neurons("from zero, up to its norm", (5, 7), starts_at_zero=True, lr=0.4),
    _neurons("from zero, long fan-in", (2, 16_500), starts_at_zero=True),
    _neurons("from zero, transposed", (7, 5), (0,), starts_at_zero=True, lr=0.4),
    _neurons("from zero, long columns", (1_100, 5), (0,), starts_at_zero=True, lr=0.4),
    _neurons("from zero, conv", (4, 3, 3, 3), starts_at_zero=True, layout="channels_last"),
    _neurons("from zero, grouped transposed conv", (4, 3, 3, 3), (0, 2, 3), groups=2, starts_at_zero=True),
    _neurons("from zero, both free", (5, 7), starts_at_zero=True, fix_norm=False, fix_mean=False),
    _neurons("from zero, others at their start", (5, 7), starts_at_zero=True, fix_norm="initial", lr=0.4),
    _neurons("from zero, given scale, bounded", (5, 7), starts_at_zero=True, scale=0.5, longest_step=1.05),
    Case("bias", (9,), "bias"),
    Case("gain", (9,), "gain"),
    Case("scalar", (), "bias"),
    Case("matrix of gains", (3, 4), "gain"),
    Case("strided gains", (3, 4), "gain", layout="gaps"),
    Case("bias of given scale", (9,), "bias", options={"scale": 1.0}),
    Case("gain, maximize", (9,), "gain", options={"maximize": True, "lr": 0.1}),
    Case("gain, no memory", (9,), "gain", options={"beta": 0.0}),
    Case("gain pulled to one", (9,), "gain", options={"gain_penalty": 0.3}),
    Case("gain, bounded", (9,), "gain", options={"longest_step": 1.05}),
    Case("gain pulled, bounded", (9,), "gain", options={"gain_penalty": 0.3, "longest_step": 1.05}),
    Case("gain pulled, maximize", (9,), "gain", options={"gain_penalty": 0.3, "maximize": True}),
]


class Oracle:
    """The trajectory of a parameter by the oracle: the elements of each neuron as a list of float64."""

    def __init__(self, case: Case, parameter: Tensor) -> None:
        self.case, self.t = case, 0
        options = {"lr": 0.01, "beta": 0.999, "fix_mean": True, "fix_norm": True, "scale": None, **case.options}
        self.eta = float(options["lr"]) * (-1 if options.get("maximize") else 1)
        self.beta, self.sigma = options["beta"], options["scale"]
        self.longest = options.get("longest_step", math.inf)
        self.pull = options.get("gain_penalty", 0.0) * (-1 if options.get("maximize") else 1)
        self.fix_mean = options["fix_mean"] and case.role.fan_in(case.shape) > 2  # ruling 3
        self.norm = bool(options["fix_norm"])
        self.read(parameter)
        self.mean_squares = [0.0] * len(self.neurons)
        mu, nesterov = options.get("momentum", 0.0), options.get("nesterov", True)
        self.memories = [oracle.Memory(mu, nesterov) for _ in self.neurons]
        self.radii = [1.0] * len(self.neurons)
        if options["fix_norm"] == "initial":
            self.radii = [math.sqrt(sum(wi * wi for wi in w)) for w in self.neurons]
        if case.kind == "neuron":
            self.radii = [radius if any(w) else -1.0 for w, radius in zip(self.neurons, self.radii, strict=True)]
        if case.kind == "neuron":
            self.neurons = [
                oracle.project(w, self.fix_mean, self.norm, radius)
                for w, radius in zip(self.neurons, self.radii, strict=True)
            ]
        elif self.sigma is None:
            self.sigma = sum(abs(b) for (b,) in self.neurons) / len(self.neurons)
            self.sigma = max(1.0, self.sigma) if case.kind == "gain" else self.sigma

    def read(self, parameter: Tensor) -> None:
        """Take over the values of a parameter."""
        self.neurons = _split(self.case.role, parameter)

    def step(self, grad: Tensor) -> None:
        """Update every neuron, gain or bias."""
        self.t += 1
        for i, g in enumerate(_split(self.case.role, grad)):
            if self.case.kind == "neuron":
                self.neurons[i], self.mean_squares[i] = oracle.turn(
                    self.neurons[i],
                    self.memories[i].direction(g),
                    self.mean_squares[i],
                    self.t,
                    self.eta,
                    self.beta,
                    self.fix_mean,
                    self.norm,
                    self.sigma,
                    self.radii[i],
                    self.longest,
                )
            else:
                (b,) = self.neurons[i]
                (u,) = self.memories[i].direction([g[0] + self.pull * (b - 1)])
                b, self.mean_squares[i] = oracle.nudge(
                    b, u, self.mean_squares[i], self.t, self.eta, self.beta, self.sigma, self.longest
                )
                self.neurons[i] = [b]

    def check(self, parameter: Tensor, state: dict[str, Tensor], tolerance: float) -> None:
        """Compare elements, relative to their neuron's norm, and the running averages."""
        found = torch.tensor(_split(self.case.role, parameter), dtype=torch.float64)
        wanted = torch.tensor(self.neurons, dtype=torch.float64)
        size = torch.linalg.vector_norm(wanted, dim=1, keepdim=True)
        torch.testing.assert_close(found / size, wanted / size, rtol=0, atol=tolerance)
        averages = torch.tensor([math.sqrt(mean_square) for mean_square in self.mean_squares], dtype=torch.float64)
        torch.testing.assert_close(state["grad_norm"].cpu().double().flatten(), averages, rtol=tolerance, atol=0)
        assert ("momentum_buffer" in state) == bool(self.memories[0].mu)
        if "momentum_buffer" in state:
            buffers = torch.tensor(_split(self.case.role, state["momentum_buffer"]), dtype=torch.float64)
            wanted = torch.tensor([memory.average() for memory in self.memories], dtype=torch.float64)
            torch.testing.assert_close(buffers, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))
        assert state["step"].item() == self.t
        assert state["skipped"].item() == 0


def _split(role: Role, tensor: Tensor) -> list[list[float]]:
    """Return the elements of each neuron, in the order of the running averages."""
    view = role.view(tensor.detach().cpu().double())
    neurons = [axis for axis in range(view.dim()) if axis not in role.axes]
    return view.permute([*neurons, *role.axes]).reshape(-1, role.fan_in(tensor.shape)).tolist()
