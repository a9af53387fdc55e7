"""The cost tables of the pages, written from the committed records.

A table stands between ``<!-- cost: NAME -->`` and ``<!-- end -->``. Run ``python benchmarks/tables.py`` after a new
record.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import memory
import torch
from contenders import ADAM, SGD
from records import RESULTS, ROOT
from timing import Row

from nero_lab.report.markdown import render_table

GUIDES = tuple(f"docs/guide/{name}.md" for name in ("sharding", "constraints", "jax", "watching"))
PAGES = ("README.md", "docs/speed.md", *GUIDES, "docs/paper/cgan.md")
BLOCK = re.compile(r"(<!-- cost: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Write all tables from the records."""
    for name in PAGES:
        page = ROOT / name
        page.write_text(filled(page.read_text()))
    return 0


def filled(text: str) -> str:
    """Return a page with its tables filled from the records."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{TABLES[block[2]]()}\n\n{block[3]}", text)


def record(name: str) -> dict[str, Any]:
    """Read a committed record."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def summary() -> str:
    """Make README's table: steps on a GPU."""
    lines = []
    for shapes, rows in _by_shapes("cuda").items():
        nero, device = rows["Nero (triton)"], rows["Nero (triton)"]["device_milliseconds"]
        ratios = [f"{device / rows[other]['device_milliseconds']:.2f}" for other in (SGD, ADAM)]
        lines.append([shapes, _ms(device), *ratios, *_with_host(nero)])
    return render_table(["shapes of", "device", "/ SGD", "/ Adam", "with host", "/ SGD", "/ Adam"], lines)


def gpu_steps() -> str:
    """Make the table of steps on a GPU."""
    lines = []
    for shapes, rows in _by_shapes("cuda").items():
        nero, device = rows["Nero (triton)"], rows["Nero (triton)"]["device_milliseconds"]
        of_sgd = f"{device / rows[SGD]['device_milliseconds']:.2f}"
        lines.append([shapes, _millions(nero), _ms(device), _bandwidth(nero), of_sgd, *_with_host(nero)])
    head = ["shapes of", "parameters", "device", "of a copy's bandwidth", "/ SGD", "with host", "/ SGD", "/ Adam"]
    return render_table(head, lines)


def limits() -> str:
    """Make the table of steps where the limit is harder to reach."""
    by_set: dict[str, dict[str, Row]] = {}
    for row in record("cuda")["limits"]:
        name = row["shapes"] + ", bf16" * (row["dtype"] == "bfloat16")
        by_set.setdefault(name, {})[row["optimiser"]] = row
    lines = []
    for name, rows in by_set.items():
        nero, sgd = rows["Nero"], rows[SGD]
        kinds = ("Nero", "Nero with momentum", "Nero, stochastic", "Nero with momentum, stochastic")
        fresh = [row["host_moving_milliseconds"] for row in (nero, sgd)]
        shares = [_bandwidth(rows[kind]) if kind in rows else "" for kind in kinds]
        times = [*_with_host(nero)[:2], _ms(fresh[0]), f"{fresh[0] / fresh[1]:.2f}"]
        lines.append([name, nero["tensors"], _ms(nero["device_milliseconds"]), *shares, *times])
    head = ["shapes of", "tensors", "device", "plain", "momentum", "stochastic", "both"]
    return render_table([*head, "with host", "/ SGD", "fresh", "/ SGD"], lines)


def momentum() -> str:
    """Make the table of steps with momentum on a GPU."""
    names = ("Nero", "Nero with momentum", SGD, "SGD with momentum (fused)", "AdamW (fused)")
    by_shapes = _by_shapes("cuda", "momentum")
    lines = [
        [
            shapes,
            name,
            _ms(rows[name]["device_milliseconds"]),
            rows[name]["bytes_per_parameter"],
            _bandwidth(rows[name]),
            _ms(rows[name]["milliseconds"]),
        ]
        for shapes, rows in by_shapes.items()
        for name in names
    ]
    head = ["shapes of", "optimiser", "device", "bytes", "of a copy's bandwidth", "with host"]
    found = record("cuda")
    return f"{found['machine']}, torch {found['torch']}:\n\n{render_table(head, lines)}"


def cpu_records() -> list[str]:
    """Return the names of the records of CPUs, one per architecture."""
    return sorted(path.stem for path in RESULTS.glob("cpu-*.json"))


def cpu_steps() -> str:
    """Make the tables of steps on CPUs."""
    parts = []
    for name in cpu_records():
        found = record(name)
        parts.append(f"{found['machine']}; torch {found['torch']}:\n\n{_steps_on_cpu(name)}")
    return "\n\n".join(parts)


