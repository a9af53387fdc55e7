"""Watch a small convolutional network learn to read digits, and draw how far its neurons turn.

Scikit-learn's digits, five layers without batch norm, Nero at its default rate, which falls to nothing along a cosine.
"""

import argparse
import json
from collections import OrderedDict
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional

import nero


def network() -> nn.Sequential:
    """Four convolutions and a head."""
    layers: dict[str, nn.Module] = {}
    for number, (before, after) in enumerate(((1, 16), (16, 16), (16, 32), (32, 32)), 1):
        layers[f"conv{number}"] = nn.Conv2d(before, after, 3, padding=1)
        layers[f"relu{number}"] = nn.ReLU()
        if number % 2 == 0:
            layers[f"pool{number}"] = nn.MaxPool2d(2)
    return nn.Sequential(OrderedDict(layers, flat=nn.Flatten(), head=nn.Linear(128, 10)))


def digits() -> list[Tensor]:
    """Images to train on and to test on, then what they show."""
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels, labels, test_size=0.2, random_state=0, stratify=labels)
    train, test, *shown = map(torch.as_tensor, parts)
    images = [((part - train.mean()) / train.std()).float().reshape(-1, 1, 8, 8) for part in (train, test)]
    return [*images, *shown]


def train(epochs: int, every: int, seed: int) -> tuple[nero.Watch, float]:
    """Train and watch. The watch, and the share of test images that the network reads right."""
    torch.manual_seed(seed)
    images, unseen, labels, unseen_labels = digits()
    model = network()
    optimiser = nero.Nero(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    watched = nero.watch(optimiser)
    step = 0
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(labels)), 128):
            moved = images[batch].roll(torch.randint(-1, 2, (2,)).tolist(), (2, 3))
            optimiser.zero_grad()
            functional.cross_entropy(model(moved), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            step += 1
            if step % every == 0:
                watched.read()
        schedule.step()
    with torch.no_grad():
        right = (model(unseen).argmax(1) == unseen_labels).float().mean().item()
    return watched, right


def main(argv: list[str] | None = None) -> int:
    """Train, tell and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture and its numbers (out)")
    parser.add_argument("--epochs", type=int, default=50, help="of 1,437 digits (50)")
    parser.add_argument("--every", type=int, default=10, help="steps between readings (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (0)")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the products are too small to share out
    watched, right = train(options.epochs, options.every, options.seed)
    path = options.out / "watch.png"
    watched.plot(path)
    record = {
        "seed": options.seed,
        "torch": torch.__version__,
        "epochs": options.epochs,
        "test_accuracy": round(right, 4),
        "readings": [
            {"step": each.step, "degrees_from_start": {
                layer.name: round(layer.from_start.middle * 180 / torch.pi, 2)
                for layer in each.layers if layer.role == "neuron"
            }}
            for each in watched.readings
        ],
    }  # fmt: skip
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    print(watched.readings[-1])
    print(f"{right:.1%} of the test digits right; the picture: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
