"""The definitions and theorems of the paper (Sections 3 and 6), computed for a given network.

Every function quotes the paper's statement in its docstring and returns a report that can be printed.
"""

from nero.balance import is_balanced
from nero.theory.activations import LayerStatistics, Preactivations, preactivations
from nero.theory.bounds import GeneralisationBound, PacBayesBound, generalisation_bound, pac_bayes_bound
from nero.theory.caps import CapMeasure, cap_measure
from nero.theory.relative_steps import LayerStep, RelativeStep, is_per_neuron_relative, relative_step
from nero.theory.robustness import Robustness, robustness
from nero.theory.stability import (
    DeepRelativeTrust,
    LayerChange,
    RelativeChange,
    deep_relative_trust,
    is_stable_step,
    relative_change,
)

__all__ = [
    "CapMeasure",
    "DeepRelativeTrust",
    "GeneralisationBound",
    "LayerChange",
    "LayerStatistics",
    "LayerStep",
    "PacBayesBound",
    "Preactivations",
    "RelativeChange",
    "RelativeStep",
    "Robustness",
    "cap_measure",
    "deep_relative_trust",
    "generalisation_bound",
    "is_balanced",
    "is_per_neuron_relative",
    "is_stable_step",
    "pac_bayes_bound",
    "preactivations",
    "relative_change",
    "relative_step",
    "robustness",
]