def _steps_on_cpu(name: str) -> str:
    lines = []
    for shapes, rows in _by_shapes(name).items():
        nero = rows["Nero (numba)"]
        others = [f"{rows['Nero (foreach)']['of_fused_adam']:.2f}", f"{100 * nero['state_of_adam']:.2f} %"]
        lines.append([shapes, _millions(nero), *_with_host(nero), *others])
    head = ["shapes of", "parameters", "numba", "/ SGD", "/ Adam", "foreach / Adam", "state / Adam's"]
    return render_table(head, lines)


def tensors() -> str:
    """Make the table of steps on a GPU by the number of tensors."""
    rows = [row for row in record("cuda")["growth"] if (row["by"], row["optimiser"]) == ("tensors", "Nero")]
    lines = [[f"{row['tensors']:,}", *_with_host(row)] for row in rows]
    return render_table(["tensors", "a step with the host", "/ SGD", "/ Adam"], lines)


def training() -> str:
    """Make the table of the optimiser's share of a training step on a GPU."""
    rows: dict[str, dict[str, Row]] = {}
    for row in record("cuda")["end-to-end"]:
        rows.setdefault(row["model"], {})[row["optimiser"]] = row
    lines = []
    for model, by_name in rows.items():
        batch = " x ".join(map(str, by_name["Nero"]["batch"]))
        shares = [f"{by_name[name]['optimiser_per_cent_within']:.1f} %" for name in ("Nero", SGD, ADAM)]
        lines.append([model, batch, by_name["Nero"]["precision"], *shares])
    return render_table(["network", "batch", "precision", "Nero", "SGD", "Adam"], lines)


def suite() -> str:
    """Make the table of the time of whole tasks on a GPU."""
    times: dict[str, dict[str, str]] = {}
    for row in record("suite-cuda")["rows"]:
        if "seconds_in_full" in row:
            count = row["side_by_side"]
            name = f"`{row['task']}`" if count == 1 else f"`{row['task']}`, {count} runs side by side"
            times.setdefault(name, {})[row["precision"]] = f"{row['seconds_in_full']:.0f} s"
    precisions = ("float32", "tf32")
    lines = [
        [name, *(by_precision.get(each, "not run") for each in precisions)] for name, by_precision in times.items()
    ]
    return render_table(["task", "float32", "TF32"], lines)


def script() -> str:
    """Make the table of steps of mnist-deep beside those of the paper's script."""
    lines, ours = [], 0.0
    for row in record("suite-cuda")["rows"]:
        if row["task"] == "mnist-deep" and row["side_by_side"] == 1:
            ours = row["milliseconds_a_step"]
        elif "times_ours" in row:
            lines.append(
                [row["precision"], f"{ours:.1f} ms", f"{row['milliseconds_a_step']:.1f} ms", f"{row['times_ours']:.1f}"]
            )
    return render_table(["precision", "ours", "the authors' way", "ratio"], lines)


def sharded() -> str:
    """Make the table of steps of shards on a CPU."""
    by_workload: dict[str, dict[str, Row]] = {}
    for row in record("sharded-cpu")["rows"]:
        by_workload.setdefault(row["workload"], {})[row["backend"]] = row
    lines = []
    for workload, by_backend in by_workload.items():
        row = by_backend["foreach"]
        numba = by_backend.get("numba")
        lines.append(
            [
                workload,
                _ms(row["milliseconds_sharded"]),
                f"{row['of_plain']:.2f}",
                f"{numba['of_plain']:.2f}" if numba else "not run",
                _ms(row["milliseconds_adam"]),
                f"{row['milliseconds_muon']:,.0f} ms",
                *(row[name] for name in ("collectives", "collectives_adam", "collectives_muon")),
            ]
        )
    times = ["Nero", "/ plain", "numba / plain", "Adam", "Muon"]
    return render_table(["matrices", *times, "collectives: Nero", "Adam", "Muon"], lines)


def sharded_gpu() -> str:
    """Make the table of steps of shards on a GPU."""
    lines = [
        [
            row["workload"],
            row["processes"],
            *(_ms(row[key]) for key in ("device_ms_sharded", "device_ms_adam")),
            f"{row['device_ms_sharded'] / row['device_ms_plain']:.2f}",
            *(_ms(row[key]) for key in ("loop_ms_sharded", "loop_ms_adam")),
            f"{row['loop_of_plain']:.2f}",
        ]
        for row in record("sharded-cuda-gpt2")["rows"]
    ]
    device = ["device: Nero", "Adam", "Nero / plain"]
    return render_table(["model", "ranks", *device, "back to back: Nero", "Adam", "Nero / plain"], lines)


