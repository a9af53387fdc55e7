"""Pages and figures: a report fills the marked blocks and draws every contender; committed pages match the records."""

import itertools
import math
import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread
from report_samples import EPOCHS, ROOT, diverge, make_all_records, make_record

from nero_lab.report import __main__ as command
from nero_lab.report import figures, report
from nero_lab.report.axes import spread_labels
from nero_lab.report.depth.tables import TABLES as DEPTH_TABLES
from nero_lab.report.drawing import DEFAULT_STYLE, make_entry
from nero_lab.report.figures import draw, draw_table1
from nero_lab.report.markdown import BLOCK
from nero_lab.report.published import Published, PublishedRow, all_published
from nero_lab.report.runs import Runs
from nero_lab.report.tables import task_tables
from nero_lab.report.today.tables import TABLES as TODAY_TABLES
from nero_lab.store import StoreError, read_records

PAGES = ROOT / "docs/paper"
#: A record of the task whose page the tests of bad files spoil.
DEEP = make_record("mnist-deep", "nero", 0.001, 0, 0.92)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make reports without drawing figures."""
    monkeypatch.setattr("nero_lab.report.figures.draw", lambda *_: None)
    monkeypatch.setattr("nero_lab.report.figures.draw_table1", lambda *_: None)
    monkeypatch.setattr("nero_lab.report.figures.save", lambda *_: None)


def test_report_is_the_same_for_records_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tasks = ("mnist-reparameterised", "pong")
    monkeypatch.setattr("nero_lab.report.figures.DPI", 50)
    records = make_all_records(without=("sgd",), tasks=tasks)
    written = report(records, tmp_path)
    first = {path: path.read_bytes() for path in written}
    random.Random(1).shuffle(records)
    moved = [{**record, "path": f"/elsewhere/{place}.json"} for place, record in enumerate(records)]
    assert report(moved, tmp_path) == written
    assert {path: path.read_bytes() for path in written} == first


def test_figure_has_a_white_margin_and_is_opaque(tmp_path: Path):
    task = "mnist-reparameterised"
    report([make_record(task, "sigma-1", 0.01, 0, 0.9)], tmp_path)
    pixels = imread(tmp_path / f"figures/{task}.png")
    assert pixels.shape[-1] == 3 or pixels[..., 3].min() == 1
    assert pixels[:8, :, :3].min() == pixels[:, :8, :3].min() == pixels[:, -8:, :3].min() == 1


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("tasks", [tuple(EPOCHS), ("pong",), ()])
def test_report_writes_pages_of_tasks_with_records(tasks: tuple[str, ...], tmp_path: Path):
    records = make_all_records(1, tasks=tasks) if tasks else []
    names = {path.name for path in report(records, tmp_path)}
    table1 = {"table1.png"} if tasks else set()
    assert names == {"README.md", *table1, *(f"{task}{end}" for task in tasks for end in (".md", ".png"))}
    assert {path.stem for path in tmp_path.glob("*.md")} == {"README", *tasks}
    index = (tmp_path / "README.md").read_text()
    assert set(re.findall(r"\]\((\S+)\.md\)", index)) == set(tasks)
    missing = re.search("Not run: (.*)\\.", index)
    assert (missing[1].split(", ") if missing else []) == [task for task in EPOCHS if task not in tasks]


@pytest.mark.usefixtures("undrawn")
def test_report_leaves_text_outside_the_blocks(tmp_path: Path):
    page = tmp_path / "mnist-deep.md"
    page.write_text("# Mine\n\nwords\n\n<!-- table: search -->\nold\n<!-- end -->\n\nmore \\1 words\n")
    report([DEEP], tmp_path)
    start, end = page.read_text().split("<!-- table: search -->")
    assert start == "# Mine\n\nwords\n\n"
    assert end.endswith("|\n\n<!-- end -->\n\nmore \\1 words\n")
    assert "old" not in end


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: seeds -->\n", "mnist-deep.md: a table block is not closed"),
        ("<!-- table: sedes -->\n<!-- end -->\n", "unknown table 'sedes'; choose one of seeds, search"),
    ],
)
def test_page_with_broken_markers_stops_before_writing(tmp_path: Path, text: str, message: str):
    (tmp_path / "mnist-deep.md").write_text(text)
    with pytest.raises(StoreError, match=message):
        report([DEEP], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mnist-deep.md"]


def test_folder_that_cannot_be_written_to_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("words")
    for out in (tmp_path / "file", tmp_path / "file" / "pages"):
        with pytest.raises(StoreError, match=re.escape(f"cannot write into {out}: ") + ".*--out"):
            report([], out)
    assert (tmp_path / "file").read_text() == "words"


@pytest.mark.parametrize("spoil", [Path.mkdir, lambda path: path.write_bytes(b"\xff")])
def test_page_that_cannot_be_read_is_named(tmp_path: Path, spoil: Callable[[Path], object]):
    spoil(tmp_path / "mnist-deep.md")
    with pytest.raises(StoreError, match=re.escape(f"cannot read the page {tmp_path / 'mnist-deep.md'}: ")):
        report([DEEP], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mnist-deep.md"]


@pytest.mark.parametrize("name", ["mnist-deep.md", "figures/mnist-deep.png"])
def test_file_that_cannot_be_written_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nero_lab.report.fill_page", lambda *_: "words")
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(StoreError, match=re.escape(f"cannot write {tmp_path / name}: ")):
        report([DEEP], tmp_path)
    assert not list(tmp_path.glob("*.part"))


def test_contender_without_style_gets_the_default():
    entry = make_entry(PublishedRow("mnist-deep", "newcomer", 0.1, math.nan, math.nan), Runs([]))
    assert (entry.style, entry.label) == (DEFAULT_STYLE, "newcomer")


@pytest.mark.parametrize("task", EPOCHS)
def test_page_has_its_figure_command_and_tables(task: str):
    text = (PAGES / f"{task}.md").read_text()
    assert set(re.findall("<!-- table: (.*) -->", text)) == set(task_tables(task, Runs([])))
    assert re.search(rf"^nero sweep {task}( --data DATA)?$", text, re.MULTILINE)
    assert "\nnero report\n" in text
    assert f"`out/paper/pages/{task}.md`" in text
    assert f"](figures/{task}.png)" in text
    assert (PAGES / f"figures/{task}.png").exists()


@pytest.mark.parametrize("task", EPOCHS)
def test_page_has_findings_and_differences(task: str):
    text = (PAGES / f"{task}.md").read_text()
    for heading in ("What is run", "What we found", "What differs and why"):
        assert text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].strip(), heading


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.name)
def test_page_table_cells_have_at_most_80_characters(page: Path):
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    shown = [re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", line) for line in lines]
    assert not [cell for line in shown for cell in line.strip("|").split("|") if len(cell.strip()) > 80]


ABSENT = ("sgd", "lamb", "nero-norm", "madam", "sigma-100")
SCENES = {
    "three seeds": make_all_records(),
    "one seed, some missing": make_all_records(1, without=ABSENT),
    "two seeds, one diverged": [diverge(one) if one["seed"] else one for one in make_all_records(2)],
    "at chance and at zero error": [
        {**one, "curve": dict.fromkeys(one["curve"], [0.1 if one["optimiser"] != "nero" else 1.0] * one["epochs"])}
        for one in make_all_records()
    ],
}


@pytest.mark.no_cover  # coverage makes matplotlib twice as slow, and other tests draw every figure
@pytest.mark.parametrize(
    ("task", "scene"), [(task, scene) for place, task in enumerate(EPOCHS) for scene in list(SCENES)[place % 2 :: 2]]
)
def test_figure_names_contenders_without_overlaps(task: str, scene: str):
    runs = Runs(SCENES[scene])
    figure = draw(task, runs)
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts if text.get_position()[0] > 1 and text.get_text()]
        assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])
        assert all(box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)
    key = [text for legend in figure.legends for text in legend.get_texts()]
    assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in key)
    words = " ".join(text.get_text() for text in (*key, *(text for axes in figure.axes for text in axes.texts)))
    assert ("not run" in words) == any(not runs.counted(row) for row in all_published()[task].rows)
    assert ("1 seed" in words) == (scene == "one seed, some missing")


def is_inside(axes: Axes, value: float) -> bool:
    low, high = axes.get_ylim()
    return low <= value <= high


def test_error_that_rises_again_stays_inside_the_frame():
    record = make_record("cifar10-ablation", "nero-both", 0.02, 0, 0.91)
    record["curve"]["test_accuracy"][170:190] = [0.13] * 20
    for task in ("cifar10-ablation", "cifar10-granularity"):
        assert is_inside(draw(task, Runs([record])).axes[1], 87)


def test_perplexity_above_the_frame_is_marked():
    records = make_all_records(1, tasks=("translation",))
    key = [text.get_text() for text in draw("translation", Runs(records)).legends[0].get_texts()]
    sgd = next(record for record in records if record["optimiser"] == "sgd" and record["lr"] == 0.0001)
    sgd["curve"]["train_loss"][90] = math.log(1e5)
    train = draw("translation", Runs(records)).axes[0]
    assert not is_inside(train, 1e5)
    assert any(list(line.get_xdata()) == [91] for line in train.lines)
    assert "peak above the frame" in key  # the authors' SGD leaves the frame, too


ENDS: dict[str, Callable[[dict[str, list[float]]], float]] = {
    "test_error": lambda curve: 100 * (1 - curve["test_accuracy"][-1]),
    "valid_perplexity": lambda curve: math.exp(curve["valid_loss"][-1]),
    "reward": lambda curve: curve["reward"][-1],
    "test_distance": lambda curve: curve["test_distance"][-1],
}


def test_figure_of_table1_shows_the_committed_records():
    found = read_records(ROOT / "results")
    figure = draw_table1(Runs(found))
    tasks = [facts for facts in all_published().values() if facts.table1_name]
    for axes, facts in zip(figure.axes, tasks, strict=True):
        records = [record for record in found if record["task"] == facts.task]
        ends = {
            name: [ENDS[facts.measure](record["curve"]) for record in records if is_of(record, facts, name)]
            for name in ("nero", "sgd", "adam", "lamb")
        }
        curves = [line for line in axes.lines if len(line.get_xdata()) > 5]
        means = [line.get_ydata()[-1] for line in curves if line.get_marker() != "None"]
        assert means == pytest.approx([sum(values) / len(values) for values in ends.values() if values])
        seeds = [line.get_ydata()[-1] for line in curves if line.get_marker() == "None"]
        far = facts.task in ("cifar10-vgg11", "translation")  # one seed of Adam's, and one of SGD's, broke down
        several = [values for values in ends.values() if len(values) > 1]
        assert sorted(seeds) == pytest.approx(sorted(itertools.chain(*several)) if far else [])
        counts = [f"{label} {len(ends[label.lower()])}" for label in ("Nero", "SGD", "Adam", "LAMB")]
        same = len(set(map(len, ends.values()))) == 1
        expected = f"{len(ends['nero'])} each" if same else ", ".join(counts)
        assert axes.get_xlabel().endswith(f"\nseeds: {expected}")
        assert sum(line.get_markerfacecolor() == "white" for line in axes.lines) == 4 * facts.is_comparable


def is_of(record: dict[str, Any], facts: Published, optimiser: str) -> bool:
    """Check that a record is of an optimiser, at its best rate and in all epochs."""
    (rate,) = (row.rate for row in facts.rows if row.optimiser == optimiser)
    return (record["optimiser"], record["lr"], record["epochs"]) == (optimiser, rate, facts.epochs)


@pytest.mark.parametrize("records", [*SCENES.values(), []], ids=[*SCENES, "no records"])
def test_figure_of_table1_draws_any_records(records: list[dict[str, Any]]):
    figure = draw_table1(Runs(records))
    figure.draw_without_rendering()
    assert all(axes.get_ylim()[0] < axes.get_ylim()[1] for axes in figure.axes)
    texts = [axes.title for axes in figure.axes] + [text for axes in figure.axes for text in axes.texts]
    assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in texts)


def test_gan_figure_has_both_distances():
    figure = draw("cgan", Runs([make_record("cgan", "nero", 0.01, 0, 20.0)]))
    assert [len(axes.lines) >= 1 for axes in figure.axes] == [True, True]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()


def test_contender_without_data_is_named_in_the_key_only():
    figure = draw("cgan", Runs([make_record("cgan", "nero", 0.01, 0, 20.0)]))
    assert not any("not run" in text.get_text() for axes in figure.axes for text in axes.texts)
    assert sum("not run" in text.get_text() for text in figure.legends[0].get_texts()) == 4


@pytest.mark.parametrize("wanted", [[0.5] * 5, [0.0, 0.0, 1.0, 1.0], [0.1, 0.12, 0.9], [1.0, 0.97, 0.94, 0.0], []])
def test_labels_keep_apart_and_inside(wanted: list[float]):
    heights = spread_labels(wanted, 0.06)
    assert all(high - low > 0.06 - 1e-9 for low, high in pairwise(sorted(heights)))
    assert all(-1e-9 <= height <= 1 + 1e-9 for height in heights)


PAPER = tuple(f"docs/paper/{name}.md" for name in ("README", *EPOCHS))
DEPTH = ("docs/guide/auto.md", "docs/studies/depth.md")
TODAY = tuple(f"docs/today/{name}.md" for name in ("README", "gpt", "vit", "airbench"))


@pytest.mark.parametrize(
    ("update", "pages"),
    [
        (command.update_paper, ("README.md", *PAPER)),
        (command.update_depth, DEPTH),
        (command.update_today, TODAY),
        (command.update_starts, ("docs/studies/starts.md",)),
        (command.update_claims, ("docs/studies/claims.md", "docs/paper/claims.md")),
    ],
)
def test_update_fills_pages_as_committed_and_draws_figures(
    update: Callable[[Path], None], pages: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drawn: list[Path] = []
    for module in (command, figures):
        monkeypatch.setattr(module, "save", lambda _, path: drawn.append(path.relative_to(tmp_path)))
    for name in ("results", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in pages:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(BLOCK.sub(r"\1\3", (ROOT / name).read_text()))
    update(tmp_path)
    for name in pages:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), f"{name} is old: run `make paper`"
    assert all((ROOT / path).is_file() for path in drawn)


@pytest.mark.parametrize(("pages", "tables"), [(DEPTH, DEPTH_TABLES), (TODAY, TODAY_TABLES)])
def test_pages_of_a_study_show_every_table_once(pages: tuple[str, ...], tables: dict[str, object]):
    names = [name for page in pages for _, name, _ in BLOCK.findall((ROOT / page).read_text())]
    assert sorted(names) == sorted(tables)


def test_update_without_records_draws_nothing(tmp_path: Path):
    for name in TODAY:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    command.update_today(tmp_path)
    assert not (tmp_path / "docs/today/figures").exists()
    assert "](figures/" not in (tmp_path / TODAY[1]).read_text()
