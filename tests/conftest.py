"""Settings and fixtures of all tests."""

import gc
import os
import signal
import sys
from collections.abc import Generator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import hypothesis
import pytest
import torch
from cases import CASES, ROUNDING, TOLERANCE
from interpreter import INTERPRETED

from nero.backends import foreach, foreach_cpu
from nero.backends.available import COMPILED

#: dtypes whose tests are not traced: they run the lines of float32 and bfloat16.
UNTRACED = (torch.float64, torch.float16)
#: Parts of the names of tests that share what takes long to make: processes, a site, a package, or compiled code.
TOGETHER = (
    *("jax", "sharding/", "test_distributed_training.py", "test_site.py", "test_project.py", "test_bench.py"),
    *("numba", "transformers", "test_sweep.py", "test_ray_sweep.py"),
)
WORKING = [name for name, backend in COMPILED.items() if backend.works()]
BACKENDS = ["eager", "foreach", *WORKING, "foreach, in pieces", "foreach, in stacks"]

hypothesis.settings.register_profile(
    "nero",
    derandomize=True,  # the same examples in every run
    deadline=None,
    max_examples=30,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("nero")
# imports and collection make no garbage worth collecting
gc.disable()
# there are as many workers as cores, so more threads would only wait for one another
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# JAX takes three quarters of a GPU's memory when it starts, and leaves too little for torch and other processes
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# nearly all the time of the tests of JAX is XLA's, which compiles each function for the few steps of a test;
# it aborts on flags that it does not know, and each version has others
with suppress(PackageNotFoundError):
    if version("jaxlib").startswith("0.10."):
        os.environ.setdefault(
            "XLA_FLAGS",
            "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
            " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
        )
# a graph of an earlier test that is freed during a capture would break it; torch before 2.9 always collects
if hasattr(torch.compiler.config, "force_cudagraph_gc"):
    torch.compiler.config.force_cudagraph_gc = True
# torch would record the stack at every seed, for devices that are not there
if not torch.accelerator.is_available():
    torch.random._manual_seed_impl = lambda seed: torch.default_generator.manual_seed(int(seed))
# a background job starts with interrupts ignored, and its child processes inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Run the tests that are :data:`TOGETHER` in one worker each, and so all cases of a function.

    The mark ``xdist_group`` would do so, but has no effect with pytest 9.2 and xdist 3.8.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # it would run the longest tests last, as they are alone in their function

    class OneWorkerForShared(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((name for name in TOGETHER if name in nodeid), nodeid.partition("[")[0])

    return OneWorkerForShared(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop tests that cannot run here, and do not trace interpreted kernels or the second dtype of a kind.

    Tracing makes them more than twice as slow, and other tests cover the same lines. Tests that run in one worker come
    first, so that no worker is left with many at the end.
    """
    items[:] = sorted(filter(_can_run, items), key=lambda item: not any(name in item.nodeid for name in TOGETHER))
    for item in items:
        given = _given(item)
        if (INTERPRETED and given.get("backend") == "triton") or given.get("dtype") in UNTRACED:
            item.add_marker(pytest.mark.no_cover)


@pytest.fixture(autouse=True)
def same_start() -> Generator[None]:
    """Seed torch, so that no test depends on the ones before it, and turn oneDNN on again after it.

    Torch turns oneDNN off in a process whose product of bf16 fails, as on ARM without bf16.
    """
    torch.manual_seed(0)
    yield
    torch.backends.mkldnn.enabled = True


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Stop tracing in tests marked ``no_cover``.

    pytest-cov stops only the coverage that it started last, and in a worker it has started two.
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
    """Exempt everything that exists before the first test from garbage collection, and collect seldom."""
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


def pytest_unconfigure() -> None:
    """Undo that, or Triton reports its objects as leaks when the process ends."""
    gc.unfreeze()


def _can_run(item: pytest.Item) -> bool:
    given = _given(item)
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return False
    device, dtype = given.get("device", "cpu"), given.get("dtype")
    backend = given.get("backend")
    # on a CPU, a case is stepped in one of two dtypes that take the same path: in the other by the next backend
    has_own_path = (backend in WORKING and dtype not in ROUNDING) or (backend, dtype) == ("numba", torch.bfloat16)
    if device == "cpu" and "case" in given and backend in BACKENDS and not has_own_path:
        dtypes = list(ROUNDING if dtype in ROUNDING else TOLERANCE)
        if dtypes.index(dtype) != (CASES.index(given["case"]) + BACKENDS.index(backend)) % 2:
            return False
    return backend != "triton" or (device == ("cpu" if INTERPRETED else "cuda") and dtype != torch.float64)


def _given(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every backend; foreach also in small pieces, as for large tensors, and in stacks, as on a GPU."""
    if request.param == "foreach, in pieces":
        monkeypatch.setattr(foreach_cpu, "MAX_SMALL_ELEMENTS", 0)
        monkeypatch.setattr(foreach_cpu, "PIECE_ELEMENTS", 20)
        return "foreach"
    if request.param == "foreach, in stacks":
        monkeypatch.setattr(foreach_cpu, "turn", foreach._turn_stacks)
        monkeypatch.setattr(foreach, "MAX_STACK_ELEMENTS", 100)
        return "foreach"
    return str(request.param)
