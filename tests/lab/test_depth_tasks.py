"""Tasks and contenders of the study of step size by depth, and how `nero` runs them."""

import sys
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import nero
from nero_lab import cli
from nero_lab.baselines import make
from nero_lab.data import ImageDataset, Images
from nero_lab.models.mlp import mlp
from nero_lab.protocol import SettingError
from nero_lab.store import read_records
from nero_lab.tasks import TASKS, depth, paper, task_named

VARIANTS = ("-falling", "-normed", "-swift")


def test_tasks_are_the_papers_then_the_perceptrons():
    names = list(TASKS)
    assert names[:11] == [task.name for task in paper.TASKS]
    assert names[11:16] == [f"perceptron-{layers}" for layers in (5, 10, 20, 50, 100)]
    assert {name.split("-", 2)[2] for name in names[16:]} == {"falling", "normed", "swift"}
    assert len(names) == 11 + 20


@pytest.mark.parametrize(
    ("task", "form", "options"),
    [
        ("perceptron-5", "auto", {"depth": "auto", "longest_step": 3.0}),
        ("perceptron-5-swift", "auto", {"beta": 0.9, "depth": "auto", "longest_step": 3.0}),
        ("mnist-deep", "unbounded", {"depth": "auto"}),
        ("wikitext2", "loose", {"depth": "auto", "longest_step": 10.0}),
        (
            "cifar10-ablation",
            "auto",
            {"fix_mean": True, "fix_norm": True, "fixed_scale": True, "depth": "auto", "longest_step": 3.0},
        ),
    ],
)
def test_by_depth_adds_options_of_the_form(task: str, form: str, options: dict):
    found = task_named(task, form)
    assert dict(found.contenders[form].options) == options
    assert list(found.contenders) == ["auto", "unbounded", "loose"]
    assert found.settings(form).lr == 0.1
    assert (found.name, found.epochs) == (task, TASKS[task].epochs)


def test_by_depth_task_without_nero_raises():
    with pytest.raises(SettingError, match="mnist-reparameterised is not trained by Nero: take one of sigma-1"):
        task_named("mnist-reparameterised", "auto")


def test_task_named_forms_beside_others_raises():
    assert task_named("mnist-deep", "nero", "sgd") is TASKS["mnist-deep"]
    with pytest.raises(SettingError, match="holds trusts instead of rates: sweep nero, sgd apart"):
        task_named("mnist-deep", "sgd", "auto", "nero")


def test_form_auto_is_lr_auto_of_the_optimiser():
    models = [mlp(3, width=16) for _ in range(2)]
    options = task_named("mnist-deep", "auto").contenders["auto"].options
    ours, theirs = make("nero", models[0], depth.TRUST, **options), nero.Nero(models[1], lr="auto")
    for model in models:
        model(torch.randn(2, 4, 4)).sum().backward()
    for mine, group in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert all(mine[name] == group[name] for name in ("lr", "depth", "longest_step", "beta"))
    assert ours.param_groups[0]["depth"] == 3


def test_normed_mlp_has_norms_behind_hidden_layers():
    layers = [type(module) for module in depth.normed_mlp(3)]
    hidden = [nn.Linear, nn.BatchNorm1d, type(mlp(2)[2])]
    assert layers == [nn.Flatten, *hidden, *hidden, nn.Linear]
    assert sum(1 for _ in depth.normed_mlp(3).parameters()) == 6


def test_falling_schedule_starts_at_one_and_ends_at_zero():
    assert [depth.falling(step, 10) for step in (0, 25, 50)] == [1.0, 0.5, 0.0]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return `nero ...` in this process, on a few made images: its exit code and what it printed."""
    noise = torch.Generator().manual_seed(0)

    def images(count: int) -> Images:
        pixels = torch.randint(256, (count, 1, 8, 8), generator=noise, dtype=torch.uint8)
        return Images(pixels, torch.arange(count) % 10)

    monkeypatch.setattr(cli, "load", lambda *_, **__: ImageDataset("mnist", images(20), images(10), (0.5,), (0.25,)))
    for name in ("mnist-deep", "perceptron-5", *(f"perceptron-5{variant}" for variant in VARIANTS)):
        model = depth.normed_mlp if name.endswith("normed") else mlp
        monkeypatch.setitem(TASKS, name, replace(TASKS[name], model=partial(model, 2, width=64)))

    def call(*arguments: str) -> tuple[object, str]:
        printed = StringIO()
        monkeypatch.setattr(cli, "console", Console(file=printed, width=160, markup=False, highlight=False))
        places = [] if arguments[0] == "list" else ["--out", str(tmp_path), "--device", "cpu", "--epochs", "1"]
        monkeypatch.setattr(sys, "argv", ["nero", *arguments, *places])
        try:
            cli.main()
        except SystemExit as end:
            return end.code, printed.getvalue()
        return 0, printed.getvalue()

    return call


def test_list_ends_with_the_study_in_a_block(command):
    _, printed = command("list")
    _, _, block = printed.partition("Step size by depth")
    assert all(task.name in block for task in depth.TASKS)
    assert not any(task.name in block for task in paper.TASKS)
    assert "auto | unbounded | loose" in block


@pytest.mark.parametrize("variant", VARIANTS)
def test_run_variant_by_rate_leaves_record(variant: str, command, tmp_path: Path):
    assert command("run", f"perceptron-5{variant}", "--lr", "0.003")[0] in (0, None)
    (record,) = read_records(tmp_path)
    assert (record["task"], record["optimiser"], record["lr"]) == (f"perceptron-5{variant}", "nero", 0.003)
    assert record["options"] == ({"beta": 0.9} if variant == "-swift" else {})


@pytest.mark.parametrize("form", depth.FORMS)
def test_run_papers_task_by_depth_leaves_record(form: str, command, tmp_path: Path):
    assert command("run", "mnist-deep", "--optimiser", form, "--lr", "0.2")[0] in (0, None)
    (record,) = read_records(tmp_path)
    assert (record["task"], record["optimiser"], record["lr"]) == ("mnist-deep", form, 0.2)
    assert record["options"] == {"depth": "auto", **depth.FORMS[form]}


def test_sweep_by_depth_searches_trusts(command, tmp_path: Path):
    code, printed = command("sweep", "perceptron-5", "--optimiser", "auto", "--seeds", "1")
    assert code in (0, None)
    assert {record["lr"] for record in read_records(tmp_path)} == set(depth.TRUSTS)
    assert "; the default is 0.1" in printed


def test_sweep_of_papers_task_leaves_forms_out(command, tmp_path: Path):
    assert command("sweep", "mnist-deep", "--no-grid", "--seeds", "1")[0] in (0, None)
    assert {record["optimiser"] for record in read_records(tmp_path)} == {"nero", "sgd", "adam", "lamb"}
