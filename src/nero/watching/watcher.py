"""A watch over an optimiser: free while the network trains, and measuring only when it is read."""

import importlib.util
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

import torch
from torch import Tensor

from nero.after_step import unwrapped
from nero.backends import has_entered
from nero.messages import how_to_install
from nero.optimiser import Nero
from nero.rule import statistics_dtype
from nero.scalars import as_int
from nero.watching.measure import Sample, Snapshot, make_batches, measure, pooled, take_sample
from nero.watching.reading import BatchResult, Layer, LayerHead, Reading, Spread, Writer


class Watch:
    """An observer of a training run; made by :func:`watch`.

    Attributes:
        optimiser: the optimiser whose parameters are watched.
        neurons: the largest number of neurons followed per layer; ``None`` for all.
        readings: all readings, the oldest first.
    """

    def __init__(self, optimiser: Nero, neurons: int | None) -> None:
        self.optimiser, self.neurons = optimiser, neurons
        self.readings: list[Reading] = []
        self._start: Snapshot = {}
        self._last: Snapshot = {}
        self._measure()

    @property
    def nbytes(self) -> int:
        """The memory of the watch: two copies of the neurons that it follows."""
        return sum(rows.nbytes for snapshot in (self._start, self._last) for rows in snapshot.values())

    def read(self, step: int | None = None) -> Reading:
        """Measure every layer, without synchronising with the device until a number is accessed.

        A parameter that is new to the optimiser starts at this reading.

        Args:
            step: the place of this reading on the axis of a plot; by default the number of steps the optimiser has
                made.

        Raises:
            ValueError: if ``step`` is not an integer.
        """
        number = None if step is None else as_int("step", step, what=", or None for the optimiser's own")
        reading = Reading(self._measure(), number)
        self.readings.append(reading)
        return reading

    def restart(self) -> None:
        """Make the current weights the start, for instance after loading other weights. Readings are kept."""
        self._start, self._last = {}, {}
        self._measure()

    def write(self, writer: Writer | str | PathLike[str]) -> None:
        """Write all readings to TensorBoard.

        Args:
            writer: a folder, which needs the package ``tensorboard``; a ``SummaryWriter``; or any object with the same
                ``add_scalar``. :meth:`Reading.write` writes one reading.
        """
        self._check_has_readings("write")
        if not isinstance(writer, str | PathLike):
            for reading in self.readings:
                reading.write(writer)
            return
        _check_installed("tensorboard", "writing to a folder")
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(fspath(writer)) as made:
            self.write(made)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw all readings as one picture, in the format of the path's suffix."""
        _check_installed("matplotlib", "a plot")
        self._check_has_readings("draw")
        from nero.watching.picture import draw

        draw(self.readings).savefig(path, metadata={"Software": None} if fspath(path).endswith(".png") else None)

    def state_dict(self) -> dict[str, Any]:
        """Return the snapshots and all readings, to resume in another process."""
        return {
            "start": dict(self._start),
            "last": dict(self._last),
            "readings": [
                {"step": reading.step, "layers": [_to_list(layer) for layer in reading.layers]}
                for reading in self.readings
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`.

        Load the model and the optimiser as well, in any order, before the next reading. An error changes nothing.

        Raises:
            ValueError: if it belongs to another model or follows other neurons.
        """
        if missing := [key for key in ("start", "last", "readings") if key not in state_dict]:
            raise ValueError(f"this is not the state_dict() of a watch: it has no {missing[0]!r}")
        # frozen parameters included: the run that was saved may have trained them
        samples = [take_sample(part, {}, self.neurons) for part in self.optimiser.parts()]
        own = {sample.part.name: sample.rows for sample in samples if sample is not None}
        start, last = (_checked_rows(state_dict[key], own) for key in ("start", "last"))
        readings = [
            Reading.of([_from_list(layer) for layer in saved["layers"]], saved["step"])
            for saved in state_dict["readings"]
        ]
        self._start |= start
        self._last |= last
        self.readings = readings

    def _check_has_readings(self, action: str) -> None:
        if not self.readings:
            raise ValueError(f"there are no readings to {action}: call read() while the network trains")

    @torch.no_grad()
    def _measure(self) -> list[BatchResult]:
        """Measure all layers, and update the snapshots."""
        parts = [part for part in self.optimiser.parts() if has_entered(self.optimiser.state.get(part.parameter))]
        found = [take_sample(part, self.optimiser.state[part.parameter], self.neurons) for part in parts]
        samples = [sample for sample in found if sample is not None]
        places = {part.name: place for place, part in enumerate(parts)}
        results = []
        for batch in make_batches(samples):
            measured = measure(batch, self._start, self._last, self.neurons)
            heads = [LayerHead(places[name], name, role.kind, rows.shape[0]) for (name, _, role, _), _, rows in batch]
            self._start.update(zip([head.name for head in heads], measured.start, strict=True))
            self._last.update(zip([head.name for head in heads], measured.now, strict=True))
            results.append(BatchResult(heads, _stacked(batch, "step"), _stacked(batch, "skipped"), measured.table))
        return pooled(results, parts, self.optimiser.state)


def watch(optimiser: torch.optim.Optimizer, neurons: int | None = 32) -> Watch:
    """Watch a training run: how far the neurons of each layer turn, and how healthy they are.

    Of a sharded parameter, each process follows neurons of its own part. All processes must read, and get the same
    numbers: the means of theirs, weighted by the number of neurons they follow.

    The watch does nothing while the network trains, and measures when it is read. It keeps two copies of the
    neurons that it follows, from the start and from the last reading: ``8 * neurons * fan_in`` bytes per layer
    in float32.

    Args:
        optimiser: a :class:`nero.Nero`, or a wrapper that holds one as ``optimizer``, like those of Accelerate and
            Lightning. Its current parameters are the start; later ones start at their first reading.
        neurons: the largest number of neurons, gains or biases to follow per layer, evenly spaced; ``None`` for all.

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
    optimiser = unwrapped(optimiser)
    if not isinstance(optimiser, Nero):
        raise TypeError(f"watch needs a nero.Nero, got {type(optimiser).__name__}")
    return Watch(optimiser, None if neurons is None else as_int("neurons", neurons, 1, ", or None for all"))


def _checked_rows(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert saved rows to the device and dtype of ``own``; raise if they are of another model."""
    for name, rows in saved.items():
        if name not in own or own[name].shape != rows.shape:
            here = f"{tuple(own[name].shape)} here" if name in own else "missing here"
            raise ValueError(
                "the state_dict belongs to another model, or to a watch of another number of neurons: "
                f"{name!r} is {tuple(rows.shape)} there and {here}"
            )
    return {name: rows.to(own[name].device, statistics_dtype(own[name].dtype)) for name, rows in saved.items()}


def _stacked(batch: list[Sample], key: str) -> Tensor:
    return torch.stack([sample.state[key] for sample in batch])


def _to_list(layer: Layer) -> list[Any]:
    return [list(value) if isinstance(value, Spread) else value for value in layer]


def _from_list(saved: list[Any]) -> Layer:
    return Layer(*saved[:5], *(Spread(*spread) for spread in saved[5:8]), *saved[8:])


def _check_installed(package: str, action: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"{action} needs {package}: {how_to_install('watch')}")
