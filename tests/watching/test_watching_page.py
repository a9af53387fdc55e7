"""The names of the numbers, the code and the table of docs/guide/watching.md."""

import json
import re
from pathlib import Path

import pytest
from watched_networks import (
    ScalarLog,
    charts_of,
    watched_run,
)

from nero.watching import Layer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guide/watching.md"


def words_of_table(watched):
    heading = str(watched.readings[-1]).splitlines()[1]
    return re.split("  +", heading)[2:]


def words_of_tensorboard(watched):
    written = ScalarLog()
    watched.write(written)
    return dict.fromkeys(tag.partition("/")[0].replace("_", " ") for tag, _ in written.written)


def words_of_picture(watched):
    charts = charts_of(watched)
    titles = [title for axes in charts for title in axes.get_title(loc="left").split("; ")]
    legends = [text.get_text() for axes in charts if axes.get_legend() for text in axes.get_legend().get_texts()]
    names = [re.sub(r"(: .*| [\d.]+%)$", "", text).lower() for text in (*titles, *legends)]
    return dict.fromkeys(word for word in names if word != "shares of neurons")


def words_of_page(_):
    table = PAGE.read_text().partition("| word |")[2].partition("\n\n")[0]
    return re.findall(r"^\| ([a-z ]+) \|", table, re.MULTILINE)


@pytest.mark.parametrize(
    "words",
    [words_of_table, words_of_tensorboard, words_of_picture, words_of_page],
    ids=lambda it: it.__name__,
)
def test_a_number_has_the_same_name_everywhere(words):
    """The name of the attribute is used in the table, the tags, the picture and the page."""
    wanted = [field.replace("_", " ") for field in Layer._fields if field not in ("name", "role", "followed", "step")]
    assert sorted(words(watched_run())) == sorted(wanted)


def test_code_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    assert (tmp_path / "run.png").exists()
    assert list((tmp_path / "runs/1").iterdir())


def test_costs_on_the_page_are_those_of_the_records():
    records = {
        device: {
            row["workload"]: row
            for row in json.loads((ROOT / f"benchmarks/results/watch-{device}.json").read_text())["rows"]
        }
        for device in ("cpu", "cuda")
    }
    lines = PAGE.read_text().splitlines()
    for workload in {*records["cpu"], *records["cuda"]}:
        cells = [
            f"{row['milliseconds_a_reading']:.0f} ms, {row['per_cent_slower']:.2g} %" if row else "-"
            for row in (rows.get(workload) for rows in records.values())
        ]
        assert f"| {workload} | {' | '.join(cells)} |" in lines
