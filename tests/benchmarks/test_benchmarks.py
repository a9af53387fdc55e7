"""The benchmark runs, records what it says it records, and refuses to report what cannot be compared."""

import dataclasses
import json
import math
import re
import signal
import statistics
from bisect import bisect
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import auto
import bench
import end_to_end
import figure
import pytest
import shapes
import step
import suite
import timing
import torch
import trust
import watching

import nero
from nero.backends import BACKENDS, eager
from nero_lab.data import ImageDataset, Images
from nero_lab.loops.ppo import PPO
from nero_lab.store import read_records


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("record")
    assert bench.main(["--quick", "--device", "cpu", "--out", str(out)]) == 0
    return out / "cpu.json"


def test_a_rehearsal_writes_every_section(record: Path):
    found = json.loads(record.read_text())
    assert found["machine"]
    assert found["copy_bytes_per_second"] > 0
    assert found["quick"]
    assert {"Adam (fused)", "SGD (fused)", "Nero (eager)", "Nero (foreach)"} <= {
        row["optimiser"] for row in found["step"]
    }
    for row in found["step"] + found["growth"]:
        assert row["milliseconds"] > 0
        assert row["rounds"] >= 3
        assert row["device_milliseconds"] is None  # there is no device but the host
        if row["bytes_per_parameter"]:
            moved = row["bytes_per_parameter"] * row["parameters"] / (row["milliseconds"] / 1e3)
            assert row["of_copy_bandwidth"] == pytest.approx(moved / found["copy_bytes_per_second"], rel=0.02, abs=1e-4)
        if row["optimiser"] == "Adam (fused)":
            assert row["of_fused_adam"] == row["state_of_adam"] == 1
    assert {row["by"] for row in found["growth"]} == {"parameters", "tensors"}
    assert {row["optimiser"] for row in found["end-to-end"]} == {"Adam (fused)", "SGD (fused)", "Nero"}
    assert all(row["reduced"] and row["milliseconds"] > 0 for row in found["end-to-end"])


def test_sections_are_merged_with_those_of_the_same_machine(record: Path, tmp_path: Path):
    before = json.loads(record.read_text())
    begun = bench.begin(record, torch.device("cpu"), True)
    assert begun["step"] == before["step"]
    assert begun["left_out"] == before["left_out"]
    for other in ({"torch": "1.0"}, {"machine": "another"}, {"quick": False}):
        bench.write(tmp_path / "cpu.json", {**before, **other})
        assert "step" not in bench.begin(tmp_path / "cpu.json", torch.device("cpu"), True)


