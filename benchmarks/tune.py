"""Time candidates for the tables of tiles and blocks in nero.backends.triton.tables, on the shapes that each is for.

    python benchmarks/tune.py            # all trials: some minutes, most of which compile kernels
    python benchmarks/tune.py columns    # the trials whose names contain a word

Candidates take turns. A time is the device's alone, with a full queue; a share is that of a copy's bandwidth. The first
candidate of a trial is the entry in the table.
"""

import argparse
import os
import statistics
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from bench import free_memory
from shapes import Parameters, Shapes, flat, groups, twin
from timing import Budget, Clock, Step, burst_length, copy_bandwidth

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import nero
from nero.backends.triton.tables import BLOCKS, TILES, UNALIGNED_TILES, Tile

#: Candidates of a table: entries to replace; ``None`` removes one.
Entries = dict[int, Any]
ROUNDS, BUDGET = 15, Budget()


class Trial(NamedTuple):
    """The candidates of a table, and the parameters and options to time them with."""

    name: str
    shapes: Shapes
    table: dict[int, Any]
    candidates: list[Entries]
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = MappingProxyType({})

    @property
    def bytes_per_step(self) -> int:
        """The least bytes that a step moves."""
        tensors = 5 if self.options.get("momentum") else 3
        return tensors * self.dtype.itemsize * self.shapes.total


def trials(is_quick: bool) -> list[Trial]:
    """Return all trials, or with ``is_quick`` those of tiny tensors."""

    def shapes(tiny: list[tuple[int, ...]], real: list[tuple[int, ...]], axes: tuple[int, ...] | None = None) -> Shapes:
        return Shapes("", {axes: tiny if is_quick else real})

    short = shapes([(300, 8)], [(768, 2304), (768, 768), (768, 3072)] * 12, (0,))
    long = shapes([(1100, 8)], [(3072, 768)] * 12, (0,))
    llama = shapes([(3, 2048), (2, 5632)], [*[(2048, 2048)] * 4, *[(5632, 2048)] * 2, (2048, 5632)] * 6)
    wide = [(50257, 511), (1000, 1001), (1001, 999), (3, 100003), (100003, 3), (333, 7, 3, 3)]
    odd = shapes([(5, 511), (2, 20_003), (9, 3)], wide)
    half: dict[str, dict[str, Any]] = {
        "": {},
        ", stochastic": {"rounding": "stochastic"},
        ", momentum": {"momentum": 0.9},
        ", stochastic, momentum": {"rounding": "stochastic", "momentum": 0.9},
    }
    short_blocks = [(8, 1024, 8, 128), (16, 256, 8, 128), (32, 128, 8, 128), (32, 128, 16, 128), (64, 128, 16, 128)]
    long_blocks = [(8, 1024, 16, 128), (16, 128, 16, 128), (32, 128, 16, 128)]
    short_half = [(32, 256, 8, 128), (32, 256, 16, 128), (64, 64, 8, 128), (64, 128, 16, 128)]
    long_half = [(16, 512, 16, 128), (32, 128, 16, 128), (32, 256, 8, 128), (32, 256, 16, 128)]
    made = [
        Trial(
            f"columns of {length}{name}",
            columns,
            BLOCKS[4],
            [{}, *({up_to: entry} for entry in blocks)],
            options=options,
        )
        for length, columns, up_to, blocks in ((768, short, 1024, short_blocks), (3072, long, 16384, long_blocks))
        for name, options in (("", {}), (", momentum", {"momentum": 0.9}))
    ]
    for name, options in half.items():
        for length, columns, up_to, blocks in ((768, short, 2048, short_half), (3072, long, 16384, long_half)):
            entries: list[Entries] = [{}, *({up_to: entry} for entry in blocks)]
            made.append(Trial(f"columns of {length}, bf16{name}", columns, BLOCKS[2], entries, torch.bfloat16, options))
        registers = [112, 144, 168] if "momentum" in options else [80, 112, 128]
        narrow: list[Entries] = [{2048: Tile(2, each, each)} for each in registers]
        broad: list[Entries] = [{8192: Tile(8, each, each)} for each in registers] + [{8192: Tile(16, 64, 64)}]
        candidates = [{}, {2048: None}, *narrow, *broad]
        made.append(Trial(f"Llama, bf16{name}", llama, TILES[2], candidates, torch.bfloat16, options))
    made += [
        Trial("Llama", llama, TILES[4], [{}, {2048: Tile(2, 96)}, {8192: Tile(8, 96)}]),
        Trial(
            "rows of 768",
            shapes([(3, 768)], [(50257, 768)] * 2),
            TILES[4],
            [{}, {1024: Tile(1, 72)}, {1024: Tile(1, 96)}],
        ),
        Trial("odd", odd, UNALIGNED_TILES, [{}, {512: None}, {512: Tile(1, 72)}, {512: Tile(1, 80)}]),
        Trial("odd, momentum", odd, UNALIGNED_TILES, [{}, {512: None}], options={"momentum": 0.9}),
        Trial("rows of 511", shapes([(5, 511)], wide[:1]), UNALIGNED_TILES, [{}, {512: None}]),
    ]
    return [trial._replace(candidates=trial.candidates[:2]) for trial in made] if is_quick else made


