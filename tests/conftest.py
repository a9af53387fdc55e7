"""Shared settings of the tests."""

import os

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; to be said before Triton is imported

from nero.backends import BACKENDS, cpu, foreach

# examples are derived from the test alone: a run today is the run of tomorrow
hypothesis.settings.register_profile(
    "nero",
    derandomize=True,
    deadline=None,
    max_examples=150,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("nero")
torch.set_num_threads(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are left out on a machine without one, and not reported as skipped."""
    if not torch.cuda.is_available():
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(params=[*BACKENDS, "triton", "foreach, in pieces", "foreach, in stacks"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every backend; foreach also with small tensors in pieces, as large ones on a CPU, and in stacks, as on a GPU."""
    if request.param == "foreach, in pieces":
        monkeypatch.setattr(cpu, "SMALL", 0)
        monkeypatch.setattr(cpu, "PIECE", 20)
        return "foreach"
    if request.param == "foreach, in stacks":
        monkeypatch.setattr(cpu, "turn", foreach._turn_stacks)
        monkeypatch.setattr(foreach, "STACK", 100)
        return "foreach"
    return str(request.param)
