"""The interface of the theory: models and numbers as arguments, and names on its page."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import solved_problem, sum_of_parameters
from torch import nn

import nero
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


def test_int_beyond_float_range_raises_with_its_name():
    huge = 10**400
    with pytest.raises(ValueError, match="angle must be an angle"):
        theory.cap_measure(10, huge)
    with pytest.raises(ValueError, match="delta must be between 0 and 1"):
        theory.pac_bayes_bound(-1.0, 10, -huge)
    with pytest.raises(ValueError, match="log_solutions must be a number"):
        theory.generalisation_bound([(3, 5)], 0.5, 10, log_solutions=huge)
    assert theory.pac_bayes_bound(-huge, 10).vacuous


def test_numpy_float_equals_python_float():
    half = np.float32(0.5)
    assert theory.cap_measure(10, half) == theory.cap_measure(10, 0.5)
    assert theory.pac_bayes_bound(-half, 10, half) == theory.pac_bayes_bound(-0.5, 10, 0.5)
    one, other = (
        theory.generalisation_bound([(3, 5)], alpha, 10, delta=alpha, log_solutions=-alpha) for alpha in (half, 0.5)
    )
    assert one == other
    model, inputs, labels = solved_problem()
    asked = {"confidence": half, "tolerance": half, "limit": half}
    one, other = (
        theory.robustness(model, (inputs, labels), rotations=4, **options)
        for options in (asked, dict.fromkeys(asked, 0.5))
    )
    assert one == other
    layer = torch.nn.Linear(4, 3)
    assert theory.is_per_neuron_relative(layer, {"weight": 0.25 * layer.weight.detach()}, half)


def test_tensor_of_one_element_equals_python_float():
    assert theory.cap_measure(torch.tensor(3), torch.tensor(1.0)) == theory.cap_measure(3, 1.0)
    assert theory.cap_measure(3, torch.tensor([0.5], requires_grad=True)) == theory.cap_measure(3, 0.5)
    for other in (torch.tensor([0.5, 0.5]), torch.tensor(True), torch.tensor(0.5j)):
        with pytest.raises(ValueError, match=r"angle must be an angle in \(0, π/2\], in radians, got tensor"):
            theory.cap_measure(3, other)


def test_numpy_int_equals_python_int():
    assert theory.cap_measure(np.int64(10), 0.3) == theory.cap_measure(10, 0.3)
    assert theory.pac_bayes_bound(-1.0, np.int32(10)) == theory.pac_bayes_bound(-1.0, 10)
    assert theory.generalisation_bound(np.array([[3, 5]]), 1.0, 10) == theory.generalisation_bound([(3, 5)], 1.0, 10)
    model, inputs, labels = solved_problem()
    asked = {"rotations": 4, "examples": 1, "steps": 2}
    one, other = (
        theory.robustness(model, (inputs, labels), **{name: kind(value) for name, value in asked.items()})
        for kind in (int, np.int64)
    )
    assert one == other
    step = {"weight": torch.ones(3, 4)}
    one, other = (
        theory.is_stable_step(model, lambda model: model(inputs).square().sum(), step, points=kind(2))
        for kind in (int, np.int64)
    )
    assert one == other


@pytest.mark.parametrize(
    "call",
    [
        lambda many: theory.pac_bayes_bound(-1.0, many),
        lambda many: theory.generalisation_bound([(2, 5)], 1.0, many),
        lambda many: theory.cap_measure(many, 1.0),
    ],
)
def test_count_beyond_64_bits_raises(call):
    assert call(2**64 - 1)
    for many in (2**64, 10**400, 10**5000):
        with pytest.raises(ValueError, match=r"(samples|dim) must be an integer of at most 64 bits, the "):
            call(many)


@pytest.mark.parametrize("tolerance", ["a", math.nan, -1, True, torch.tensor([0.1, 0.1])])
def test_tolerance_that_is_not_a_number_raises(tolerance):
    layer = nero.balance_(nn.Linear(3, 2))
    for call in (
        lambda: theory.is_balanced(layer, tolerance=tolerance),
        lambda: theory.is_per_neuron_relative(layer, {"bias": torch.ones(2)}, 0.1, tolerance=tolerance),
    ):
        with pytest.raises(ValueError, match="tolerance must be a number of at least 0, like 1e-6, or None, got"):
            call()
    for exact in (Fraction(1, 10), np.float32(0.1), torch.tensor(0.1)):
        assert theory.is_balanced(layer, tolerance=exact)


PAGE = (Path(__file__).parents[2] / "docs/theory.md").read_text()


def test_every_public_name_is_documented():
    for name in theory.__all__:
        assert getattr(theory, name).__doc__, f"{name} has no docstring"
        if name[0].islower():
            assert f"{name}(" in PAGE, f"docs/theory.md does not call {name}"
