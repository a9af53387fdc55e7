"""The figure of a benchmark record: bars of step times, and their growth with size."""

import argparse
import json
from pathlib import Path
from typing import Any, Literal, TypeAlias

from contenders import ADAM, SGD, SGD_BYTES_PER_PARAMETER
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from records import RESULTS, ROOT
from timing import Row

Dashes: TypeAlias = Literal["-", "--", "-.", ":"]
NERO, FOREACH, OTHER_NERO = "Nero", "Nero (foreach)", "Nero (pytorch_optimizer)"
#: Colour, dashes and marker: Okabe and Ito's colours for the colour-blind, the others for print in grey.
STYLES: dict[str, tuple[str, Dashes, str]] = {
    SGD: ("#D55E00", "--", "s"),
    NERO: ("#0072B2", "-", "o"),
    ADAM: ("#009E73", ":", "^"),
    FOREACH: ("#56B4E9", "-.", "D"),
    OTHER_NERO: ("#CC79A7", "-", "v"),
}
GREY = "#555555"
#: A narrow figure with two rows of panels, whose letters are readable on a telephone.
WIDTH_INCHES, TEXT_PT = 6.4, 8.5


def draw(record: dict[str, Any]) -> Figure:
    """Draw a record that has the sections step and growth."""
    shown = drawn_rows(record["step"])
    # on a CPU a copy is no limit: it reads the lines that it overwrites, and a step has just read them
    bandwidth = record["copy_bytes_per_second"] if shown[0]["device_milliseconds"] else None
    figure = Figure(figsize=(WIDTH_INCHES, 3.6 + 0.19 * len(shown)), dpi=200)
    figure.set_layout_engine("constrained", h_pad=0.07, hspace=0.03)
    panels = figure.subplot_mosaic(
        [["bars", "bars"], ["parameters", "tensors"]], height_ratios=[0.19 * len(shown), 2.4]
    )
    draw_bars(panels["bars"], shown, bandwidth)
    version = {name: record["measured"][name]["nero"] for name in ("step", "growth")}
    note = "" if version["growth"] == version["step"] else f" ({version['growth']})"
    draw_growth(panels["parameters"], panels["tensors"], record["growth"], bandwidth, note)
    names = {row["optimiser"] for row in shown + record["growth"]}
    handles = [
        Line2D([], [], color=colour, linestyle=dashes, marker=marker, markersize=5, label=name)
        for name, (colour, dashes, marker) in STYLES.items()
        if name in names
    ]
    if bandwidth:
        handles.append(Line2D([], [], color=GREY, linewidth=0.9, label="bandwidth of a copy"))
    figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False, fontsize=TEXT_PT)
    figure.supxlabel(f"{record['machine']}; torch {record['torch']}", fontsize=8, color=GREY, x=0.99, ha="right")
    return figure


def drawn_rows(rows: list[Row]) -> list[Row]:
    """Return the rows to draw; the backend that is fastest over all shapes is named Nero."""
    spent: dict[str, float] = {}
    for row in rows:
        if row["optimiser"].startswith("Nero (") and row["optimiser"] != OTHER_NERO:
            spent[row["optimiser"]] = spent.get(row["optimiser"], 0) + row["of_fused_adam"]
    fastest = min(spent, key=lambda name: spent[name])
    found = [{**row, "optimiser": NERO if row["optimiser"] == fastest else row["optimiser"]} for row in rows]
    return [row for row in found if row["optimiser"] in STYLES]


