"""Models for which the theory is undefined."""

import pytest
import torch
from theory_networks import sum_of_parameters
from torch import nn

from nero import theory

EVERY_FUNCTION_OF_A_MODEL = pytest.mark.parametrize(
    "call",
    [
        lambda model: theory.is_balanced(model),
        lambda model: theory.preactivations(model, torch.ones(3, 4)),
        lambda model: theory.relative_change(model, sum_of_parameters, {"weight": torch.ones(4)}),
        lambda model: theory.is_stable_step(model, sum_of_parameters, {"weight": torch.ones(4)}),
        lambda model: theory.deep_relative_trust(model, sum_of_parameters, {"weight": torch.ones(4)}),
        lambda model: theory.relative_step(model, {"weight": torch.ones(4)}),
        lambda model: theory.is_per_neuron_relative(model, {"weight": torch.ones(4)}, 0.1),
        lambda model: theory.robustness(model, (torch.ones(3, 4), torch.zeros(3).long())),
        lambda model: theory.generalisation_bound(model, 1.0, 10),
    ],
)


@EVERY_FUNCTION_OF_A_MODEL
def test_model_on_meta_device_raises(call):
    with pytest.raises(ValueError, match=r"'weight' is on the meta device: allocate it \(module\.to_empty\)"):
        call(nn.Linear(4, 3, device="meta"))


@EVERY_FUNCTION_OF_A_MODEL
def test_model_without_neurons_raises(call):
    with pytest.raises(ValueError, match=r"LayerNorm has no trainable neurons; nero\.describe"):
        call(nn.LayerNorm(4))


def test_model_that_is_not_a_module_raises():
    for call in (theory.preactivations, theory.relative_step, theory.robustness):
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, (got|not) list"):
            call([nn.Linear(3, 2)], {})
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, (got|not) NoneType"):
        theory.is_per_neuron_relative(None, {}, 0.1)


def test_complex_neurons_raise():
    with pytest.raises(TypeError, match=r"complex.*view_as_real"):
        theory.preactivations(nn.Linear(3, 2, dtype=torch.complex64), torch.ones(2, 3))
