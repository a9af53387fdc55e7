"""A check of the Fréchet distances that judge generated images, on the real CIFAR-10.

The distance of the training images to themselves should be zero, to the test images small, to noise large, and to
spoilt test images in between. Writes benchmarks/results/distances.json.
"""

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from records import command_line, origin, write_record
from torch import Tensor

from nero_lab.data import ImageDataset, load
from nero_lab.image_metrics import available_metrics

BATCH = 100


def main(argv: list[str] | None = None) -> int:
    """Measure from the command line."""
    parser = command_line(__doc__, has_quick=False)
    parser.add_argument("--data", type=Path, help="folder with the data; default: $NERO_DATA, or a download")
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
    record = {**origin(device), "images": count, "from training images to": found}
    write_record(arguments.out / "distances.json", record)
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
