"""The study of parameters that start at zero: its page against its records, its variants, and one short run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import nero
from nero_lab.starts import cases, run, tables
from nero_lab.starts.variants import Variant

ROOT = Path(__file__).parents[2]


def test_page_shows_the_committed_records(tmp_path: Path):
    for path in (tables.PAGE, tables.RECORDS):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    tables.main(tmp_path)
    assert (tmp_path / tables.PAGE).read_text() == (ROOT / tables.PAGE).read_text()


def test_records_support_the_rulings():
    records = tables.read(ROOT / tables.RECORDS)

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


@pytest.mark.parametrize("contender", ["before", "forced", "held", "ball", "adamw"])
def test_control_branch_starts_without_effect(contender: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pixels = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    monkeypatch.setattr(cases, "images", lambda *_: (pixels, torch.arange(64) % 10))
    monkeypatch.setattr(run, "STEPS", 3)
    monkeypatch.setattr(run, "BASE_STEPS", 2)
    monkeypatch.setitem(cases.CASES, "control", replace(cases.CASES["control"], batch=8))
    monkeypatch.setitem(cases.CASES, "denoiser", replace(cases.CASES["denoiser"], batch=8))
    run.train_base("denoiser", tmp_path, "cpu", tmp_path)
    record = run.run("control", contender, 0.01, 0, tmp_path, "cpu", tmp_path)
    assert json.loads(json.dumps(record)) == record
    assert len(record["train"]) == 3
    assert (record["train"][1] > 10 * record["untrained"]) == (contender == "before"), "only the jump is a catastrophe"
