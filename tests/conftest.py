"""Shared settings of the tests."""

import hypothesis
import pytest
import torch

from nero.backends import BACKENDS, cpu

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


@pytest.fixture(params=[*BACKENDS, "foreach, in pieces"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every backend; foreach also with small tensors turned as it turns large ones on a CPU, in pieces."""
    if request.param == "foreach, in pieces":
        monkeypatch.setattr(cpu, "SMALL", 0)
        monkeypatch.setattr(cpu, "PIECE", 20)
        return "foreach"
    return str(request.param)
