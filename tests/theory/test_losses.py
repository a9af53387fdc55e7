"""Losses and options that relative_change accepts or refuses."""

import math

import pytest
import torch
from theory_networks import solved_problem, sum_of_parameters
from torch import nn

from nero import theory


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
