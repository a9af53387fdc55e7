"""Provenance of a result: the commit, the versions of the packages, and the device."""

import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import nero


def commit() -> str | None:
    """Return the commit of the source tree, with ``-dirty`` if files differ, or None if it is unknown.

    The variable NERO_COMMIT takes precedence: it names the commit of a copy without its history.
    """
    if "NERO_COMMIT" in os.environ:
        return os.environ["NERO_COMMIT"]
    here = Path(__file__).resolve().parent
    top = _git(here, "rev-parse", "--show-toplevel")
    if top is None or Path(top) / "src/nero_lab" != here:
        return None  # installed, perhaps inside another project's repository
    return _git(here, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def versions() -> dict[str, str]:
    """Return the versions of all packages that can affect a result."""
    found = {"python": platform.python_version(), "nero": nero.__version__, "torch": torch.__version__}
    for name in ("triton", "numba", "ale-py", "pytorch-optimizer"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def device_name(device: torch.device) -> str:
    """Return the product name of a GPU, or a CPU's model with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


@cache
def cpu_name() -> str:
    """Return a CPU's model and architecture."""
    with suppress(OSError, subprocess.CalledProcessError):
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("Model name:")]
        if models:
            return f"{models[0]}, {platform.machine()}"
    return f"{platform.processor() or 'CPU'}, {platform.machine()}"


@cache  # this process runs the code that it imported first
def _git(folder: Path, *arguments: str) -> str | None:
    try:
        found = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
