"""The optimisers that are timed: torch's, other libraries', and Nero by backend."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from shapes import Parameters, flat, groups

import nero
from nero.backends import backends_for

Make: TypeAlias = Callable[[Parameters], torch.optim.Optimizer]

#: The least bytes that a float32 step moves per parameter. SGD and Nero read the gradient, and read and write the
#: parameter; Adam also reads and writes two averages.
SGD_BYTES_PER_PARAMETER, ADAM_BYTES_PER_PARAMETER = 12, 28
ADAM, SGD = "Adam (fused)", "SGD (fused)"


class Contender(NamedTuple):
    """An optimiser to be made and timed."""

    name: str
    make: Make
    bytes_per_parameter: int | None = None
    is_nero: bool = False
    is_compiled: bool = False
    note: str | None = None


REFERENCES = [
    Contender(ADAM, lambda p: torch.optim.Adam(flat(p), fused=True), ADAM_BYTES_PER_PARAMETER),
    Contender(SGD, lambda p: torch.optim.SGD(flat(p), fused=True), SGD_BYTES_PER_PARAMETER),
]


def nero_by(
    backend: str, name: str | None = None, bytes_per_parameter: int = SGD_BYTES_PER_PARAMETER, **options: Any
) -> Contender:
    """Return Nero with one of its backends, and options."""
    chosen: Any = backend  # a str, where the signature has a Literal
    return Contender(
        name or f"Nero ({backend})",
        lambda p: nero.Nero(groups(p), backend=chosen, **options),
        bytes_per_parameter,
        is_nero=True,
    )


def find_contenders(device: torch.device, with_compiled: bool) -> tuple[list[Contender], list[str]]:
    """Return all optimisers that can run here, and a note for each that cannot."""
    found, notes = list(REFERENCES), []
    found += [
        Contender("Adam (foreach)", lambda p: torch.optim.Adam(flat(p), foreach=True), ADAM_BYTES_PER_PARAMETER),
        Contender("SGD (foreach)", lambda p: torch.optim.SGD(flat(p), foreach=True), SGD_BYTES_PER_PARAMETER),
    ]
    if with_compiled:
        found += _compiled()
    else:
        notes.append("Adam and SGD, compiled: not requested, or not on a GPU")
    muon: Any = getattr(torch.optim, "Muon", None)
    if muon and device.type == "cuda":
        note = "2-D parameters only, since it refuses others"
        found.append(Contender("Muon", lambda p: muon([w for w in flat(p) if w.dim() == 2]), note=note))
    else:
        notes.append("Muon: not in this torch, or not on a GPU (on a CPU a step takes minutes)")
    others, reason = _pytorch_optimizer()
    found += others
    notes += reason
    return found + [nero_by(backend) for backend in backends_for(device)], notes


def _compiled() -> list[Contender]:
    """Return torch's optimisers for torch.compile; on a CPU these would compile for minutes."""
    return [
        Contender(
            "Adam (compiled)",
            lambda p: torch.optim.Adam(flat(p), foreach=True, capturable=flat(p)[0].is_cuda),
            ADAM_BYTES_PER_PARAMETER,
            is_compiled=True,
        ),
        Contender(
            "SGD (compiled)",
            lambda p: torch.optim.SGD(flat(p), foreach=True),
            SGD_BYTES_PER_PARAMETER,
            is_compiled=True,
        ),
    ]


def _pytorch_optimizer() -> tuple[list[Contender], list[str]]:
    """Return Nero and LAMB of the package pytorch_optimizer, or the reason why not."""
    try:
        library = importlib.import_module("pytorch_optimizer")
    except Exception as error:  # not installed, or not for this torch
        return [], [f"Nero and Lamb of pytorch_optimizer: {error}"]
    found = []
    for kind, bytes_per_parameter in (("Nero", SGD_BYTES_PER_PARAMETER), ("Lamb", None)):
        make = getattr(library, kind, None) or getattr(library, kind.upper(), None)
        if make:
            name = f"{kind} (pytorch_optimizer)"
            found.append(Contender(name, lambda p, make=make: make(flat(p)), bytes_per_parameter))  # type: ignore[misc]
    return found, []
