"""How long a step takes: contenders take turns, and a clock that knows what an accelerator still has to do."""

import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

Step: TypeAlias = Callable[[], object]
Row: TypeAlias = dict[str, Any]
Job: TypeAlias = Callable[[], list[Row]]
#: Seconds a step, by the round in which they were measured.
Rounds: TypeAlias = dict[int, float]

#: Cycles a second of a fast GPU; on a slower one, a wait of so many cycles only gets longer.
CYCLES = 2e9


class Plan(NamedTuple):
    """How long to measure."""

    rounds: int = 30  # in which each contender has a turn,
    seconds: float = 1.0  # until its turns have taken this long,
    least: int = 5  # but it has at least so many
    burst: float = 0.005  # a turn is as many steps as take this long


@dataclass
class Bench:
    """What a section is run with."""

    device: torch.device
    plan: Plan
    bandwidth: float  # of a copy, in bytes a second, read and written
    quick: bool  # sizes for a rehearsal
    compiling: float  # seconds that may still go into compiling
    tick: Step = lambda: None  # called between measurements
    notes: list[str] = field(default_factory=list)  # on what was left out


class Clock:
    """Times steps on one device."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self.gpu:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """A moment: the device's, when it gets there, or else the host's."""
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        """Seconds between two marks that the device has passed."""
        return float(begin.elapsed_time(end)) / 1e3 if self.gpu else float(end - begin)

    def burst(self, step: Step, count: int = 1) -> float:
        """Seconds a step, of so many issued back to back: the host's time or the device's, whichever is longer."""
        self.wait()
        start = time.perf_counter()
        for _ in range(count):
            step()
        self.wait()
        return (time.perf_counter() - start) / count

    def until_return(self, step: Step) -> float:
        """Seconds until the call of a step returns, with nothing for the device to do before it."""
        self.wait()
        start = time.perf_counter()
        step()
        taken = time.perf_counter() - start
        self.wait()
        return taken

    def on_device(self, step: Step, count: int, lead: float) -> float | None:
        """Seconds a step on the device alone; ``None`` if the host does not get ahead of it.

        The device is kept busy for the lead, in seconds, while the host queues the steps; if it is
        through with that before they are all queued (a step waits for the device, or is more
        launches than the queue holds), what would be timed is the host.
        """
        self.wait()
        torch.cuda._sleep(int(lead * CYCLES))  # type: ignore[no-untyped-call]
        begin = self.mark()
        for _ in range(count):
            step()
        end = self.mark()
        ahead = not begin.query()
        self.wait()
        return self.between(begin, end) / count if ahead else None


def burst_length(step: Step, clock: Clock, plan: Plan) -> int:
    """How many steps make a turn."""
    if clock.burst(step) > plan.burst:
        return 1
    return max(1, min(200, math.ceil(plan.burst / clock.burst(step, 5))))


def take_turns(
    steps: Mapping[str, Step],
    counts: Mapping[str, int],
    clock: Clock,
    plan: Plan,
    always: Collection[str] = (),
    tick: Step = lambda: None,
) -> dict[str, Rounds]:
    """Time the contenders in turn, each until it has used up its share; some always, to be compared with."""
    times: dict[str, Rounds] = {name: {} for name in steps}
    spent = dict.fromkeys(steps, 0.0)
    for number in range(plan.rounds):
        due = {name for name in steps if spent[name] < plan.seconds or len(times[name]) < plan.least}
        if not due:
            break
        for name, step in steps.items():
            if name in due or name in always:
                times[name][number] = clock.burst(step, counts[name])
                spent[name] += times[name][number] * counts[name]
        tick()
    return times


def ratio(times: Rounds, others: Rounds) -> float:
    """The median of ratios of neighbours, so that what else the machine does weighs on both."""
    return statistics.median(taken / others[number] for number, taken in times.items() if number in others)


def difference(times: Rounds, others: Rounds) -> float:
    """The median of differences of neighbours."""
    return statistics.median(taken - others[number] for number, taken in times.items() if number in others)


def device_time(step: Step, count: int, host: float, clock: Clock, repeats: int = 5) -> float | None:
    """Seconds a step on the device alone, if it has them; in bursts, or where the queue is too short one by one."""
    if not clock.gpu:
        return None
    for number in dict.fromkeys((count, 1)):
        times: list[float] = []
        while len(times) < repeats:
            taken = clock.on_device(step, number, lead=min(0.5, 2 * number * host + 0.002))
            if taken is None:
                break
            times.append(taken)
        else:
            return statistics.median(times)
    return None


def copy_bandwidth(device: torch.device, size: int, repeats: int = 20) -> float:
    """Bytes a second, read and written, in the fastest of some copies of so many bytes."""
    clock = Clock(device)
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    clock.burst(lambda: target.copy_(source), 2)
    return 2 * source.nbytes / min(clock.burst(lambda: target.copy_(source), 3) for _ in range(repeats))


def milliseconds(seconds: float | None) -> float | None:
    """For the record."""
    return None if seconds is None else round(1e3 * seconds, 4)


def machine(device: torch.device) -> str:
    """The machine's name: its accelerator's, or its processor's with the number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if shutil.which("lscpu"):
        listing = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
        found = re.search(r"^Model name:\s*(.+)$", listing, re.MULTILINE)
        name = found[1].strip() if found else name
    return f"{name}, {platform.machine()}, {os.cpu_count()} cores"
