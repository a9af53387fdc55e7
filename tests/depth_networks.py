"""Networks of known depth for the tests of lr="auto"."""

import math

import torch
from torch import nn


def perceptron(layers=3, width=8):
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
        self.short, self.long = nn.Linear(8, 8), perceptron(4)

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
        self.body, self.run, self.head = perceptron(4, 2), run, nn.Linear(2, 2)

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