def measure(trial: Trial, device: torch.device, bandwidth: float, is_quick: bool) -> list[str]:
    """Time the candidates of a trial in turn, and return a line about each."""
    start = trial.shapes.parameters(device)
    clock, steps = Clock(device), {}
    reference = None
    for entries in trial.candidates:
        parameters = twin(start, trial.dtype)
        steps[_name(entries)] = _first_step(trial, entries, parameters)
        if trial.options.get("rounding") != "stochastic":
            reference = reference or _by_foreach(trial, start)
            _compare(flat(parameters), reference, trial)
    counts = {name: 1 if is_quick else burst_length(step, clock, BUDGET) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 if is_quick else ROUNDS):
        for name, step in steps.items():
            taken = _seconds(step, counts[name], clock)
            times[name] += [] if taken is None else [taken]
    lines = []
    for name, taken_times in times.items():
        if not taken_times:
            lines.append(f"  {name}: the host is too slow to measure the device")
            continue
        seconds = statistics.median(taken_times)
        share = trial.bytes_per_step / seconds / bandwidth
        lines.append(f"  {name}: {1e6 * seconds:.1f} us, {share:.1%}")
    return lines


def _seconds(step: Step, count: int, clock: Clock) -> float | None:
    """Return the seconds per step of the device, if there is one."""
    if not clock.is_gpu:
        return clock.burst(step, count)
    host = clock.host_seconds(step)
    return clock.device_seconds(step, count, lead=min(0.5, 2 * count * host + 0.002))


def _first_step(trial: Trial, entries: Entries, parameters: Parameters) -> Step:
    """Make an optimiser whose first step, which is taken here, reads the table with these entries."""
    before = dict(trial.table)
    changed = {key: entry for key, entry in (before | entries).items() if entry is not None}
    try:
        _set(trial.table, changed)
        optimiser = nero.Nero(groups(parameters), backend="triton", **trial.options)
        optimiser.step()
    finally:
        _set(trial.table, before)
    return optimiser.step


def _set(table: dict[int, Any], entries: Entries) -> None:
    table.clear()
    table.update(sorted(entries.items()))


def _by_foreach(trial: Trial, start: Parameters) -> list[torch.Tensor]:
    parameters = twin(start, trial.dtype)
    nero.Nero(groups(parameters), backend="foreach", **trial.options).step()
    return [parameter.detach() for parameter in flat(parameters)]


def _compare(found: list[torch.nn.Parameter], wanted: list[torch.Tensor], trial: Trial) -> None:
    """Exit if a step differs from that of foreach by more than rounding."""
    for one, other in zip(found, wanted, strict=True):
        apart, size = float((one.detach() - other).abs().max()), float(other.abs().max())
        if not apart <= 4 * torch.finfo(trial.dtype).eps * size:
            raise SystemExit(f"{trial.name}: {tuple(one.shape)} is {apart:.2g} from foreach's step, of size {size:.2g}")


def _name(entries: Entries) -> str:
    if not entries:
        return "as in the table"
    return ", ".join(f"{key}: {tuple(entry) if entry else 'none'}" for key, entry in entries.items())


def main(argv: list[str] | None = None) -> int:
    """Run the trials."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("word", nargs="?", default="", help="of the names of the trials to run")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a rehearsal, also without a GPU")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.quick:
        parser.error("there is no GPU here; --quick rehearses on the CPU")
    bandwidth = copy_bandwidth(device, 1 << (20 if arguments.quick else 30))
    print(f"a copy moves {bandwidth / 1e9:.0f} GB/s")
    for trial in trials(arguments.quick):
        if arguments.word in trial.name:
            print(trial.name, *measure(trial, device, bandwidth, arguments.quick), sep="\n", flush=True)
            free_memory(device)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