def rank_memory() -> str:
    """Make the table of the memory of a rank for a model of 7 B parameters."""
    model = memory.llama()
    lines = []
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bf16")):
        for optimiser in memory.OPTIMISERS:
            held = [memory.held(model, optimiser, dtype, ranks) for ranks in memory.RANKS]
            lines.append(
                [optimiser, name, *(_size(each.state) for each in held), *(_size(each.total) for each in held)]
            )
    ranks = [f"{count} rank{'s' * (count > 1)}" for count in memory.RANKS]
    return render_table(
        ["optimiser", "weights", *(f"state, {each}" for each in ranks), *(f"all, {each}" for each in ranks)], lines
    )


def _size(count: int) -> str:
    """Format a number of bytes."""
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 27 else f"{count / (1 << 20):.2f} MiB"


def balance() -> str:
    """Make the table of the cost of balancing, of the devices that have a record."""
    lines = []
    for device in ("cuda", "cpu"):
        if not (RESULTS / f"balance-{device}.json").exists():
            continue
        found = record(f"balance-{device}")
        for row in found["rows"]:
            times = [_ms(row[name]) for name in ("milliseconds_a_step", "milliseconds_added")]
            of_device = [row.get(f"device_milliseconds_{kind}") for kind in ("plain", "balanced")]
            alone = "" if None in of_device else _ms(of_device[1] - of_device[0])
            cells = [found["machine"].partition(",")[0], row["shapes"], row["optimiser"]]
            lines.append([*cells, *times, f"{row['per_cent_slower']:.3g} %", alone])
    return render_table(["machine", "shapes of", "optimiser", "step", "added", "of the step", "on the device"], lines)


def jax_steps() -> str:
    """Make the table of steps of nero.jax beside those of optax."""
    found = record("jax-gpu")
    lines = []
    for row in found["step"]:
        state = f"{row['state_bytes'] / 1e6:,.1f} MB"
        lines.append([row["optimiser"], _ms(row["milliseconds"]), f"{row['of_adam']:.2f}", state])
    return f"{found['machine']}, JAX {found['jax']}:\n\n" + render_table(
        ["optimiser", "step", "/ Adam", "state"], lines
    )


def watch() -> str:
    """Make the table of readings of the watch: their time, and the share of it in a hundred steps."""
    cells: dict[str, dict[str, str]] = {}
    for device in ("cpu", "cuda"):
        for row in record(f"watch-{device}")["rows"]:
            share = f"{_ms(row['milliseconds_a_reading'])}, {row['per_cent_slower']:.2g} %"
            cells.setdefault(row["workload"], {})[device] = share
    lines = [[name, *(found.get(device, "-") for device in ("cpu", "cuda"))] for name, found in cells.items()]
    return render_table(["workload", "CPU", "H200"], lines)


def distances() -> str:
    """Make the table of Fréchet distances from training images to others."""
    (found,) = record("distances")["from training images to"].values()
    return render_table(
        ["from training images to", "distance"], [[name, f"{value:.3g}"] for name, value in found.items()]
    )


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "gpu-steps": gpu_steps,
    "limits": limits,
    "momentum": momentum,
    "cpu-steps": cpu_steps,
    "tensors": tensors,
    "training": training,
    "suite": suite,
    "script": script,
    "sharded": sharded,
    "sharded-gpu": sharded_gpu,
    "rank-memory": rank_memory,
    "balance": balance,
    "jax": jax_steps,
    "watch": watch,
    "distances": distances,
}


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms"


def _millions(row: Row) -> str:
    return f"{row['parameters'] / 1e6:.1f} M"


def _bandwidth(row: Row) -> str:
    """Return the share of a copy's bandwidth that the device reaches."""
    return f"{100 * row['device_of_copy_bandwidth']:.0f} %"


def _with_host(row: Row) -> list[str]:
    """Return the time of a step with the host's work, and its ratios to fused SGD and Adam."""
    return [_ms(row["milliseconds"]), f"{row['of_fused_sgd']:.2f}", f"{row['of_fused_adam']:.2f}"]


def _by_shapes(name: str, section: str = "step") -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in record(name)[section]:
        found.setdefault(row["shapes"], {})[row["optimiser"]] = row
    return found


if __name__ == "__main__":
    raise SystemExit(main())
