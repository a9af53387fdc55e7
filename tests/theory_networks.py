"""Small networks and losses for the tests of the theory and of measurements."""

import itertools

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
