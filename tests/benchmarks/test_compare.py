"""The comparison of two checkouts."""

import io
import json

import compare
import pytest
import torch

import nero

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", compare.KINDS)
def test_measure_takes_the_steps_asked_for(kind: str):
    parameter = torch.nn.Parameter(torch.randn(4, 5))
    parameter.grad = torch.randn(4, 5)
    optimiser, grad = nero.Nero([parameter]), parameter.grad
    assert compare.measure(optimiser, kind, 3, CPU) > 0
    assert optimiser.state[parameter]["step"] == 3
    assert (parameter.grad is grad) == (kind == "in place")


def test_serve_answers_each_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    request = json.dumps({"name": "rehearsal", "kind": "fresh", "steps": 2})
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{request}\n{request}\n"))
    compare.serve(CPU, quick=True)
    assert [float(line) > 0 for line in capsys.readouterr().out.splitlines()] == [True, True]


def test_folder_without_nero_is_an_error(tmp_path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path)])
    assert "holds the package nero" in capsys.readouterr().err
