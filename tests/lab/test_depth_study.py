"""The study of step size by depth: its pages against the committed records, its tasks, and how `nero` runs them."""

import math
import re
import statistics
from bisect import bisect
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from lab.helpers import run_command
from torch import nn

import nero
from nero_lab import session
from nero_lab.baselines import make
from nero_lab.data import ImageDataset, Images
from nero_lab.models.mlp import mlp, normed_mlp
from nero_lab.models.transformer import Translator, language_model
from nero_lab.models.vgg import vgg11
from nero_lab.protocol import SettingError
from nero_lab.report.depth import (
    CHANCE,
    LEARNING_LAYERS,
    NETWORKS,
    SEEDS,
    Network,
    Study,
    breaks_down,
    read_study,
)
from nero_lab.store import read_records
from nero_lab.tasks import TASKS, depth, paper, task_named
from nero_lab.tasks.depth import LAYERS, RATES, TRUST, TRUSTS

ROOT = Path(__file__).parents[2]
GUIDE, PAGE = ((ROOT / f"docs/{name}.md").read_text() for name in ("guide/auto", "studies/depth"))


@pytest.fixture(scope="module")
def study() -> Study:
    return read_study(ROOT)


def section(title: str) -> str:
    """Return a section of the study's page."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_records_are_one_line_per_run():
    records = read_records(ROOT / "results/depth")
    assert len(records) == 471
    assert len({(run["task"], run["optimiser"], run["lr"], run["seed"]) for run in records}) == 471


def test_records_have_options_of_their_contenders():
    for record in read_records(ROOT / "results/depth"):
        task, contender = record["task"], record["optimiser"]
        if contender in ("read", "words"):  # forms that the tasks no longer have
            options = {**task_named(task, "auto").contenders["auto"].options, "unbounded": contender}
        else:
            options = dict(task_named(task, contender).contenders[contender].options)
        assert record["options"] == options, (task, contender)


@pytest.mark.parametrize("block", range(2))
def test_guide_code_prints_what_it_shows(block: int, capsys: pytest.CaptureFixture[str]):
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE, re.DOTALL)
    assert len(blocks) == GUIDE.count("```python") == 2
    code, shown = blocks[block]
    exec(code, {})
    assert capsys.readouterr().out == shown


#: Narrower networks, and smaller vocabularies, of the same depth.
SMALL = {
    "mnist-deep": partial(mlp, 100, width=16),
    "cifar10-vgg11": partial(vgg11, width=1 / 8),
    "wikitext2": partial(language_model, 200),
    "translation": partial(Translator, 200),
}


def inputs_of(network: Network) -> list[torch.Tensor]:
    torch.manual_seed(0)
    photos, classes = torch.randn(8, 3, 32, 32), torch.arange(8)
    inputs = {
        "mnist-deep": [torch.randn(2, 4, 4)],
        "wikitext2": [torch.randint(200, (8, 35))],
        "translation": [torch.randint(1, 200, (4, 2, 12))],
        "pong": [torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8)],
        "cgan": [torch.randn(8, 80), classes] if network.part == "generator" else [photos, classes],
        "imagenet": [torch.randn(2, 3, 32, 32)],
    }
    return inputs.get(network.task, [photos])


def count_depth(network: Network, seed: int = 0) -> tuple[int, float]:
    """Return the number of tensors of neurons and the depth."""
    inputs = inputs_of(network)
    torch.manual_seed(seed)
    model = SMALL.get(network.task, TASKS[network.task].model)()
    part = nero.balance_(model.get_submodule(network.part))
    return sum(role.kind == "neuron" for role in nero.roles_of(part).values()), nero.depth_of(part, *inputs)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name.partition(",")[0])
def test_network_depth_is_as_counted(network: Network):
    tensors, counted = count_depth(network)
    assert tensors == network.tensors
    # where branches are added, the depth depends a little on data and machine
    assert network.depth == pytest.approx(counted, rel=0 if counted.is_integer() else 0.03)


@pytest.mark.parametrize("seed", [1, 2])
def test_discriminator_depth_varies_as_the_page_says(seed: int):
    (network,) = (each for each in NETWORKS if each.part == "discriminator")
    low, high = map(float, re.search(r"over twelve seeds, its depth is (\d\.\d) to\s+(\d\.\d)", PAGE).groups())
    assert low - 0.05 <= count_depth(network, seed)[1] <= high + 0.05


@pytest.mark.parametrize("layers", LAYERS)
def test_perceptron_by_auto_is_within_a_point_of_best_rate(layers: int, study: Study):
    task = f"perceptron-{layers}"
    for cell in [*(("nero", rate) for rate in RATES), *(("auto", trust) for trust in TRUSTS)]:
        assert len(study.ends(task, *cell, seeds=SEEDS)) == len(SEEDS), cell
    best = study.mean(task, "nero", study.best_rate(layers))
    has_begun = best > CHANCE
    assert has_begun == (layers in LEARNING_LAYERS)
    assert min(study.mean(task, "auto", trust) for trust in (TRUSTS if has_begun else (TRUST,))) > best - 1


def test_perceptron_with_bound_never_breaks_down(study: Study):
    learning = tuple(f"perceptron-{layers}" for layers in LEARNING_LAYERS)
    curves = {
        (task, contender, trust, seed): run["curve"]["train_accuracy"]
        for (task, contender, trust, seed), run in study.runs.items()
        if task.startswith(learning)
    }
    bounded = [curve for (task, contender, *_), curve in curves.items() if contender == "auto" and task in learning]
    swift = [curve for (task, contender, *_), curve in curves.items() if contender != "nero" and "-swift" in task]
    small = [curve for (*_, trust, seed), curve in curves.items() if trust <= 0.001 and seed in SEEDS]
    falling = [curve for (task, *_), curve in curves.items() if task.endswith("-falling")]
    assert min(map(len, (bounded, swift, small, falling))) > 10
    assert not any(map(breaks_down, (*bounded, *swift, *small, *falling)))


def test_perceptron_on_unseen_seeds_breaks_down_unbounded(study: Study):
    seeds = {seed for task, _, _, seed in study.runs if task.startswith("perceptron")} - set(SEEDS)
    assert seeds == {3, 4}
    curves = [c for layers in (5, 10) for c in study.curves(f"perceptron-{layers}", "unbounded", 0.06, seeds=seeds)]
    assert (len(curves), sum(map(breaks_down, curves))) == (4, 2)


def test_falling_rate_best_test_accuracy_is_at_default_rate(study: Study):
    for layers in LEARNING_LAYERS:
        task = f"perceptron-{layers}-falling"
        assert max(RATES, key=lambda rate: study.ends(task, "nero", rate, "test_accuracy", [0])) == 0.01


def test_translator_with_bound_leads_in_every_epoch(study: Study):
    tuned = study.curves("translation", "nero", 0.001, "valid_loss")
    assert len(tuned) == 3
    for trust in (TRUST, 0.06):
        (losses,) = study.curves("translation", "auto", trust, "valid_loss")
        assert all(loss < min(others) for loss, *others in zip(losses, *tuned, strict=True))


def test_language_model_losses_are_as_the_page_says(study: Study):
    def perplexity(contender: str, rate: float) -> float:
        curves = study.curves("wikitext2", contender, rate, "valid_loss")
        return statistics.fmean(math.exp(curve[-1]) for curve in curves)

    tuned, text = perplexity("nero", 0.01), section("The bound and words")
    for cell in (("auto", TRUST), ("auto", 0.06), ("unbounded", TRUST), ("loose", TRUST)):
        assert f"{100 * abs(perplexity(*cell) / tuned - 1):.1f} %" in text, cell


def test_resnet50_had_turned_as_far_as_the_page_says(study: Study):
    """Compare the sums of the rates: the epoch at which the run at 0.01 had turned as far, and its accuracy then."""
    task = TASKS["imagenet"]
    steps = math.ceil(25_000 / task.batch)
    turned = list(accumulate(task.schedule(step, steps) for step in range(task.epochs * steps)))
    angle = TRUST / next(network.depth for network in NETWORKS if network.task == "imagenet")
    epochs = bisect(turned, angle / 0.01 * turned[-1]) // steps
    (accuracies,) = study.curves("imagenet", "nero", 0.01, "train_accuracy")
    text = section("The paper's tasks")
    assert f"{epochs} epochs" in text
    assert f"{100 * accuracies[epochs - 1]:.0f} %" in text


def test_measured_trust_is_as_short_as_the_page_says(study: Study):
    rows = {row["network"]: row["trusted"] for row in study.trust["rows"]}
    text = section("Measured trust")
    shrinks = rows["perceptron of 5 layers"] / rows["perceptron of 20 layers"]
    assert f"by {shrinks:.0f} from 5 layers to 20" in text
    assert f"over {0.02 / rows['ResNet-50'] // 10 * 10:.0f} times" in text


@pytest.mark.parametrize(
    ("page", "cells"),
    [
        ("cgan", [("auto", TRUST), ("unbounded", 0.06), ("unbounded", 0.08)]),
        ("cifar10-ablation", [("auto", TRUST)]),
        ("pong", [("auto", TRUST), ("unbounded", 0.06), ("unbounded", 0.08)]),
        ("translation", [("auto", TRUST), ("auto", 0.06)]),
        ("wikitext2", [("auto", TRUST), ("loose", TRUST)]),
    ],
)
def test_papers_page_quotes_result_by_depth(page: str, cells: list[tuple[str, float]], study: Study):
    text = (ROOT / f"docs/paper/{page}.md").read_text()
    measures = {"test_accuracy": lambda value: 100 - 100 * value, "valid_loss": math.exp}
    convert = measures.get(TASKS[page].metric, float)
    for cell in cells:
        ends = [convert(curve[-1]) for curve in study.curves(page, *cell, TASKS[page].metric)]
        assert f"{statistics.fmean(ends):.2f}" in text, cell


VARIANTS = ("-falling", "-normed", "-swift")


def test_tasks_are_the_papers_then_the_perceptrons():
    names = list(TASKS)
    assert names[: len(paper.TASKS)] == [task.name for task in paper.TASKS]
    study = [task.name for task in depth.TASKS]
    assert study[:5] == [f"perceptron-{layers}" for layers in (5, 10, 20, 50, 100)]
    assert {name.split("-", 2)[2] for name in study[5:]} == {"falling", "normed", "swift"}
    assert set(study) < set(names)


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


def test_form_of_a_task_with_its_own_auto_is_that_contender():
    task = TASKS["gpt"]
    assert depth.form_of(task, "nero") == "nero-auto"
    assert depth.form_of(task, "nero-momentum") == "nero-momentum-auto"
    with pytest.raises(SettingError, match="muon has no learning rate auto"):
        depth.form_of(task, "muon")


def test_normed_mlp_has_norms_behind_hidden_layers():
    layers = [type(module) for module in normed_mlp(3)]
    hidden = [nn.Linear, nn.BatchNorm1d, type(mlp(2)[2])]
    assert layers == [nn.Flatten, *hidden, *hidden, nn.Linear]
    assert sum(1 for _ in normed_mlp(3).parameters()) == 6


def test_falling_schedule_starts_at_one_and_ends_at_zero():
    assert [TASKS["perceptron-5-falling"].schedule(step, 10) for step in (0, 25, 50)] == [1.0, 0.5, 0.0]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return `nero ...` in this process, on a few made images: its exit code and what it printed."""
    noise = torch.Generator().manual_seed(0)

    def images(count: int) -> Images:
        pixels = torch.randint(256, (count, 1, 8, 8), generator=noise, dtype=torch.uint8)
        return Images(pixels, torch.arange(count) % 10)

    monkeypatch.setattr(
        session, "load", lambda *_, **__: ImageDataset("mnist", images(20), images(10), (0.5,), (0.25,))
    )
    for name in ("mnist-deep", "perceptron-5", *(f"perceptron-5{variant}" for variant in VARIANTS)):
        model = normed_mlp if name.endswith("normed") else mlp
        monkeypatch.setitem(TASKS, name, replace(TASKS[name], model=partial(model, 2, width=64)))

    def call(*arguments: str) -> tuple[object, str]:
        places = [] if arguments[0] == "list" else ["--out", tmp_path, "--device", "cpu", "--epochs", 1]
        return run_command(monkeypatch, *arguments, *places)

    return call