def draw_bars(axes: Axes, rows: list[Row], bandwidth: float | None) -> None:
    """Draw the time per parameter, which lets networks of all sizes share a scale; longer bars are cut off."""
    names = [name for name in STYLES if any(row["optimiser"] == name for row in rows)]
    sets = list(dict.fromkeys(row["shapes"] for row in rows))
    unit, scale = ("ps", 1e12) if bandwidth else ("ns", 1e9)
    by_name = {(row["shapes"], row["optimiser"]): row for row in rows}
    end = 1.45 * max(scale * _seconds_per_parameter(row) for row in rows if row["optimiser"] in (ADAM, NERO))
    for number, shapes in enumerate(sets):
        for place, name in enumerate(names):
            row = by_name.get((shapes, name))
            if row is None:
                continue
            length, y = scale * _seconds_per_parameter(row), number * (len(names) + 1.3) + place
            device = row["device_milliseconds"]
            axes.barh(y, min(length, end), height=0.86, color=STYLES[name][0], alpha=0.45 if device else 1)
            if device:
                part = length * device / row["milliseconds"]
                axes.barh(y, min(part, end), height=0.86, color=STYLES[name][0])
            fraction = row["device_of_copy_bandwidth"]
            share = "" if fraction is None else f", {fraction:.0%}"
            text = f"{_three_digits(device or row['milliseconds'])} ms{share}"
            text += f" ({_three_digits(row['milliseconds'])} with the host)" if device else ""
            inside = length > (0.5 if device else 0.72) * end
            is_white = inside and not device and name in (SGD, NERO, ADAM)
            axes.text(
                0.98 * min(length, end) if inside else length + 0.01 * end,
                y,
                text + (" »" if length > end else ""),
                color="white" if is_white else "black",
                va="center_baseline",
                ha="right" if inside else "left",
                fontsize=7.8,
                bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 0.2}
                if inside and not is_white
                else None,
            )
    axes.set_yticks([number * (len(names) + 1.3) + (len(names) - 1) / 2 for number in range(len(sets))])
    axes.set_yticklabels([name.replace(", ", ",\n").replace(" small", "\nsmall") for name in sets], fontsize=TEXT_PT)
    axes.tick_params("y", length=0)
    if bandwidth:
        axes.axvline(scale * SGD_BYTES_PER_PARAMETER / bandwidth, color=GREY, linewidth=0.9)
    axes.set_xlim(0, end)
    axes.invert_yaxis()
    title = "A step: time, and share of the bandwidth of a copy" if bandwidth else "A step: time"
    axes.set_title(title, fontsize=9.5, loc="left")
    _label_axis(axes, f"{unit} per parameter (at least 28 bytes for Adam, 12 for the others)")


def draw_growth(middle: Axes, right: Axes, rows: list[Row], bandwidth: float | None, note: str) -> None:
    """Draw the time by parameters and by tensors, on logarithmic axes."""
    for axes, by in ((middle, "parameters"), (right, "tensors")):
        here = [row for row in rows if row["by"] == by]
        for name, (colour, dashes, marker) in STYLES.items():
            curve = [row for row in here if row["optimiser"] == name]
            axes.plot(
                [row[by] for row in curve], [row["milliseconds"] for row in curve],
                color=colour, linestyle=dashes, marker=marker, markersize=4, linewidth=1.5,
            )  # fmt: skip
        if bandwidth:
            ends = [min(here, key=lambda row: row[by]), max(here, key=lambda row: row[by])]
            floors = [1e3 * SGD_BYTES_PER_PARAMETER * row["parameters"] / bandwidth for row in ends]
            axes.plot([row[by] for row in ends], floors, color=GREY, linewidth=0.9)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.grid(which="major", color="#dddddd", linewidth=0.6)
    total = max(row["parameters"] for row in here)
    middle.set_title(f"Growth with parameters, ms{note}", fontsize=9.5, loc="left")
    _label_axis(middle, "parameters, in 1024 x 1024 matrices")
    right.set_title(f"Growth with tensors, ms{note}", fontsize=9.5, loc="left")
    _label_axis(right, f"tensors, {total / 1e6:.0f} M parameters in all")


def _seconds_per_parameter(row: Row) -> float:
    return float(row["milliseconds"]) / 1e3 / int(row["parameters"])


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:#.3g}"


def _label_axis(axes: Axes, label: str) -> None:
    axes.set_xlabel(label, fontsize=TEXT_PT)
    axes.tick_params(labelsize=TEXT_PT)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def main(argv: list[str] | None = None) -> int:
    """Draw from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/figures", help="folder for the figures")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path in sorted(arguments.results.glob("c*.json")):
        record = json.loads(path.read_text())
        if {"step", "growth"} <= set(record):
            drawn = arguments.out / f"step-{path.stem}.png"
            draw(record).savefig(drawn, metadata={"Software": None})
            print(f"drawn to {drawn.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