def test_the_figure_is_drawn_from_the_record(record: Path, tmp_path: Path):
    assert figure.main(["--results", str(record.parent), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "step-cpu.png").stat().st_size > 20_000


def test_backends_that_disagree_are_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def wrong(jobs, settings):
        eager.step(jobs, settings)
        jobs[-1].parameter.add_(1e-4)

    monkeypatch.setitem(BACKENDS, "foreach", wrong)
    with pytest.raises(SystemExit, match=r"the backends disagree: foreach is .* no report") as stopped:
        bench.main(["--quick", "--device", "cpu", "--out", str(tmp_path)])
    assert stopped.value.code  # a message, so not zero
    assert not list(tmp_path.iterdir())


def test_a_contender_that_fails_is_left_out():
    def refuse(_: object) -> torch.optim.Optimizer:
        raise RuntimeError("not today")

    bad = step.Contender("Bad", refuse)
    tiny = timing.Bench(torch.device("cpu"), timing.Plan(2, 0.0, 2, 0.0), 1e9, quick=True, compiling=0.0)
    rows = step.measure(shapes.matrices(64, 1), [*step.everyone(tiny.device, False)[0][:2], bad], tiny)
    assert [row["optimiser"] for row in rows] == ["Adam (fused)", "SGD (fused)"]
    assert tiny.notes == ["Bad, 1 matrices: RuntimeError: not today"]


class StubClock(timing.Clock):
    """A clock whose steps return how long they take."""

    def __init__(self) -> None:
        self.gpu = True

    def burst(self, step, count=1) -> float:  # noqa: ARG002
        return float(step())

    def on_device(self, step, count, lead) -> float | None:  # noqa: ARG002
        return None if count > 1 and step() is None else 1.5


def test_slow_contenders_have_fewer_turns_and_references_have_all():
    plan = timing.Plan(rounds=10, seconds=4.0, least=2)
    steps = {"reference": lambda: 3.0, "slow": lambda: 5.0, "fast": lambda: 0.5}
    times = timing.take_turns(steps, dict.fromkeys(steps, 1), StubClock(), plan, always=["reference"])
    assert {name: len(rounds) for name, rounds in times.items()} == {"reference": 8, "slow": 2, "fast": 8}
    assert timing.ratio(times["slow"], times["reference"]) == 5 / 3
    assert timing.difference(times["slow"], times["reference"]) == 2


def test_neighbours_are_compared():
    assert timing.ratio({0: 2.0, 1: 9.0, 4: 8.0}, {0: 1.0, 1: 3.0, 2: 5.0, 4: 1.0}) == 3
    assert timing.difference({0: 2.0, 2: 9.0}, {0: 1.0, 2: 5.0}) == 2.5


def test_a_burst_is_as_long_as_planned():
    assert timing.burst_length(lambda: 0.01, StubClock(), timing.Plan(burst=0.005)) == 1
    assert timing.burst_length(lambda: 0.001, StubClock(), timing.Plan(burst=0.005)) == 5


def test_device_time_is_that_of_steps_queued_in_time():
    assert timing.device_time(lambda: 1, 4, 0.1, StubClock()) == 1.5
    assert timing.device_time(lambda: None, 4, 0.1, StubClock()) == 1.5  # one by one
    assert timing.device_time(lambda: 1, 4, 0.1, timing.Clock(torch.device("cpu"))) is None


def test_events_are_turned_into_seconds(monkeypatch: pytest.MonkeyPatch):
    class Event:
        passed = False

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def query(self) -> bool:
            return self.passed

        def elapsed_time(self, _: object) -> float:
            return 12.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    clock = timing.Clock(torch.device("cuda"))
    assert clock.on_device(lambda: None, 4, 0.1) == pytest.approx(0.003)
    Event.passed = True  # the device was through with its wait before all was queued
    assert clock.on_device(lambda: None, 4, 0.1) is None


def test_synthetic_shapes_add_up():
    for total, tensors in ((100_000_000, 10_000), (16_000_000, 10), (2**31, 2048)):
        made = shapes.matrices(total, tensors)
        assert made.total == pytest.approx(total, rel=0.01)
        assert sum(map(len, made.by_axes.values())) == tensors
    assert shapes.gpt2_xl().total == pytest.approx(1.5576e9, rel=1e-3)
    assert shapes.gpt2_xl().one_of_each.total < 2e8


@pytest.fixture
def small_suite(monkeypatch: pytest.MonkeyPatch):
    """The suite's tasks, on small networks and a little made data."""
    from dataclasses import replace
    from functools import partial

    from lab.gan_cases import tiny_metrics
    from test_paper import made

    from nero_lab.data import load
    from nero_lab.loops.adversarial import Adversarial
    from nero_lab.models.actor_critic import ActorCritic
    from nero_lab.models.biggan import GANPair
    from nero_lab.models.mlp import mlp
    from nero_lab.models.transformer import Translator, language_model
    from nero_lab.models.vgg import vgg11

    pair, judged = partial(GANPair, base=1), partial(Adversarial, metrics=tiny_metrics)
    monkeypatch.setitem(suite.TASKS, "cgan", replace(suite.TASKS["cgan"], model=pair, loop=judged, batch=8))
    small = replace(suite.TASKS["pong"], model=partial(ActorCritic, width=1 / 32))
    monkeypatch.setitem(suite.TASKS, "pong", small)
    for name, task in list(suite.TASKS.items()):
        if task.loop is not None:
            continue
        models = {
            "mnist": partial(mlp, 2),
            "cifar10": partial(vgg11, width=1 / 32),
            "wikitext2": partial(language_model, 7, width=8, hidden=8),
            "multi30k": partial(Translator, 14, width=16, hidden=16, layers=1),
        }
        model = models.get(task.dataset, task.model)
        contenders = {key: replace(each, model=None) for key, each in task.contenders.items()}
        monkeypatch.setitem(suite.TASKS, name, replace(task, model=model, contenders=contenders, batch=8))
    monkeypatch.setattr(suite, "load", lambda name, _: load(name) if name == "pong" else made(name, examples=160))
    monkeypatch.setattr(suite, "Perceptron", lambda _: end_to_end.Perceptron(2))
    monkeypatch.setattr(suite, "host_batches", partial(suite.host_batches, batch=8))


@pytest.mark.usefixtures("small_suite")
def test_the_suites_times_are_recorded(tmp_path: Path):
    asked = ["--share", "0.1", "--seconds", "0.1", "--epochs", "1"]
    assert suite.main(["--device", "cpu", "--out", str(tmp_path), *asked]) == 0
    found = json.loads((tmp_path / "suite-cpu.json").read_text())
    rows = {row["task"]: row for row in found["rows"]}
    assert list(rows) == ["mnist-deep", suite.SCRIPTED, *suite.TIMED[1:], *suite.STEPPED]
    for name, steps in (("cgan", 20), ("pong", 80 * 144)):
        row = rows.pop(name)
        assert row["seconds_an_epoch"] == pytest.approx(steps * row["milliseconds_a_step"] / 1e3, rel=0.02)
        assert row["seconds_in_full"] >= 0.9 * suite.TASKS[name].epochs * row["seconds_an_epoch"]
    script = rows.pop(suite.SCRIPTED)
    ours = rows["mnist-deep"]["milliseconds_a_step"]
    assert script["times_ours"] == pytest.approx(script["milliseconds_a_step"] / ours, rel=0.02, abs=0.01)
    for name, row in rows.items():
        # a tenth of 160 examples is two batches of eight; the time is that of twenty
        assert row["seconds_an_epoch"] == pytest.approx(20 * row["milliseconds_a_step"] / 1e3, rel=0.02, abs=2e-3)
        assert row["seconds_in_full"] >= 0.9 * suite.TASKS[name].epochs * row["seconds_an_epoch"]


@pytest.mark.usefixtures("small_suite")
def test_a_task_that_is_timed_again_leaves_the_others_of_the_same_machine_alone(tmp_path: Path):
    asked = ["--device", "cpu", "--out", str(tmp_path), "--share", "0.1", "--epochs", "1", "--tasks", "translation"]
    assert suite.main(asked) == 0
    path = tmp_path / "suite-cpu.json"
    found = json.loads(path.read_text())
    other = {**found["rows"][0], "task": "wikitext2"}
    path.write_text(json.dumps({**found, "rows": [{**found["rows"][0], "seconds_in_full": -1}, other]}))
    assert suite.main(asked) == 0
    rows = {row["task"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["wikitext2", "translation"]
    assert rows["wikitext2"] == other
    assert rows["translation"]["seconds_in_full"] > 0
    for broken in (json.dumps({**found, "torch": "1.0"}), "{", "[]", json.dumps({**found, "rows": [{}]})):
        path.write_text(broken)
        with pytest.raises(SystemExit):
            suite.main(asked)
        assert path.read_text() == broken


@pytest.mark.usefixtures("small_suite")
def test_cells_side_by_side_are_timed_together():
    task = suite.TASKS["mnist-deep"]
    data = suite.load("mnist", None)
    row = suite.time_cells(task, [("nero", 0.001), ("sgd", 0.1)], data, "float32", 1, 1.0)
    assert row["side_by_side"] == 2
    assert row["optimiser"] == "all"


def test_all_that_steps_can_bring_has_come_before_they_are_timed():
    """A graph that is captured in between takes seconds: of the GAN's smaller last batch, and of the game's learner."""
    game = PPO()
    assert max(50_000 / suite.TASKS["cgan"].batch, 2 * (game.steps + game.round_updates)) < suite.FIRST


@pytest.mark.parametrize("epochs", ["0", "5"])
def test_the_suite_refuses_epochs_that_a_task_has_not(epochs: str):
    with pytest.raises(SystemExit):
        suite.main(["--epochs", epochs])


def test_plain_nero_is_algorithm_1():
    """What the authors' way is timed with makes Nero's steps."""
    torch.manual_seed(0)
    ours, plain = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    plain.load_state_dict(ours.state_dict())
    optimisers = (nero.Nero(ours, lr=0.01), suite.Plain(plain, lr=0.01))
    inputs = torch.randn(16, 8)
    for _ in range(5):
        for model, optimiser in zip((ours, plain), optimisers, strict=True):
            model.zero_grad()
            model(inputs).square().sum().backward()
            optimiser.step()
    torch.testing.assert_close(plain.weight, ours.weight)
    torch.testing.assert_close(plain.bias, ours.bias)


def test_the_times_that_are_listed_are_recorded():
    """`nero list` states what benchmarks/results has, to a tenth; and nothing where it has nothing."""
    for place, device in enumerate(("cuda", "cpu")):
        path = Path(bench.__file__).parent / "results" / f"suite-{device}.json"
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        found = {
            row["task"]: row["seconds_in_full"]
            for row in rows
            if row.get("side_by_side") == 1 and row["precision"] == "float32"
        }
        for name, task in suite.TASKS.items():
            timed_with = "cifar10-vgg11" if name in ("cifar10-ablation", "cifar10-granularity") else name
            wanted = found.get(timed_with)
            assert task.seconds[place] == (wanted if wanted is None else pytest.approx(wanted, rel=0.1)), (name, device)


ROOT = Path(bench.__file__).parents[1]


def rows_of(table: str) -> list[list[str]]:
    """The cells of a table on the page on automatic rates, without its head."""
    page = (ROOT / "docs/auto.md").read_text()
    lines = page.partition(f"<!-- table: {table} -->")[2].partition("<!-- end -->")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


#: Whose networks the page lists, of a task or of a part of its model.
NETWORKS = {
    "perceptron of 100 layers": "mnist-deep",
    "VGG-11": "cifar10-vgg11",
    "ResNet-18": "cifar10-resnet18",
    "language model, 2 blocks without norms": "wikitext2",
    "translator, 6 + 6 blocks, norms behind": "translation",
    "Pong's actor and critic": "pong",
    "GAN, generator": "cgan.generator",
    "GAN, discriminator": "cgan.discriminator",
    "ResNet-50": "imagenet",
}


def test_the_page_on_auto_has_the_depths_of_the_networks():
    """As they begin on seed 0, and on noise: where branches are added, the depth hangs a little on the data."""
    torch.manual_seed(0)
    photos, classes = torch.randn(8, 3, 32, 32), torch.arange(8)
    frames = torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8)
    inputs_of = {
        "mnist-deep": [torch.randn(2, 1, 28, 28)],
        "wikitext2": [torch.randint(33278, (8, 35))],
        "translation": [torch.randint(1, 9529, (4, 2, 12))],
        "pong": [frames],
        "cgan.generator": [torch.randn(8, 80), classes],
        "cgan.discriminator": [photos, classes],
        "imagenet": [torch.randn(4, 3, 64, 64)],
    }
    lines = {row[0]: row[1:] for row in rows_of("depths")}
    assert list(lines) == list(NETWORKS)
    for name, where in NETWORKS.items():
        layers, depth, automatic, tuned = lines[name]
        task, _, part = where.partition(".")
        torch.manual_seed(0)
        model = nero.balance_(suite.TASKS[task].model().get_submodule(part))
        assert int(layers) == sum(role.kind == "neuron" for role in nero.roles_of(model).values()), name
        counted = nero.depth_of(model, *inputs_of.get(where, [photos]))
        adds_branches = not counted.is_integer()
        assert float(depth) == pytest.approx(counted, rel=0.03 if adds_branches else 0), name
        assert automatic == f"{auto.TRUST / float(depth):.2g}", name
        assert float(tuned) == suite.TASKS[task].contenders["nero"].best, name


def test_the_page_on_auto_says_how_far_the_discriminators_count_hangs_on_the_seed():
    torch.manual_seed(0)
    photos, classes = torch.randn(8, 3, 32, 32), torch.arange(8)
    counts = []
    for seed in range(12):
        torch.manual_seed(seed)
        discriminator = suite.TASKS["cgan"].model().get_submodule("discriminator")
        counts.append(nero.depth_of(nero.balance_(discriminator), photos, classes))
    assert (
        f"on the first twelve seeds it counts from {min(counts):.1f} to {max(counts):.1f}"
        in (ROOT / "docs/auto.md").read_text()
    )


def test_the_page_on_auto_has_the_perceptrons_of_the_records():
    """The means of three seeds; none loses a point to the best. Nor, if it has begun to learn, at any other trust."""
    lines = rows_of("perceptrons")
    assert [int(line[0]) for line in lines] == list(auto.LAYERS)
    records = read_records(ROOT / "benchmarks/results/auto")
    for layers, *found in lines:
        train, test = (auto.accuracies(records, int(layers), part) for part in ("train", "test"))
        best = max(train["nero"], key=lambda rate: train["nero"][rate])
        own = [train["auto"][auto.TRUST], test["auto"][auto.TRUST]]
        told = [best, train["nero"][best], test["nero"][best], auto.TRUST / int(layers), *own]
        assert [float(cell) for cell in found] == pytest.approx(told, abs=0.006)
        assert own[0] > train["nero"][best] - 1
        begun = train["nero"][best] > auto.CHANCE
        assert set(auto.TRUSTS) <= train["auto"].keys()
        assert not begun or min(train["auto"].values()) > train["nero"][best] - 1
        cells = [("nero", rate) for rate in auto.RATES] + [("auto", share) for share in auto.TRUSTS]
        ran = {
            (each["optimiser"], each["lr"], each["seed"]) for each in records if each["task"] == f"perceptron-{layers}"
        }
        assert ran >= {(*cell, seed) for cell in cells for seed in auto.SEEDS}


def train_curves() -> dict[tuple[str, str, float, int], list[float]]:
    """Train accuracies of all perceptrons on record, by task, contender, rate or trust, and seed."""
    return {
        (each["task"], each["optimiser"], each["lr"], each["seed"]): each["curve"]["train_accuracy"]
        for each in read_records(ROOT / "benchmarks/results/auto")
        if each["task"].startswith("perceptron")
    }


def breaks(curve: list[float]) -> bool:
    """Whether more than a point is lost from one epoch to the next."""
    return any(after < before - 0.01 for before, after in pairwise(curve))


def test_the_page_on_auto_says_how_many_runs_break_down():
    """Lose more than a point of train accuracy from one epoch to the next. Of those that are bounded, none does."""
    curves = train_curves()

    def broken(who: str, trust: float) -> int:
        runs = [curves[f"perceptron-{layers}", who, trust, seed] for layers in (5, 10, 20, 50) for seed in auto.SEEDS]
        assert len(runs) == 12
        return sum(map(breaks, runs))

    counts = [broken("unbounded", share) for share in (0.08, 0.11, 0.16)]
    page = (ROOT / "docs/auto.md").read_text()
    assert "that befell {} of the 12 runs at a trust of 0.08, {} at 0.11 and {} at 0.16".format(*counts) in page
    assert not any(broken("unbounded", share) for share in (0.01, 0.02, 0.04, 0.06))
    assert not any(broken("auto", share) for share in auto.TRUSTS)
    matched = [sum(broken(who, share) for share in (0.08, 0.16)) for who in ("unbounded", "auto")]
    assert matched[1] == 0
    assert f"[{matched[0]} broke down without it]" in (ROOT / "README.md").read_text()
    depths = [f"perceptron-{layers}" for layers in (5, 10, 20, 50)]
    bounded = [
        curve for (task, who, _, seed), curve in curves.items() if (who, task in depths) == ("auto", True) and seed < 3
    ]
    assert not any(map(breaks, bounded))
    assert f"**With the bound none breaks down**: {len(bounded)} runs" in page
    assert f"of {len(bounded)} runs at trusts from 0.04 to 0.16 none breaks down" in page
    swift = [curve for (task, who, *_), curve in curves.items() if "-swift" in task and who == "unbounded"]
    assert not any(map(breaks, swift))
    assert f"With β = 0.9 none does, either, in {len(swift)} " in page
    loose = sum(broken("loose", share) for share in (0.1, 0.16))
    assert f"of 24 runs at trusts of 0.1 and 0.16, {loose} break down" in page
    assert f"of the 24 at trusts of 0.1 and 0.16 it lets {loose} break down, where three lets none" in page
    ends = {
        who: [100 * curves["perceptron-10", *who, seed][-1] for seed in auto.SEEDS]
        for who in (("loose", 0.1), ("nero", 0.003))
    }
    lost = statistics.fmean(ends["nero", 0.003]) - statistics.fmean(ends["loose", 0.1])
    assert f"10 layers at 0.1 then lose {lost:.1f} points to the best rate" in page


def test_the_page_on_auto_has_the_seeds_that_the_constant_was_not_chosen_on():
    """Bounded, none of them breaks down."""
    curves = train_curves()
    best = {row[0]: float(row[1]) for row in rows_of("perceptrons")}
    rows = rows_of("unseen")
    ran = {(task, seed) for task, _, _, seed in curves if seed not in auto.SEEDS}
    assert {(f"perceptron-{layers}", int(seed)) for layers, seed, *_ in rows} == ran
    broken = 0
    for layers, seed, *found in rows:
        cells = (("nero", best[layers]), ("unbounded", 0.06), ("auto", 0.06), ("auto", auto.TRUST))
        runs = [curves[f"perceptron-{layers}", *cell, int(seed)] for cell in cells]
        assert found == [f"{100 * curve[-1]:.2f}" for curve in runs]
        assert not any(breaks(curve) for curve in runs[2:])
        broken += breaks(runs[1])
    told = f"Without the bound {broken} of these {len(rows)} break down even at a trust of 0.06"
    assert told in (ROOT / "docs/auto.md").read_text()


def test_the_page_on_auto_has_what_a_swift_average_and_a_bound_give():
    """At a trust at which runs break down with neither; none does with one."""
    curves = train_curves()
    best = {row[0]: float(row[1]) for row in rows_of("perceptrons")}
    for layers, *found in rows_of("swift"):
        cells = [("", "nero", best[layers]), ("", "unbounded", 0.08), ("-swift", "unbounded", 0.08), ("", "auto", 0.08)]
        runs = [[curves[f"perceptron-{layers}{how}", *cell, seed] for seed in auto.SEEDS] for how, *cell in cells]
        assert found == [", ".join(f"{100 * curve[-1]:.2f}" for curve in each) for each in runs]
        assert not any(breaks(curve) for each in runs[2:] for curve in each)


def test_the_page_on_auto_has_what_a_swift_average_and_a_bound_give_by_trust():
    """The lowest and the highest of the seeds."""
    curves = train_curves()
    remedies = {"-": ("", "unbounded"), "β = 0.9": ("-swift", "unbounded"), "`longest_step=3`": ("", "auto")}
    remedies["`longest_step=10`"] = ("", "loose")
    for layers, remedy, *found in rows_of("spans"):
        how, who = remedies[remedy]
        for share, told in zip((0.04, 0.06, 0.08, 0.1, 0.11, 0.16), found, strict=True):
            runs = [curves.get((f"perceptron-{layers}{how}", who, share, seed)) for seed in auto.SEEDS]
            ends = [100 * curve[-1] for curve in runs if curve]
            assert len(ends) in (0, len(auto.SEEDS))
            assert told == (f"{min(ends):.2f} to {max(ends):.2f}" if ends else "not run")


def test_the_page_on_auto_has_the_tasks_of_the_records():
    """Every task that was trained so, beside the suite's own runs; of the GAN's networks both angles are told."""
    measures = {"train accuracy, %": "train_accuracy", "test accuracy, %": "test_accuracy"}
    ran: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for each in sorted(read_records(ROOT / "benchmarks/results/auto"), key=lambda each: each["seed"]):
        if each["task"] in suite.TASKS:
            ran.setdefault((each["task"], each["optimiser"], each["lr"]), []).append(each)
    lines = {row[0]: row[1:] for row in rows_of("tasks")}
    assert set(lines) == {task for task, *_ in ran}
    depths: dict[str, list[float]] = {}
    for row in rows_of("depths"):
        depths.setdefault(NETWORKS[row[0]].partition(".")[0], []).append(float(row[2]))
    depths["cifar10-ablation"] = depths["cifar10-vgg11"]
    suites = [each for each in read_records(ROOT / "results") if each["optimiser"] in ("nero", "nero-both")]
    for task, (measure, rate, tuned, angles, *found) in lines.items():

        def end(record: dict[str, Any], measure: str = measure) -> str:
            if measure == "validation perplexity":
                return f"{math.exp(record['curve']['valid_loss'][-1]):.2f}"
            if measure == "mean return":
                return f"{record['curve']['reward'][-1]:.2f}"
            if measure == "distance to test images":
                return f"{record['curve']['test_distance'][-1]:.2f}"
            return f"{100 * record['curve'][measures[measure]][-1]:.2f}"

        whole = suite.TASKS[task].epochs
        same = [each for each in suites if (each["task"], each["lr"], each["epochs"]) == (task, float(rate), whole)]
        assert ", ".join(end(each) for each in sorted(same, key=lambda each: each["seed"])) == tuned
        assert angles == ", ".join(f"{auto.TRUST / depth:.2g}" for depth in depths[task])
        cells = (("auto", auto.TRUST), ("unbounded", 0.06), ("unbounded", 0.08))
        assert found == [", ".join(end(each) for each in ran.get((task, *cell), [])) or "not run" for cell in cells]
    page = (ROOT / "docs/auto.md").read_text()
    again, first = (
        [cell.partition(",")[0] for cell in lines[f"cifar10-{name}"][-3:]] for name in ("ablation", "vgg11")
    )
    apart = [f"{abs(float(one) - float(other)):.1f}" for one, other in zip(again, first, strict=True)]
    assert f"ends at {again[0]} where that has {first[0]}" in page
    assert f"Without a bound the two are {apart[1]} and {apart[2]} points apart" in page
    ablation = (ROOT / "docs/paper/cifar10-ablation.md").read_text()
    errors = [f"{100 - float(accuracy):.2f}" for accuracy in (again[0], first[0])]
    tuned = statistics.fmean(100 - float(each) for each in lines["cifar10-vgg11"][2].split(", "))
    assert f"ends at {errors[0]} %, {float(errors[0]) - tuned:.1f} points above the mean" in ablation
    assert f"[ended at {errors[1]}]" in ablation


def test_the_records_of_automatic_rates_are_of_the_forms_they_are_named_after():
    """What each of them was run with is what the study would run by that name today."""
    found: set[str] = set()
    for each in read_records(ROOT / "benchmarks/results/auto"):
        name, _, rest = each["task"].partition("-")
        layers, _, how = rest.partition("-")
        if name == "perceptron":
            task = auto.STUDIES[how or "depths"](int(layers))
        else:
            task = auto.automatic(auto.TASKS[each["task"]])
        assert each["options"] == task.contenders[each["optimiser"]].options, (each["task"], each["optimiser"])
        found.add(each["optimiser"])
    assert found == {"nero", *auto.FORMS}


def test_the_page_on_auto_has_what_the_bound_does_to_words():
    """The perplexities of the language model by what is bounded, and how the translator does with its words free."""
    ours, suites = (
        sorted(read_records(ROOT / place), key=lambda each: each["seed"])
        for place in ("benchmarks/results/auto", "results")
    )
    forms = {
        'all, at three times the angle (`"auto"`)': ("auto", auto.TRUST),
        "the same at a trust of 0.06": ("auto", 0.06),
        "all, at ten times the angle": ("loose", auto.TRUST),
        "all but the words that are read": ("read", auto.TRUST),
        "all but words, read or said": ("words", auto.TRUST),
        "none": ("unbounded", auto.TRUST),
        "none, at the tuned angle": ("nero", 0.01),
    }
    rows = rows_of("words")
    assert [row[0] for row in rows] == list(forms)
    ends: dict[str, float] = {}
    for name, *found in rows:
        runs = [
            each
            for each in (suites if forms[name][0] == "nero" else ours)
            if (each["task"], each["epochs"], each["optimiser"], each["lr"]) == ("wikitext2", 20, *forms[name])
        ]
        for part, told in zip(("train", "valid", "test"), found, strict=True):
            assert told == ", ".join(f"{math.exp(each['curve'][f'{part}_loss'][-1]):.2f}" for each in runs), name
        ends[name] = statistics.fmean(math.exp(each["curve"]["valid_loss"][-1]) for each in runs)
    page, readme = ((ROOT / place).read_text() for place in ("docs/auto.md", "README.md"))
    tuned, free, loose = (ends[name] for name in ("none, at the tuned angle", "none", "all, at ten times the angle"))
    by_auto = ends['all, at three times the angle (`"auto"`)']
    assert f"loses {100 * (by_auto / tuned - 1):.1f} %**: {by_auto:.2f} to {tuned:.2f}" in page
    assert f"it still loses {100 * (ends['the same at a trust of 0.06'] / tuned - 1):.1f} %;" in page
    assert f"it ends {100 * (1 - free / tuned):.1f} % ahead of the mean at the tuned rate" in page
    assert f"{loose:.2f}, {100 * (1 - loose / tuned):.1f} % ahead of the tuned rate" in page
    assert f"a bound of ten wins {100 * (1 - loose / tuned):.1f} %" in readme
    assert f"costs the language model {100 * (by_auto / tuned - 1):.1f} % of perplexity" in readme
    runs = {each["optimiser"]: each for each in ours if (each["task"], each["lr"]) == ("translation", auto.TRUST)}
    told = [
        f"{math.exp(runs[who]['curve']['valid_loss'][-1]):.2f} and {runs[who]['test_bleu']} BLEU"
        for who in ("read", "auto")
    ]
    assert told[0] in page
    assert f"where it has {told[1].removesuffix(' BLEU')} with all bounded" in page


def test_the_page_on_auto_says_how_far_resnet_50_had_turned():
    """When the run at the default rate had turned as far in all as the other at its end, and where it stood."""
    task = suite.TASKS["imagenet"]
    steps = math.ceil(25_000 / task.batch)
    turned = list(accumulate(task.schedule(step, steps) for step in range(task.epochs * steps)))
    short = next(float(row[4]) for row in rows_of("tasks") if row[0] == "imagenet")
    epochs = bisect(turned, short / 0.01 * turned[-1]) // steps
    [run] = [r for r in read_records(ROOT / "results") if (r["task"], r["optimiser"]) == ("imagenet", "nero")]
    stood = 100 * run["curve"]["train_accuracy"][epochs - 1]
    found = f"had turned as far in all after {epochs} epochs, and stood at {stood:.0f} % of train accuracy then"
    assert found in (ROOT / "docs/auto.md").read_text()


def test_the_page_on_auto_says_how_the_translator_gets_on():
    """Bounded, it is ahead of the tuned rate in every epoch; without a bound it breaks down in one of them."""
    ours, suites = (
        [run for run in read_records(ROOT / place) if run["task"] == "translation"]
        for place in ("benchmarks/results/auto", "results")
    )
    runs = {(run["optimiser"], run["lr"]): run for run in ours}
    tuned = [run for run in suites if (run["optimiser"], run["lr"]) == ("nero", 0.001)]
    tuned.sort(key=lambda run: run["seed"])
    others = [run["curve"]["valid_loss"] for run in tuned]
    page = (ROOT / "docs/auto.md").read_text()
    for share in (auto.TRUST, 0.06):
        own = runs["auto", share]
        assert all(loss < min(those) for loss, *those in zip(own["curve"]["valid_loss"], *others, strict=True))
        assert f"{own['test_bleu']} BLEU" in page
        assert f"ends at {math.exp(own['curve']['valid_loss'][-1]):.2f}" in page
    scores = [f"{run['test_bleu']:.2f}" for run in tuned]
    assert f"BLEU to {scores[0]}, {scores[1]} and {scores[2]}" in page
    lost = [math.exp(loss) for loss in runs["unbounded", 0.06]["curve"]["valid_loss"]]
    worst = max(range(5, len(lost)), key=lambda epoch: lost[epoch])
    assert f"broke down in the {worst + 1}th epoch" in page
    assert f"from {lost[worst - 1]:.1f} to {lost[worst]:.1f}" in page


def test_the_page_on_auto_has_the_trust_of_the_record():
    record = json.loads((ROOT / "benchmarks/results/trust.json").read_text())
    told = [
        [row["network"], f"{row['depth']:.1f}", f"{auto.TRUST / row['depth']:.2g}", trust.at(row)]
        for row in record["rows"]
    ]
    assert [row[:4] for row in rows_of("trust")] == told
    best = {f"perceptron of {row[0]} layers": row[1] for row in rows_of("perceptrons")}
    best |= {row[0].partition(",")[0]: row[4] for row in rows_of("depths")}  # 100 layers hardly begin in five epochs
    best["ResNet-50"] = f"{suite.TASKS['imagenet'].contenders['nero-tuned'].best:g}"
    assert [row[4] for row in rows_of("trust")] == [best[row[0]] for row in rows_of("trust")]
    short = {row["network"]: float(best[row["network"]]) / row["trusted"] for row in record["rows"] if row["trusted"]}
    page = (ROOT / "docs/auto.md").read_text()
    assert f"VGG-11's is {short['VGG-11']:.1f} times too short" in page
    assert f"the measured angle is over {short['ResNet-50'] // 10 * 10:.0f} times too short there" in page


def test_the_page_on_auto_has_the_best_angles_by_time():
    """By the mean of the seeds, none bounded; one angle may be a rate and a share of a trust, and run twice."""
    records = read_records(ROOT / "benchmarks/results/auto")
    lines = rows_of("time")
    assert [int(line[0]) for line in lines] == list(auto.LAYERS)
    for layers, *found in lines:
        assert len(found) == auto.EPOCHS
        curves: dict[float, dict[int, list[list[float]]]] = {}
        for each in records:
            own = each["task"] == f"perceptron-{layers}" and each["optimiser"] in ("nero", "unbounded")
            if own and each["seed"] in auto.SEEDS:
                angle = each["lr"] / (1 if each["optimiser"] == "nero" else int(layers))
                seeds = curves.setdefault(round(angle, 8), {})
                seeds.setdefault(each["seed"], []).append(each["curve"]["train_accuracy"])
        for epoch, told in enumerate(found):
            means = {
                angle: statistics.fmean(statistics.fmean(curve[epoch] for curve in runs) for runs in seeds.values())
                for angle, seeds in curves.items()
                if len(seeds) == len(auto.SEEDS)
            }
            best = max(means, key=lambda angle: means[angle])
            assert told == (f"{best:.2g}" if 100 * means[best] > auto.CHANCE else "-")


@pytest.mark.parametrize(("table", "depths"), [("falling", (5, 10, 20, 50)), ("normed", (10,))])
def test_the_page_on_auto_has_the_perceptrons_that_differ(table: str, depths: tuple[int, ...]):
    records = {
        (each["task"], each["optimiser"], each["lr"]): each["curve"]
        for each in read_records(ROOT / "benchmarks/results/auto")
        if each["seed"] == 0
    }
    by_depth = {'(`"auto"`)': ("auto", auto.TRUST), "(0.06, without the bound)": ("unbounded", 0.06)}
    cells = [*(("nero", rate) for rate in auto.RATES), *by_depth.values()]
    runs = [(layers, *cell) for layers in depths for cell in cells]
    told = []
    for layers, angle, *found in rows_of(table):
        rate, _, share = angle.partition(" ")
        cell = by_depth[share] if share else ("nero", float(rate))
        told.append((int(layers), *cell))
        assert not share or rate == f"{cell[1] / int(layers):.2g}"
        curves = [records[f"perceptron-{layers}{how}", *cell] for how in ("", f"-{table}")]
        assert found == [f"{100 * curve[f'{part}_accuracy'][-1]:.2f}" for curve in curves for part in ("train", "test")]
    assert sorted(told) == sorted(runs)


def test_the_page_on_auto_has_what_trusts_give_where_the_rate_falls_to_zero():
    records = [each for each in read_records(ROOT / "benchmarks/results/auto") if each["seed"] == 0]
    lines = rows_of("trusts")
    assert [int(line[0]) for line in lines] == [5, 10, 20, 50]
    for layers, best, *found in lines:
        train = auto.accuracies(records, int(layers), schedule="-falling")
        assert best == f"{max(train['nero'].values()):.2f}"
        assert tuple(train["unbounded"]) == (0.01, 0.02, 0.04, 0.06, 0.08, 0.11, 0.16)
        assert found == [f"{value:.2f}" for value in train["unbounded"].values()]
    curves = [(who, curve) for (task, who, *_), curve in train_curves().items() if task.endswith("-falling")]
    assert not any(breaks(curve) for _, curve in curves)
    unbounded = sum(who != "auto" for who, _ in curves)
    assert f"none of the {unbounded} runs breaks down" in (ROOT / "docs/auto.md").read_text()
    for layers, *_ in lines:  # "by test accuracy the best of the grid is 0.01"
        test = auto.accuracies(records, int(layers), "test", schedule="-falling")["nero"]
        assert max(test, key=lambda rate: test[rate]) == 0.01


def test_the_cost_of_watching_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watching, "EVERY", 2)
    assert watching.main(["--quick", "--device", "cpu", "--rounds", "1", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "watch-cpu.json").read_text())
    assert (found["quick"], found["every"]) == (True, 2)
    assert [row["workload"].rpartition(", ")[2] for row in found["rows"]] == ["the optimiser alone"] * 2 + [
        "training"
    ] * 2
    for row in found["rows"]:
        slower = 100 * row["milliseconds_a_reading"] / (2 * row["milliseconds_a_step"])
        assert row["per_cent_slower"] == pytest.approx(slower, rel=0.01)
        assert row["kept_bytes"] <= 2 * row["weights_bytes"]
        low, middle, high = row["per_cent_slower_in_blocks"]
        assert low <= middle <= high
    monkeypatch.setattr(watching, "shape_sets", lambda _: [])
    assert watching.main(["--quick", "--device", "cpu", "--rounds", "1", "--longest", "0", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "watch-cpu.json").read_text())
    assert {row["per_cent_slower_in_blocks"] for row in found["rows"]} == {None}


def test_the_study_of_automatic_rates_runs_and_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    noise = torch.Generator().manual_seed(0)

    def images(count: int) -> Images:
        return Images(
            torch.randint(256, (count, 1, 28, 28), generator=noise, dtype=torch.uint8), torch.arange(count) % 10
        )

    monkeypatch.setattr(auto, "load", lambda *_: ImageDataset("mnist", images(20), images(10), (0.5,), (0.25,)))
    small = dataclasses.replace(auto.TASKS["mnist-deep"], model=lambda: auto.mlp(2))
    monkeypatch.setitem(auto.TASKS, "mnist-deep", small)
    for name, value in (("LAYERS", (2, 3)), ("RATES", (0.001, 0.01)), ("TRUSTS", (auto.TRUST,)), ("EPOCHS", 1)):
        monkeypatch.setattr(auto, name, value)
    places = ["--device", "cpu", "--out", str(tmp_path), "--figure", str(tmp_path / "auto.png")]
    studies = ["depths", "falling", "normed", "swift", "mnist-deep", "draw"]
    assert auto.main([*studies, "--layers", "2", "3", "--epochs", "1", *places]) == 0
    found = {(each["task"], each["optimiser"], each["lr"]): each for each in read_records(tmp_path)}
    runs = (("nero", 0.001), ("nero", 0.01), ("auto", auto.TRUST))
    ran = {
        (f"perceptron-{count}{how}", *run)
        for count in (2, 3)
        for how in ("", "-falling", "-normed", "-swift")
        for run in runs
    }
    assert set(found) == {*ran, ("mnist-deep", "auto", auto.TRUST)}
    assert found["mnist-deep", "auto", auto.TRUST]["options"] == {"depth": "auto", "longest_step": 3.0}
    assert found["perceptron-2-swift", "auto", auto.TRUST]["options"] == {
        "depth": "auto",
        "longest_step": 3.0,
        "beta": 0.9,
    }
    assert found["perceptron-2-swift", "nero", 0.01]["options"] == {"beta": 0.9}
    assert (tmp_path / "auto.png").stat().st_size > 10_000
    assert re.search(r"│ +3 │.*│ +0\.033 │", capsys.readouterr().out)  # what is left of 0.1 for each of three layers
    assert auto.main(["depths", "--layers", "2", "--epochs", "1", "--seeds", "0", "1", *places]) == 0
    ends = [
        each["curve"]["test_accuracy"][-1]
        for each in read_records(tmp_path)
        if (each["task"], each["optimiser"], each["lr"]) == ("perceptron-2", "nero", 0.001)
    ]
    assert len(ends) == 2
    assert auto.accuracies(read_records(tmp_path), 2, "test")["nero"][0.001] == pytest.approx(50 * sum(ends))
    unbounded = ["--layers", "2", "--form", "unbounded", "--trust", "0.2", "--epochs", "1"]
    assert auto.main(["mnist-deep", "depths", *unbounded, *places]) == 0
    runs = [each for each in read_records(tmp_path) if each["optimiser"] == "unbounded"]
    assert {(each["task"], each["lr"]) for each in runs} == {("mnist-deep", 0.2), ("perceptron-2", 0.2)}
    assert all(each["options"] == {"depth": "auto"} for each in runs)
    assert auto.main(["depths", "--form", "loose", *unbounded[:2], "--trust", "0.2", "--epochs", "1", *places]) == 0
    [run] = [each for each in read_records(tmp_path) if each["optimiser"] == "loose"]
    assert run["options"] == {"depth": "auto", "longest_step": 10.0}
    with pytest.raises(SystemExit, match="not trained by Nero"):
        auto.main(["mnist-reparameterised", *places])
    for late in (
        ["depths", "mnist-reparameterised"],
        ["mnist-deep", "depths", "--epochs", "2"],
        ["wikitext2", "mnist-deep", "--form", "words"],
    ):
        with pytest.raises(SystemExit):
            auto.main([*late, *places, "--layers", "2", "--out", str(tmp_path / "refused")])
    assert not (tmp_path / "refused").exists(), "what cannot be done is said before anything is trained"
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"nothing to draw: .*; run `auto\.py depths`"):
        auto.main(["draw", *places, "--out", str(tmp_path / "nowhere")])
    for bad, message in (
        (["--trust", "0"], "0 is not a number from 1e-06 up"),
        (["--layers", "0"], "0 is not a number from 1 up"),
        (["--epochs", "900"], "epochs"),
        (
            ["--form", "words"],
            "mnist-deep has no words to leave without a bound: --form words is for wikitext2 and translation",
        ),
    ):
        with pytest.raises(SystemExit, match="2"):
            auto.main(["mnist-deep", *bad, *places])
        assert message in capsys.readouterr().err
    finish, kept = auto.Store.finish, tmp_path / "stopped"
    monkeypatch.setattr(auto.Store, "finish", lambda *run: (finish(*run), signal.raise_signal(signal.SIGTERM))[0])
    monkeypatch.setattr(auto, "RATES", ())
    with pytest.raises(SystemExit, match="stopped: the same command goes on"):
        auto.main(["depths", "--layers", "2", "3", "--epochs", "1", *places, "--out", str(kept)])
    assert [each["task"] for each in read_records(kept)] == ["perceptron-2"], "it came as the last run of a task ended"
    assert auto.main(["depths", "--layers", "2", "3", "--epochs", "1", *places, "--out", str(kept)]) == 0


