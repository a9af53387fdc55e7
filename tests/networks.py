"""Small networks: for the theory and for measurements, and of known depth for lr="auto"."""

import itertools
import math

import torch
from torch import Tensor, nn

import nero


def perceptron(*widths: int, bias: bool = False) -> nn.Sequential:
    layers = [nn.Linear(a, b, bias=bias, dtype=torch.float64) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*[each for layer in layers for each in (layer, nn.ReLU())][:-1])


def linear_network(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, bias=False, dtype=torch.float64) for a, b in itertools.pairwise(widths)))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def sum_of_parameters(model: nn.Module) -> Tensor:
    return sum(parameter.sum() for parameter in model.parameters())


def solved_problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nero.balance_(nn.Linear(4, 3))
    inputs = torch.randn(6, 4)
    return model, inputs, model(inputs).argmax(1)


def limit_runs(model: nn.Module) -> None:
    """Fail after 3000 forward passes."""
    runs = itertools.count()

    def count(*_):
        assert next(runs) < 3000, "the search does not terminate"

    model.register_forward_hook(count)


def uniform_perceptron(layers=3, width=8):
    body = [each for _ in range(layers - 1) for each in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(width, 2))


class Block(nn.Module):
    """A residual block of linear layers, with a norm before or behind it, or without."""

    def __init__(self, layers, norm=None, width=8, alpha=1.0):
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.before = NORMS[norm](width) if norm in NORMS else nn.Identity()
        self.behind = nn.LayerNorm(width) if norm == "behind" else nn.Identity()
        self.alpha = alpha

    def forward(self, inputs):
        return self.behind(torch.add(inputs, self.body(self.before(inputs)), alpha=self.alpha))


class UnnamedNorm(nn.Module):
    """An RMS norm that no class name identifies."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, inputs):
        return self.gain * inputs * torch.rsqrt(inputs.square().mean(-1, keepdim=True) + 1e-6)


NORMS = {"before": nn.LayerNorm, "rms": nn.RMSNorm, "unnamed": UnnamedNorm}


class Branches(nn.Module):
    """Two branches of different depth, concatenated."""

    def __init__(self):
        super().__init__()
        self.short, self.long = nn.Linear(8, 8), uniform_perceptron(4)

    def forward(self, inputs):
        return torch.cat([self.short(inputs), self.long(inputs)], -1)


class TiedEmbedding(nn.Module):
    """An embedding tied to the output layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def forward(self, words):
        return self.table(words) @ self.table.weight.T


class CustomForward(nn.Module):
    """Layers with a given forward pass."""

    def __init__(self, run):
        super().__init__()
        self.body, self.run, self.head = uniform_perceptron(4, 2), run, nn.Linear(2, 2)

    def forward(self, inputs):
        return self.run(self, inputs[:, :2])


def rms(*depths, shares=None):
    shares = shares or [1] * len(depths)
    return math.sqrt(sum(share * depth**2 for share, depth in zip(shares, depths, strict=True)) / sum(shares))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def turn_of_first_layer(model, optimiser):
    """Make a step, and return the largest angle in the first layer."""
    first = model[0]
    before = first.weight.detach().clone()
    optimiser.zero_grad()
    model(X).square().sum().backward()
    optimiser.step()
    return torch.nn.functional.cosine_similarity(first.weight, before).clamp(max=1).acos().max().item()


def declare_operators_of_torchvision():
    """Let a torchvision for CUDA be imported beside a torch for the CPU, where its compiled part cannot load."""
    if torch.version.cuda is None and not OPERATORS:
        OPERATORS.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            OPERATORS[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


OPERATORS = []  # they live as long as their library
