"""Who takes part: torch's optimisers, other people's, and ours by backend."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from shapes import Parameters, flat, groups

import nero

Make: TypeAlias = Callable[[Parameters], torch.optim.Optimizer]

#: Bytes a parameter, in float32, that a step cannot do without: SGD and Nero read the gradient, and read and write
#: the parameter; Adam does so with its two averages too.
SGD_TRAFFIC, ADAM_TRAFFIC = 12, 28
ADAM, SGD = "Adam (fused)", "SGD (fused)"


class Contender(NamedTuple):
    """An optimiser to be made."""

    name: str
    make: Make
    traffic: int | None = None
    ours: bool = False
    compiled: bool = False
    note: str | None = None


REFERENCES = [
    Contender(ADAM, lambda p: torch.optim.Adam(flat(p), fused=True), ADAM_TRAFFIC),
    Contender(SGD, lambda p: torch.optim.SGD(flat(p), fused=True), SGD_TRAFFIC),
]


def ours(backend: str, name: str | None = None) -> Contender:
    """Nero by one of its backends."""
    made: Any = backend  # which backends there are depends on the machine
    return Contender(name or f"Nero ({backend})", lambda p: nero.Nero(groups(p), backend=made), SGD_TRAFFIC, ours=True)


def everyone(device: torch.device, compiled: bool) -> tuple[list[Contender], list[str]]:
    """All that can run here, and a note for each that cannot."""
    found, notes = list(REFERENCES), []
    found += [
        Contender("Adam (foreach)", lambda p: torch.optim.Adam(flat(p), foreach=True), ADAM_TRAFFIC),
        Contender("SGD (foreach)", lambda p: torch.optim.SGD(flat(p), foreach=True), SGD_TRAFFIC),
    ]
    if compiled:
        # on a CPU these compile for minutes
        found += [
            Contender(
                "Adam (compiled)",
                lambda p: torch.optim.Adam(flat(p), foreach=True, capturable=flat(p)[0].is_cuda),
                ADAM_TRAFFIC,
                compiled=True,
            ),
            Contender("SGD (compiled)", lambda p: torch.optim.SGD(flat(p), foreach=True), SGD_TRAFFIC, compiled=True),
        ]
    else:
        notes.append("Adam and SGD, compiled: not asked for, or not on a GPU")
    muon: Any = getattr(torch.optim, "Muon", None)
    if muon and device.type == "cuda":
        only_matrices = "2-D parameters alone: it refuses others"
        found.append(
            Contender("Muon", lambda p: muon([each for each in flat(p) if each.dim() == 2]), note=only_matrices)
        )
    else:
        notes.append("Muon: not in this torch, or not on a GPU: its matrix products would take minutes a step")
    try:
        library = importlib.import_module("pytorch_optimizer")
    except Exception as error:  # it is not installed, or not for this torch
        notes.append(f"Nero and Lamb of pytorch_optimizer: {error}")
    else:
        for kind, traffic in (("Nero", SGD_TRAFFIC), ("Lamb", None)):
            make = getattr(library, kind, None) or getattr(library, kind.upper(), None)
            if make:
                found.append(
                    Contender(f"{kind} (pytorch_optimizer)", lambda p, make=make: make(flat(p)), traffic)  # type: ignore[misc]
                )
    return found + [ours(backend) for backend in nero.backends.backends_for(device)], notes
