"""Smoke test of an installed package without extras. ``make package`` runs it, for the sdist and for the wheel."""

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

import nero


def error_of(*command: str) -> str:
    """Return what a command that fails says."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    return done.stderr


def main() -> int:
    """Train a small model, and ask for what the extras bring."""
    assert Path(nero.__file__).is_relative_to(sys.prefix), f"{nero.__file__} is not of this environment"
    assert version("nero-optim") == nero.__version__
    found = [name for name in ("jax", "numba", "typer") if find_spec(name)]
    assert not found, f"this environment has {found}, of the extras"

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimiser, inputs, losses = nero.Nero(model), torch.randn(32, 8), []
    for _ in range(3):
        optimiser.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2], losses
    assert nero.is_balanced(model)
    assert "0.weight" in str(nero.describe(model))

    assert "pip install '.[jax]'" in error_of(sys.executable, "-I", "-c", "import nero.jax")
    assert "pip install '.[lab]'" in error_of(f"{sys.prefix}/bin/nero", "list")
    print(f"nero-optim {nero.__version__} works without extras, on torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
