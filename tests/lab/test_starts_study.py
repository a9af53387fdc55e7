"""The study of parameters that start at zero: its records, its variants, and one short run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import nero
from nero_lab.protocol import SettingError
from nero_lab.starts import __main__ as command
from nero_lab.starts import cases, tables
from nero_lab.starts.variants import Variant
from nero_lab.store import StoreError, read_json_lines

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def test_records_support_the_rulings():
    records = read_json_lines(ROOT / "results/studies/starts.jsonl")

    def mean(case: str, contender: str, lr: float = 0.01) -> float:
        found = tables.losses(records, case, contender, lr)
        assert len(found) == 3
        return sum(found) / 3

    for case in ("lora", "control"):
        assert mean(case, "ball-uncentred") < mean(case, "ball") < mean(case, "forced") < mean(case, "before")
    assert mean("lora", "ball-uncentred") < mean("lora", "adamw", 0.001)
    for case in ("zero-gain", "layer-scale", "convnext"):
        assert mean(case, "ball") < mean(case, "tenth") < mean(case, "hundredth") <= mean(case, "before")


def test_last_variant_is_nero():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4)).double() for _ in range(2)]
    nn.init.zeros_(models[0][3].weight)
    nn.init.constant_(models[0][1].weight, 1e-6)
    models[1].load_state_dict(models[0].state_dict())
    optimisers = [nero.Nero(models[0], 0.05), Variant(nero.param_groups(models[1]), 0.05, centre=False)]
    for step in range(40):
        inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for model, optimiser in zip(models, optimisers, strict=True):
            optimiser.zero_grad()
            (model(inputs) - inputs[:, :4]).square().mean().backward()
            optimiser.step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small data, narrow networks and short runs."""
    generator = torch.Generator().manual_seed(0)
    pixels, text = torch.randn(64, 3, 32, 32, generator=generator).clamp(-1, 1), torch.randint(256, (999,)).byte()
    monkeypatch.setattr(cases, "images", lambda *_: (pixels, torch.arange(64) % 10))
    monkeypatch.setattr(cases, "text", lambda *_: text)
    for name, value in {"STEPS": 3, "BASE_STEPS": 2, "VALIDATION_BATCHES": 1}.items():
        monkeypatch.setattr(command, name, value)
    for name, value in {"WIDTH": 48, "LAYERS": 2, "CONTEXT": 32}.items():
        monkeypatch.setattr(cases, name, value)
    for name, case in cases.CASES.items():
        is_denoiser = "denoiser" in (name, case.base)
        model = (lambda _: cases.Denoiser(16)) if name == "denoiser" else case.model
        monkeypatch.setitem(cases.CASES, name, replace(case, model=model, batch=2 if is_denoiser else 4))


@pytest.mark.usefixtures("small")
def test_only_the_jump_breaks_a_pretrained_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, contenders = tmp_path / "runs.jsonl", ("before", "forced", "held", "ball", "adamw@0.001")
    command.main(
        ["--data", str(tmp_path), "--out", str(out), "--cases", "control", "--seeds", "0", "--contenders", *contenders]
    )
    records = read_json_lines(out)
    assert [record["contender"] for record in records] == [name.partition("@")[0] for name in contenders]
    assert capsys.readouterr().out.count("valid") == 5
    command.main(
        ["--data", str(tmp_path), "--out", str(out), "--cases", "control", "--seeds", "0", "--contenders", *contenders]
    )
    assert read_json_lines(out) == records
    assert "all runs are in" in capsys.readouterr().out
    for record in records:
        assert len(record["train"]) == 3
        assert (record["train"][1] > 10 * record["untrained"]) == (record["contender"] == "before")


@pytest.mark.parametrize(
    ("contender", "fault"),
    [
        ("neero", "there is no contender 'neero': take one of nero, before"),
        ("nero@fast", "'nero@fast' must be a number"),
        ("nero@nan", "'nero@nan' must be a number"),
    ],
)
def test_contender_that_is_none_raises(contender: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command.main(["--data", str(tmp_path), "--out", str(tmp_path / "runs.jsonl"), "--contenders", contender])
    assert fault in capsys.readouterr().err


def test_device_and_file_that_do_not_fit_raise(tmp_path: Path):
    out = tmp_path / "runs.jsonl"
    with pytest.raises(SettingError, match="there is no device 'gpu'"):
        command.main(["--data", str(tmp_path), "--out", str(out), "--device", "gpu"])
    out.write_text('{"task": "mnist"}\n')
    with pytest.raises(StoreError, match="holds other records than of this study"):
        command.main(["--data", str(tmp_path), "--out", str(out)])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", [name for name in cases.CASES if name != "control"])
def test_case_trains_by_nero_as_by_its_variant(name: str, tmp_path: Path):
    if base := cases.CASES[name].base:
        command.train_base(base, tmp_path, CPU, tmp_path)
    ours, form = (command.run(name, way, 0.01, 0, tmp_path, CPU, tmp_path) for way in ("nero", "ball-uncentred"))
    assert ours["train"] == pytest.approx(form["train"], rel=1e-4)