def test_list_has_the_study_in_a_block(command):
    _, printed = command("list")
    block = printed.partition("Step size by depth")[2].partition("DATA ")[0]
    assert all(task.name in block for task in depth.TASKS)
    assert not any(task.name in block for task in paper.TASKS)
    assert "auto | unbounded | loose" in block


@pytest.mark.parametrize("variant", VARIANTS)
def test_run_variant_by_rate_leaves_record(variant: str, command, tmp_path: Path):
    assert command("run", f"perceptron-5{variant}", "--lr", "0.003")[0] == 0
    (record,) = read_records(tmp_path)
    assert (record["task"], record["optimiser"], record["lr"]) == (f"perceptron-5{variant}", "nero", 0.003)
    assert record["options"] == ({"beta": 0.9} if variant == "-swift" else {})


@pytest.mark.parametrize("form", depth.FORMS)
def test_run_papers_task_by_depth_leaves_record(form: str, command, tmp_path: Path):
    assert command("run", "mnist-deep", "--optimiser", form, "--lr", "0.2")[0] == 0
    (record,) = read_records(tmp_path)
    assert (record["task"], record["optimiser"], record["lr"]) == ("mnist-deep", form, 0.2)
    assert record["options"] == {"depth": "auto", **depth.FORMS[form]}


def test_sweep_by_depth_searches_trusts(command, tmp_path: Path):
    code, printed = command("sweep", "perceptron-5", "--optimiser", "auto", "--seeds", "1")
    assert code == 0
    assert {record["lr"] for record in read_records(tmp_path)} == set(depth.TRUSTS)
    assert "; the default is 0.1" in printed


def test_sweep_of_papers_task_leaves_forms_out(command, tmp_path: Path):
    assert command("sweep", "mnist-deep", "--no-grid", "--seeds", "1")[0] == 0
    assert {record["optimiser"] for record in read_records(tmp_path)} == {"nero", "sgd", "adam", "lamb"}
