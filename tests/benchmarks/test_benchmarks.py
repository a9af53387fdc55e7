"""The benchmark runs, records what it says it records, and refuses to report what cannot be compared."""

import json
from pathlib import Path

import bench
import end_to_end
import figure
import pytest
import shapes
import step
import suite
import timing
import torch
import watching

import nero
from nero.backends import BACKENDS, eager
from nero_lab.loops.ppo import PPO


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

    from test_paper import made
    from test_paper_cgan import tiny_judges

    from nero_lab.data import load
    from nero_lab.loops.adversarial import Adversarial
    from nero_lab.models.actor_critic import ActorCritic
    from nero_lab.models.biggan import Pair
    from nero_lab.models.mlp import mlp
    from nero_lab.models.transformer import Translator, language_model
    from nero_lab.models.vgg import vgg11

    pair, judged = partial(Pair, base=1), partial(Adversarial, judges=tiny_judges)
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
    assert max(50_000 / suite.TASKS["cgan"].batch, 2 * (game.steps + game.updates)) < suite.FIRST


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
