"""The study of step size by depth: perceptrons of 5 to 100 layers, and ``lr="auto"`` on every task that Nero trains.

``nero run perceptron-20 --lr 0.003`` trains at a given rate. ``nero run TASK --optimiser auto`` divides the rate, which
is then called the trust, by the depth; so does ``nero run TASK --lr auto``. Results: docs/studies/depth.md.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from nero_lab.models.mlp import mlp, normed_mlp
from nero_lab.protocol import Contender, Schedule, Seconds, SettingError, Task, linear_decay
from nero_lab.tasks.paper import mnist

LAYERS = (5, 10, 20, 50, 100)
RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)
EPOCHS = 5
#: The trust of ``lr="auto"``, and those it is compared with.
TRUST = 0.1
TRUSTS = (0.04, 0.06, 0.08, TRUST, 0.16)
#: Forms of ``lr="auto"``, which bound the length of a step at 3 times the angle, nowhere, or at 10 times.
FORMS: dict[str, dict[str, float]] = {
    "auto": {"longest_step": 3.0},
    "unbounded": {},
    "loose": {"longest_step": 10.0},
}
#: β of a running average over about ten gradients; the paper's is 0.999.
SWIFT_BETA = 0.9


def perceptron(
    layers: int,
    variant: str = "",
    *,
    model: Callable[..., nn.Module] | None = None,
    schedule: Schedule = mnist.deep.schedule,
    options: dict[str, Any] | None = None,
) -> Task:
    """Return the task of a perceptron on MNIST, trained by Nero at the rates of a grid.

    Args:
        layers: the depth.
        variant: the end of the task's name.
        model: makes the network; the paper's perceptron by default.
        schedule: the paper's by default, by which the rate falls by a tenth in every epoch.
        options: options of the optimiser.
    """
    return replace(
        mnist.deep,
        name=f"perceptron-{layers}{variant}",
        study="depth",
        shows="",
        title=f"Which step size suits {layers} layers?",
        model=model or partial(mlp, layers),
        contenders={"nero": Contender("nero", best=0.01, options=options or {})},
        grid=RATES,
        epochs=EPOCHS,
        schedule=schedule,
        seconds=Seconds(),
    )


def form_of(task: Task, optimiser: str) -> str:
    """Return the contender, or the form of ``lr="auto"``, that trains a task like one of its contenders.

    Raises:
        SettingError: if the contender is not the one that the forms derive from.
    """
    if optimiser in FORMS:
        return optimiser
    if (given := task.contenders.get(optimiser)) is not None:
        options = {**given.options, "depth": "auto", **FORMS["auto"]}
        for name, contender in task.contenders.items():
            if contender.optimiser == given.optimiser == "nero" and contender.options == options:
                return name
    if optimiser != (trained := _nero_contender(task)):
        raise SettingError(f"{optimiser} has no learning rate auto: give it a number, or take --optimiser {trained}")
    return "auto"


def by_depth(task: Task) -> Task:
    """Return the task with the forms of ``lr="auto"`` as contenders and trusts as grid.

    A form is Nero as the task runs it (the last of several variants, if none is called ``"nero"``), with its rate
    divided by the depth of the network.
    """
    nero = task.contenders[_nero_contender(task)]
    contenders = {
        name: replace(nero, best=TRUST, options={**nero.options, "depth": "auto", **bound}, grid=None)
        for name, bound in FORMS.items()
    }
    return replace(task, study="depth", shows="", contenders=contenders, grid=TRUSTS)


def _nero_contender(task: Task) -> str:
    variants = [name for name, contender in task.contenders.items() if contender.optimiser == "nero"]
    if not variants:
        raise SettingError(f"{task.name} is not trained by Nero: take one of {', '.join(task.contenders)}")
    return "nero" if "nero" in variants else variants[-1]


TASKS: tuple[Task, ...] = (
    *(perceptron(layers) for layers in LAYERS),
    *(perceptron(layers, "-falling", schedule=linear_decay(EPOCHS)) for layers in LAYERS),
    *(perceptron(layers, "-normed", model=partial(normed_mlp, layers)) for layers in LAYERS),
    *(perceptron(layers, "-swift", options={"beta": SWIFT_BETA}) for layers in LAYERS),
)
