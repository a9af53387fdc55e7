"""Shared settings of the tests."""

import gc
import os
import signal
import sys
from collections.abc import Generator

import hypothesis
import pytest
import torch

#: Without a GPU Triton's kernels are interpreted on the CPU, which is to be said before Triton is imported.
INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

from nero.backends import foreach, foreach_cpu  # noqa: E402
from nero.backends.available import is_installed  # noqa: E402

LIBRARIES = [name for name in ("numba", "triton") if is_installed(name)]

# examples are derived from the test alone: a run today is the run of tomorrow
hypothesis.settings.register_profile(
    "nero",
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("nero")
# as many workers as cores: threads beside them would wait for one another, here and in processes that tests start
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# a job in the background starts deaf to interrupts, and so would all that tests interrupt
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What cannot run here is left out, and not reported as skipped: gpu without one, float64 by Triton's kernels.

    Nor does coverage look on where every backend is tried and kernels are interpreted, which it makes more than
    twice as slow: but for a few that refuse a tensor, the lines are those that it sees in `test_triton`.
    """
    items[:] = [item for item in items if _can_run(item)]
    for item in items:
        if INTERPRETED and _given(item).get("backend") == "triton":
            item.add_marker(pytest.mark.no_cover)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """What is not to be covered is not traced.

    pytest-cov does no more than stop the coverage that it began last. In a worker it has begun two, and the first goes
    on where the second stops.
    """
    if not item.get_closest_marker("no_cover"):
        return (yield)
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)


def pytest_collection_finish() -> None:
    """What is there before the first test stays: whoever collects garbage need not look through it."""
    gc.collect()
    gc.freeze()


def _can_run(item: pytest.Item) -> bool:
    given = _given(item)
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return False
    if given.get("backend") != "triton":
        return True
    here = "cpu" if INTERPRETED else "cuda"
    return given.get("device", "cpu") == here and given.get("dtype") != torch.float64


def _given(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def few(backend: str, many: int, enough: int = 20) -> int:
    """How many steps or examples to try: of an interpreted kernel, which takes a thousand times as long, fewer."""
    return enough if backend == "triton" and INTERPRETED else many


@pytest.fixture(params=["eager", "foreach", *LIBRARIES, "foreach, in pieces", "foreach, in stacks"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every backend; foreach also with small tensors in pieces, as large ones on a CPU, and in stacks, as on a GPU."""
    if request.param == "foreach, in pieces":
        monkeypatch.setattr(foreach_cpu, "MAX_SMALL_ELEMENTS", 0)
        monkeypatch.setattr(foreach_cpu, "PIECE_ELEMENTS", 20)
        return "foreach"
    if request.param == "foreach, in stacks":
        monkeypatch.setattr(foreach_cpu, "turn", foreach._turn_stacks)
        monkeypatch.setattr(foreach, "MAX_STACK_ELEMENTS", 100)
        return "foreach"
    return str(request.param)
