"""Checkpoints of another model or optimiser: errors that leave the optimiser unchanged."""

import copy
import math

import pytest
import torch
from torch import nn

import nero


def _checkpoint(model: nn.Module, kind: type[torch.optim.Optimizer] = nero.Nero) -> dict:
    params = model if kind is nero.Nero else model.parameters()
    optimiser = kind(params, lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimiser.step()
    return optimiser.state_dict()


def _with_other_axes(saved: dict) -> dict:
    saved["param_groups"][0]["fan_in_axes"] = (0,)
    return saved


def _without_option(saved: dict) -> dict:
    saved["param_groups"][1].pop("beta")
    return saved


def _with_bad_option(saved: dict) -> dict:
    saved["param_groups"][1]["beta"] = 7.0
    return saved


def _with_short_average(saved: dict) -> dict:
    saved["state"][3]["grad_norm"] = torch.zeros(1)
    return saved


def _with_nan_average(saved: dict) -> dict:
    saved["state"][3]["grad_norm"][0] = math.nan
    return saved


def _with_average(saved: dict, average: object) -> dict:
    saved["state"][3]["grad_norm"] = average
    return saved


def _without_average(saved: dict) -> dict:
    saved["state"][3].pop("grad_norm")
    return saved


MODEL = lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))  # noqa: E731


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (lambda: _checkpoint(nn.Linear(4, 3)), "another model"),
        (
            lambda: _checkpoint(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))),
            r"grad_norm of 1\.weight has the shape \(5, 1\)",
        ),
        (lambda: _checkpoint(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))), r"'2\.weight'.*'1\.weight'"),
        (lambda: _checkpoint(MODEL(), torch.optim.Adam), "another model, or the groups"),
        (lambda: _without_option(_checkpoint(MODEL())), r"lacks the options \['beta'\]"),
        (lambda: _with_bad_option(_checkpoint(MODEL())), "beta must be"),
        (lambda: _without_average(_checkpoint(MODEL())), "grad_norm.*another optimiser"),
        (lambda: _with_short_average(_checkpoint(MODEL())), r"grad_norm of 1\.bias has the shape \(1,\)"),
        (lambda: _with_short_average(_checkpoint(MODEL())) | {"state": {0: None}}, "has None where"),
        (lambda: _with_nan_average(_checkpoint(MODEL())), "must be finite"),
        (lambda: _with_average(_checkpoint(MODEL()), torch.full((2,), 1e300, dtype=torch.float64)), "must be finite"),
        (
            lambda: _with_average(_checkpoint(MODEL()), "large"),
            r"grad_norm of 1\.bias must be a tensor, but .* 'large'",
        ),
        (lambda: _with_average(_checkpoint(MODEL()), None), r"grad_norm of 1\.bias must be a tensor, but it is None"),
        (
            lambda: _with_other_axes(_checkpoint(MODEL())),
            r"0\.weight holds neurons along axes \(0,\) in the checkpoint",
        ),
        (lambda: {"state": {}, "param_groups": [{}]}, "lacks 'params'"),
        (lambda: None, "got a NoneType"),
        (lambda: {"model": 1}, "not an optimiser's state_dict"),
    ],
)
def test_load_of_checkpoint_that_does_not_fit_raises(saved, message: str):
    model = MODEL()
    optimiser = nero.Nero(model)
    before = copy.deepcopy(optimiser.state_dict())
    with pytest.raises(ValueError, match=message):
        optimiser.load_state_dict(saved())
    after = optimiser.state_dict()
    assert after["param_groups"] == before["param_groups"], "nothing half-loaded"
    for key, entry in after["state"].items():
        assert all(torch.equal(entry[name], before["state"][key][name]) for name in entry)


def test_load_of_adam_state_in_equal_groups_raises():
    """The groups have equal sizes, so that only their options differ."""
    model = MODEL()
    optimiser = nero.Nero(model.parameters())
    with pytest.raises(ValueError, match="lacks the options"):
        optimiser.load_state_dict(_checkpoint(MODEL(), torch.optim.Adam))
