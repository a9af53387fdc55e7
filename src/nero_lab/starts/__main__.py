"""``python -m nero_lab.starts``: train the cases of the study, and append one record a run to a file."""

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nero
from nero_lab.provenance import commit, device_name
from nero_lab.session import exit_on_error, find_device
from nero_lab.starts.cases import CASES, batches
from nero_lab.starts.variants import Variant
from nero_lab.store import StoreError, read_json_lines, write_atomically

BASES = {case.base for case in CASES.values()}
STEPS, BASE_STEPS = 600, 1500
VALIDATION_BATCHES = 16
Optimiser = Callable[..., torch.optim.Optimizer]


def _variant(model: nn.Module, lr: float, **options: Any) -> torch.optim.Optimizer:
    return Variant(nero.param_groups(model), lr, **options)


def _adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr)


#: The optimisers, by name: the first is today's Nero, the next are forms of it, the last is the rival.
CONTENDERS: dict[str, Optimiser] = {
    "nero": lambda model, lr: nero.Nero(model, lr),
    "before": partial(_variant, start="jump", gain_scale=0.0),
    "jump": partial(_variant, start="jump"),
    "forced": partial(_variant, start="forced"),
    "held": partial(_variant, start="held"),
    "ball": partial(_variant, start="ball"),
    "ball-uncentred": partial(_variant, start="ball", centre=False),
    "tenth": partial(_variant, start="ball", gain_scale=0.1),
    "hundredth": partial(_variant, start="ball", gain_scale=0.01),
    "adamw": _adamw,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every case asked for, with every contender and seed; runs that are on record are left out."""
    parser = argparse.ArgumentParser(prog="python -m nero_lab.starts", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the data sets")
    parser.add_argument("--out", type=Path, required=True, help="the file to append records to")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[name for name in CASES if name not in BASES])
    everyone = [(name, 0.01) for name in CONTENDERS]
    parser.add_argument("--contenders", nargs="+", type=_contender, default=everyone, help="NAME or NAME@RATE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one")
    options = parser.parse_args(arguments)
    device = find_device(options.device)
    bases = options.out.parent
    bases.mkdir(parents=True, exist_ok=True)
    try:
        on_file = read_json_lines(options.out) if options.out.exists() else []
        done = {(record["case"], record["contender"], record["lr"], record["seed"]) for record in on_file}
    except (KeyError, TypeError) as error:
        raise StoreError(f"{options.out} holds other records than of this study: name another --out") from error
    runs = [
        (case, *contender, seed, options.data, device, bases)
        for case, contender, seed in dict.fromkeys(itertools.product(options.cases, options.contenders, options.seeds))
        if (case, *contender, seed) not in done
    ]
    for name in sorted({CASES[case].base for case, *_ in runs} - {""}):
        if not (bases / f"{name}.pt").exists():
            train_base(name, options.data, device, bases)
    if not runs:
        print(f"all runs are in {options.out}")
        return
    with ExitStack() as stack:
        out = stack.enter_context(options.out.open("a"))
        do: Callable[..., Iterable[dict[str, Any]]] = map
        if options.jobs > 1:
            do = stack.enter_context(ProcessPoolExecutor(options.jobs, get_context("spawn"))).map
        for record in do(run, *zip(*runs, strict=True)):
            print(record["case"], record["contender"], record["lr"], record["seed"], f"{record['untrained']:.3f}",
                  *(f"{loss:.3f}" for loss in record["train"][:5]), f"valid {record['valid']:.4f}",
                  f"{record['seconds']} s", flush=True)  # fmt: skip
            out.write(json.dumps(record) + "\n")
            out.flush()


def _contender(text: str) -> tuple[str, float]:
    """Parse a contender and its rate."""
    name, _, rate = text.partition("@")
    if name not in CONTENDERS:
        raise argparse.ArgumentTypeError(f"there is no contender {name!r}: take one of {', '.join(CONTENDERS)}")
    try:
        lr = float(rate or 0.01)
    except ValueError:
        lr = math.nan
    if not 0 <= lr < math.inf:
        raise argparse.ArgumentTypeError(f"the rate of {text!r} must be a number that is finite and not negative")
    return name, lr


def run(
    case_name: str, contender: str, lr: float, seed: int, data: Path, device: torch.device, bases: Path
) -> dict[str, Any]:
    """Train a case and return its record: the losses of training, and the loss of validation at the end."""
    case, begin = CASES[case_name], time.perf_counter()
    base = None
    if case.base:
        torch.manual_seed(0)
        base = CASES[case.base].model(None).to(device)
        base.load_state_dict(torch.load(bases / f"{case.base}.pt", map_location=device, weights_only=True))
    torch.manual_seed(seed)
    model = case.model(base).to(device)
    untrained = _validate(case_name, model, data, device)
    losses = _train(case_name, model, CONTENDERS[contender](model, lr), lr, seed, STEPS, data, device)
    return {
        "case": case_name,
        "contender": contender,
        "lr": lr,
        "seed": seed,
        "steps": STEPS,
        "untrained": untrained,
        "train": [round(loss, 5) for loss in [*losses[:5], *losses[9::10]]],
        "valid": _validate(case_name, model, data, device),
        "seconds": round(time.perf_counter() - begin, 1),
        "device": device_name(device),
        "torch": torch.__version__,
        "commit": commit(),
    }


def train_base(name: str, data: Path, device: torch.device, bases: Path) -> None:
    """Train a network that other cases start from, by AdamW."""
    torch.manual_seed(0)
    model = CASES[name].model(None).to(device)
    _train(name, model, _adamw(model, 2e-3), 2e-3, 0, BASE_STEPS, data, device)
    write_atomically(bases / f"{name}.pt", partial(torch.save, model.state_dict()))


def _train(
    name: str,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    lr: float,
    seed: int,
    steps: int,
    data: Path,
    device: torch.device,
) -> list[float]:
    model.train()
    losses = []
    for step, batch in enumerate(islice(batches(CASES[name], data, device, "train", seed), steps)):
        for group in optimiser.param_groups:
            group["lr"] = lr * (1 - step / steps)
        optimiser.zero_grad()
        loss = CASES[name].loss(model, *batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@torch.no_grad()
def _validate(name: str, model: nn.Module, data: Path, device: torch.device) -> float:
    model.eval()
    chosen = islice(batches(CASES[name], data, device, "test", 0), VALIDATION_BATCHES)
    return float(torch.stack([CASES[name].loss(model, *batch) for batch in chosen]).mean())


if __name__ == "__main__":
    with exit_on_error("nero_lab.starts"):
        main()
