"""Which optimisers are timed."""

import sys
from types import SimpleNamespace

import contenders
import pytest
import torch


def test_contenders_include_torch_nero_and_other_libraries(monkeypatch: pytest.MonkeyPatch):
    library = SimpleNamespace(Nero=torch.optim.SGD, LAMB=torch.optim.Adam)
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", library)
    found, notes = contenders.find_contenders(torch.device("cpu"), with_compiled=True)
    names = [contender.name for contender in found]
    assert len(set(names)) == len(names)
    assert {"Adam (fused)", "SGD (compiled)", "Nero (pytorch_optimizer)", "Lamb (pytorch_optimizer)"} <= set(names)
    assert {"Nero (eager)", "Nero (foreach)"} <= set(names)
    assert [note.partition(":")[0] for note in notes] == ["Muon"]


def test_contenders_that_cannot_run_are_noted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    found, notes = contenders.find_contenders(torch.device("cpu"), with_compiled=False)
    assert not any("compiled" in contender.name or "pytorch_optimizer" in contender.name for contender in found)
    assert len(notes) == 3
