"""A watch over an optimiser: it does nothing while the network trains, and measures when it is read."""

import importlib.util
from collections.abc import Mapping
from numbers import Real
from os import PathLike, fspath
from typing import Any

import torch
from torch import Tensor

from nero.optimiser import Nero
from nero.rule import statistics_dtype
from nero.scalars import as_int
from nero.watching.measure import Followed, Kept, bundles, follow, measure
from nero.watching.reading import Layer, Lines, Reading, Spread, Writer


class Watch:
    """Keeps an eye on a training run; made by :func:`watch`.

    Attributes:
        optimiser: whose parameters are watched.
        neurons: how many of each layer are followed at most; ``None`` for all.
        readings: all that were taken, the oldest first.
    """

    def __init__(self, optimiser: Nero, neurons: int | None) -> None:
        self.optimiser, self.neurons = optimiser, neurons
        self.readings: list[Reading] = []
        self._start, self._last = Kept(), Kept()
        self._look()

    @property
    def nbytes(self) -> int:
        """The memory that the watch keeps: two copies of the weights of the neurons that it follows."""
        return sum(rows.nbytes for kept in (self._start, self._last) for rows in kept.rows.values())

    def read(self, step: int | None = None) -> Reading:
        """Measure every layer. Nothing waits for the device until a number of the reading is asked for.

        Parameters that are new to the optimiser start here.

        Args:
            step: the number of this reading on the axis of a plot; by default how many steps the optimiser has made.

        Raises:
            ValueError: a step that is no whole number.
        """
        number = None if step is None else as_int("step", step, what=", or None for the optimiser's own")
        reading = Reading(self._look(), number)
        self.readings.append(reading)
        return reading

    def restart(self) -> None:
        """Take the weights as they are for the start: after loading others, say, which else count as a turn.

        Readings stay.
        """
        self._start, self._last = Kept(), Kept()
        self._look()

    def write(self, writer: Writer | str | PathLike[str]) -> None:
        """Write all readings so far to TensorBoard.

        Args:
            writer: a folder, for which the package ``tensorboard`` is needed; a ``SummaryWriter``; or anything with an
                ``add_scalar`` like its own. One reading is written by its own ``write``.
        """
        self._check_read("write")
        if not isinstance(writer, str | PathLike):
            for reading in self.readings:
                reading.write(writer)
            return
        _need("tensorboard", "writing to a folder")
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(fspath(writer)) as made:
            self.write(made)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw all readings so far as one picture, in the format that the path's ending names."""
        _need("matplotlib", "a plot")
        self._check_read("draw")
        from nero.watching.picture import draw

        draw(self.readings).savefig(path, metadata={"Software": None} if fspath(path).endswith(".png") else None)

    def state_dict(self) -> dict[str, Any]:
        """Where everything started and stood, and all readings, to go on from in another process."""
        return {
            "start": dict(self._start.rows),
            "last": dict(self._last.rows),
            "readings": [
                {"step": each.step, "layers": [_listed(layer) for layer in each.layers]} for each in self.readings
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave; either all of it or, with an error, nothing.

        Load the model and the optimiser as well, in any order, before the next reading.

        Raises:
            ValueError: if it is of another model, follows other neurons, or is no watch's.
        """
        if not isinstance(state_dict, Mapping) or not {"start", "last", "readings"} <= set(state_dict):
            raise ValueError("not a watch's state_dict: it lacks 'start', 'last' or 'readings'")
        readings = _readings(state_dict["readings"])
        # trained by now or not: the run that wrote it may have trained what is still frozen here
        parts = {part.name: follow(part.name, part, {}, self.neurons) for part in self.optimiser.parts()}
        own = {name: each.rows for name, each in parts.items() if each is not None}
        start, last = Kept(), Kept()
        for key, kept, now in (("start", start, self._start.rows), ("last", last, self._last.rows)):
            saved = state_dict[key]
            if not isinstance(saved, Mapping) or not all(_is_rows(rows) for rows in saved.values()):
                raise ValueError(f"not a watch's state_dict: {key!r} is no dict from names to tensors of weights")
            if unknown := [name for name in saved if name not in own]:
                raise ValueError(
                    f"the checkpoint has {unknown[0]!r}, which this optimiser has not: it is of another model"
                )
            for name, rows in saved.items():
                if rows.shape != own[name].shape:
                    raise ValueError(
                        f"the checkpoint follows {name} as {tuple(rows.shape)} where {tuple(own[name].shape)} is "
                        "needed: it is of another model, or of a watch of another number of neurons"
                    )
            loaded = {
                name: rows.to(own[name].device, statistics_dtype(own[name].dtype)) for name, rows in saved.items()
            }
            kept.rows = {**now, **loaded}
        self._start, self._last, self.readings = start, last, readings

    def _check_read(self, what: str) -> None:
        if not self.readings:
            raise ValueError(f"there is nothing to {what} yet: call read() while the network trains")

    @torch.no_grad()
    def _look(self) -> list[Lines]:
        """Measure all layers, and remember where they stand."""
        followed = [
            found
            for part in self.optimiser.parts()
            if (state := self.optimiser.state.get(part.parameter))
            and (found := follow(part.name, part, state, self.neurons)) is not None
        ]
        places = {each.name: place for place, each in enumerate(followed)}
        lines, starts, lasts = [], {}, {}
        for bundle in bundles(followed):
            measured = measure(bundle, self._start, self._last, self.neurons)
            names = tuple(each.name for each in bundle)
            starts[names], lasts[names] = measured.start, measured.now
            heads = [(places[each.name], each.name, each.part.role.kind, each.rows.shape[0]) for each in bundle]
            lines.append(Lines(heads, _stacked(bundle, "step"), _stacked(bundle, "skipped"), measured.table))
        self._start.put(starts)
        self._last.put(lasts)
        return lines


def watch(optimiser: Nero, neurons: int | None = 32) -> Watch:
    """Watch a training run: how far each layer's neurons turn, and what else one wants to know of them.

    It does nothing while the network trains, and measures when it is read. Until then it keeps two copies of the
    neurons that it follows, where they started and where they were last read: ``8 * neurons * fan_in`` bytes a layer
    in float32.

    Args:
        optimiser: a :class:`nero.Nero`. What it holds now is the start; what is added later starts when first read.
        neurons: how many of each layer's neurons, gains or biases to follow at most, evenly spaced; ``None`` for all.

    Example:
        >>> import nero
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        >>> optimiser = nero.Nero(model, lr=0.01)
        >>> watched = watch(optimiser)
        >>> for step in range(200):
        ...     optimiser.zero_grad()
        ...     model(torch.randn(4, 8)).square().mean().backward()
        ...     optimiser.step()
        ...     if step % 100 == 99:
        ...         reading = watched.read()
        >>> reading.step, reading["0.weight"].role
        (200, 'neuron')
        >>> 0 < reading["0.weight"].turned.middle < 200 * 0.01
        True
    """
    if not isinstance(optimiser, Nero):
        raise TypeError(f"watch needs a nero.Nero, not {type(optimiser).__name__}")
    return Watch(optimiser, None if neurons is None else as_int("neurons", neurons, 1, ", or None for all"))


def _stacked(bundle: list[Followed], key: str) -> Tensor:
    return torch.stack([each.state[key] for each in bundle])


def _listed(layer: Layer) -> list[Any]:
    return [list(value) if isinstance(value, Spread) else value for value in layer]


def _readings(saved: Any) -> list[Reading]:
    """What was saved of readings.

    Raises:
        ValueError: if it is anything else.
    """
    match saved:
        case [*readings] if all(map(_is_reading, readings)):
            return [Reading.of([_layer(each) for each in one["layers"]], one["step"]) for one in readings]
    raise ValueError("not a watch's state_dict: its 'readings' are no list of steps and layers as they are saved")


def _layer(saved: list[Any]) -> Layer:
    return Layer(*saved[:5], *(Spread(*spread) for spread in saved[5:8]), *saved[8:])


def _is_reading(saved: Any) -> bool:
    match saved:
        case {"step": Real(), "layers": [*layers]}:
            return all(map(_is_layer, layers))
    return False


def _is_layer(saved: Any) -> bool:
    match saved:
        case [str(), str(), Real(), Real(), Real(), [*turned], [*from_start], [*grad_norm], Real(), Real(), Real()]:
            return all(_is_spread(each) for each in (turned, from_start, grad_norm))
    return False


def _is_spread(saved: list[Any]) -> bool:
    return len(saved) == len(Spread._fields) and all(isinstance(each, Real) for each in saved)


def _is_rows(saved: Any) -> bool:
    return isinstance(saved, Tensor) and saved.is_floating_point()


def _need(package: str, what: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"{what} needs {package}: pip install 'nero-optim[watch]'")
