"""The processes of all tests of sharding."""

from collections.abc import Iterator

import pytest
from sharding.processes import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Pools of processes, shared by all tests of a session."""
    pools = Pools()
    yield pools
    pools.stop()
