"""Isolation of the data tests from the network and from the user's data."""

from collections.abc import Callable
from pathlib import Path

import pytest
from lab.data_cases import checksum, files_of

from nero_lab.data import sources


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch):
    """Hide the mirrors and the user's data folders."""
    monkeypatch.setattr(sources, "MIRRORS", dict.fromkeys(sources.MIRRORS, ()))
    for variable in ("NERO_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, bytes], Path]:
    """Return a function that writes a file and registers its checksum."""

    def write(path: Path, content: bytes) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        monkeypatch.setitem(files_of(path.name), path.name, checksum(content, path.name))
        return path

    return write