def test_trust_is_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    noise = torch.Generator().manual_seed(0)

    def images(count: int) -> Images:
        pixels = torch.randint(256, (count, 1, 28, 28), generator=noise, dtype=torch.uint8)
        return Images(pixels[:1].expand_as(pixels), torch.arange(count) % 10)  # all alike: no step gets them right

    monkeypatch.setattr(trust, "load", lambda *_: ImageDataset("mnist", images(40), images(10), (0.5,), (0.25,)))
    tasks = {name: dataclasses.replace(trust.TASKS["mnist-deep"], model=lambda: trust.mlp(2)) for name in "ab"}
    tasks["b"] = dataclasses.replace(tasks["b"], dataset="imagenet")
    two = [trust.Network("perceptron of 2 layers", tasks["a"], 20), trust.Network("other", tasks["b"], 20)]
    monkeypatch.setattr(trust, "networks", lambda: two)
    places = ["--out", str(tmp_path), "--figure", str(tmp_path / "trust.png")]
    assert trust.main(places) == 0
    assert [row["network"] for row in json.loads((tmp_path / "trust.json").read_text())["rows"]] == [two[0].name]
    assert trust.main(["--images", str(tmp_path), *places]) == 0
    for row in json.loads((tmp_path / "trust.json").read_text())["rows"]:
        assert (row["layers"], row["depth"]) == (2, 2.0)
        assert all(a <= b <= c for a, b, c in zip(row["least"], row["median"], row["most"], strict=True))
        assert row["median"][0] < 0.1 < 0.5 < row["median"][-1]
        assert trust.ANGLES[0] < row["trusted"] < trust.ANGLES[-1]
    assert trust.main(["--draw", *places]) == 0
    assert (tmp_path / "trust.png").stat().st_size > 10_000


def test_a_first_step_turns_each_neuron_by_its_angle_and_leaves_the_model_alone():
    model = nero.balance_(torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = torch.randn(16, 64)
    change = trust.first_steps(model, lambda model: model(inputs).square().mean())(0.01)
    assert set(change) == {"0.weight", "2.weight"}
    assert change["0.weight"].norm(dim=1) == pytest.approx(0.01, rel=0.1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_trusted_angle_is_where_a_change_of_one_is_passed():
    exact = [100 * angle for angle in trust.ANGLES]
    assert trust.trusted(exact) == pytest.approx(0.01)
    assert trust.trusted([angle**0.5 * 20 for angle in trust.ANGLES]) == pytest.approx(0.0025)
    for never in ([0.1] * len(exact), [2.0] * len(exact)):
        assert math.isnan(trust.trusted(never))
