"""A check of the Fréchet distances that judge generated images, on the real CIFAR-10.

The distance of the training images to themselves should be zero, to the test images small, to noise large, and to
spoilt test images in between. Writes benchmarks/results/distances.json.
"""

import argparse
import json
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from timing import machine
from torch import Tensor

from nero_lab.data import ImageDataset, load
from nero_lab.image_metrics import available_metrics
from nero_lab.provenance import commit

ROOT = Path(__file__).parents[1]
BATCH = 100


def main(argv: list[str] | None = None) -> int:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here, help=f"default: {here}")
    parser.add_argument("--data", type=Path, help="folder with the data; default: $NERO_DATA, or a download")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder for the JSON")
    parser.add_argument("--images", type=int, default=10_000, help="images of each set (10000, as in the task)")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    data = load("cifar10", arguments.data)
    assert isinstance(data, ImageDataset)
    count = arguments.images
    train, test = (part.pixels[:count].to(device) for part in (data.train, data.test))
    found: dict[str, dict[str, float]] = {}
    for metric in available_metrics(device):
        real = metric.gaussian(torch.split(train, BATCH))
        distances = found.setdefault(metric.name, {})
        sets = {"themselves": None, "test": test, **spoilt(test, data.test.labels[:count])}
        for name, pixels in sets.items():
            other = real if pixels is None else metric.gaussian(torch.split(pixels, BATCH))
            distances[name] = float(f"{real.distance(other):.6g}")
            print(f"{metric.name}: {name} {distances[name]:.6g}", flush=True)
    record = {
        "date": date.today().isoformat(),
        "machine": machine(device),
        "torch": torch.__version__,
        "commit": commit(),
        "images": count,
        "from training images to": found,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "distances.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return 0


def spoilt(pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Make images worse in several ways."""
    generator = torch.Generator(pixels.device).manual_seed(0)
    noise = torch.randint(256, pixels.shape, dtype=torch.uint8, generator=generator, device=pixels.device)
    blurred = F.interpolate(F.avg_pool2d(pixels.float(), 2), scale_factor=2, mode="bilinear")
    return {
        "noise": noise,
        "test, a tenth of it noise": (0.9 * pixels + 0.1 * noise).byte(),
        "test, upside down": pixels.flip(2),
        "test, blurred": blurred.round().byte(),
        "test, one class of it": pixels[labels.to(pixels.device) == 0],
    }


if __name__ == "__main__":
    raise SystemExit(main())
