"""Perturbations that do not fit a model."""

import math

import pytest
import torch
from theory_networks import sum_of_parameters
from torch import nn

from nero import theory


@pytest.mark.parametrize(
    ("perturbation", "error", "message"),
    [
        ([torch.ones(2, 3)], TypeError, "a dict from parameter names"),
        ({"weight": 1.0}, TypeError, "a dict from parameter names"),
        ({"wait": torch.ones(2, 3)}, ValueError, "'wait' is not a trained parameter.*has weight, bias"),
        ({"weight": torch.ones(3, 2)}, ValueError, r"must have shape \(2, 3\), got \(3, 2\)"),
        ({"weight": torch.full((2, 3), math.nan)}, ValueError, "NaN or infinite"),
        *(
            ({"weight": torch.ones(2, 3, dtype=dtype)}, TypeError, f"dense floating-point tensor, got {dtype}")
            for dtype in (torch.int64, torch.bool, torch.complex64)
        ),
        ({"weight": torch.ones(2, 3).to_sparse()}, TypeError, r"dense .* layout torch\.sparse_coo"),
        ({"weight": torch.zeros(2, 3)}, ValueError, "zero everywhere"),
        ({}, ValueError, "zero everywhere"),
    ],
)
def test_perturbation_that_does_not_fit_raises(perturbation, error, message):
    with pytest.raises(error, match=message):
        theory.relative_step(nn.Linear(3, 2), perturbation)
    with pytest.raises(error, match=message):
        theory.is_stable_step(nn.Linear(3, 2), sum_of_parameters, perturbation)
