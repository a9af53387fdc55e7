"""Timing of steps: contenders take turns, on a clock that waits for the accelerator."""

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

Step: TypeAlias = Callable[[], object]
Row: TypeAlias = dict[str, Any]
Job: TypeAlias = Callable[[], list[Row]]
#: Seconds per step, by the round in which they were measured.
Rounds: TypeAlias = dict[int, float]

#: The clock rate of a fast GPU; on a slower one, waiting for this many cycles takes longer than a second.
CYCLES_PER_S = 2e9
MAX_BURST_STEPS = 200


class Budget(NamedTuple):
    """The limits of a measurement."""

    rounds: int = 30  # each contender has one turn per round
    seconds: float = 1.0  # a contender stops when its turns have taken this long
    min_rounds: int = 5
    burst_s: float = 0.005  # a turn is a burst of steps of about this length


@dataclass
class Bench:
    """The settings and the state of a benchmark run."""

    device: torch.device
    budget: Budget
    bandwidth: float  # of a copy, in bytes per second read and written
    is_quick: bool  # tiny sizes, for a rehearsal
    compile_budget_s: float  # seconds left for torch.compile
    tick: Step = lambda: None  # called between measurements
    notes: list[str] = field(default_factory=list)  # what was left out, and why


class Clock:
    """A clock for steps on one device."""

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """Record the current time: as an event on the device's stream, or of the host."""
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks that the device has passed."""
        return float(begin.elapsed_time(end)) / 1e3 if self.is_gpu else float(end - begin)

    def burst(self, step: Step, count: int = 1) -> float:
        """Return the seconds per step of a burst: of the host or of the device, whichever takes longer."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        self.synchronize()
        return (time.perf_counter() - start) / count

    def host_seconds(self, step: Step) -> float:
        """Return the seconds until the call of a step returns, on an idle device."""
        self.synchronize()
        start = time.perf_counter()
        step()
        taken = time.perf_counter() - start
        self.synchronize()
        return taken

    def device_seconds(self, step: Step, count: int, lead: float) -> float | None:
        """Return the seconds per step on the device alone; ``None`` if the host cannot queue the steps in time.

        The device sleeps for ``lead`` seconds while the host queues the steps. If it wakes before all are queued (a
        step synchronises, or needs more launches than the queue holds), the result would be the host's time.
        """
        self.synchronize()
        torch.cuda._sleep(int(lead * CYCLES_PER_S))  # type: ignore[no-untyped-call]
        begin = self.mark()
        for _ in range(count):
            step()
        end = self.mark()
        is_ahead = not begin.query()
        self.synchronize()
        return self.seconds_between(begin, end) / count if is_ahead else None


def burst_length(step: Step, clock: Clock, budget: Budget) -> int:
    """Return the number of steps in a turn."""
    if clock.burst(step) > budget.burst_s:
        return 1
    return max(1, min(MAX_BURST_STEPS, math.ceil(budget.burst_s / clock.burst(step, 5))))


def take_turns(
    steps: Mapping[str, Step],
    counts: Mapping[str, int],
    clock: Clock,
    budget: Budget,
    always: Collection[str] = (),
    tick: Step = lambda: None,
) -> dict[str, Rounds]:
    """Time the contenders in turn, each until its budget is spent.

    Args:
        steps: a step of each contender, by name.
        counts: the number of steps in a turn, by name.
        clock: times the turns.
        budget: limits the rounds.
        always: contenders that take part in every round, since others are compared with them.
        tick: called after each round.
    """
    times: dict[str, Rounds] = {name: {} for name in steps}
    spent = dict.fromkeys(steps, 0.0)
    for number in range(budget.rounds):
        due = {name for name in steps if spent[name] < budget.seconds or len(times[name]) < budget.min_rounds}
        if not due:
            break
        for name, step in steps.items():
            if name in due or name in always:
                times[name][number] = clock.burst(step, counts[name])
                spent[name] += times[name][number] * counts[name]
        tick()
    return times


def ratio(times: Rounds, others: Rounds) -> float:
    """Return the median ratio of turns of the same round, which share the machine's other load."""
    return statistics.median(taken / others[number] for number, taken in times.items() if number in others)


def difference(times: Rounds, others: Rounds) -> float:
    """Return the median difference of turns of the same round."""
    return statistics.median(taken - others[number] for number, taken in times.items() if number in others)


def device_time(step: Step, count: int, host: float, clock: Clock) -> float | None:
    """Return the seconds per step on the device alone, if there is one.

    The median of five bursts counts, or of five single steps if a burst does not fit in the queue.

    Args:
        step: the step.
        count: the length of a burst.
        host: the seconds that the host needs to queue a step.
        clock: times the steps.
    """
    if not clock.is_gpu:
        return None
    for number in dict.fromkeys((count, 1)):
        times: list[float] = []
        while len(times) < 5:
            taken = clock.device_seconds(step, number, lead=min(0.5, 2 * number * host + 0.002))
            if taken is None:
                break
            times.append(taken)
        else:
            return statistics.median(times)
    return None


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Return the bytes per second, read and written, of the fastest of several copies of ``size`` bytes."""
    clock = Clock(device)
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    clock.burst(lambda: target.copy_(source), 2)
    return 2 * source.nbytes / min(clock.burst(lambda: target.copy_(source), 3) for _ in range(20))


def milliseconds(seconds: float | None) -> float | None:
    """Convert seconds to rounded milliseconds."""
    return None if seconds is None else round(1e3 * seconds, 4)
