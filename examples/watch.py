"""Watch a small convolutional network learn to classify digits, and draw how far its neurons turn.

The network has five layers without batch norm. Nero trains it on scikit-learn's digits at the default learning rate,
with a cosine schedule to zero.
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
    """Return a network of four convolutions and a linear head."""
    layers: dict[str, nn.Module] = {}
    for number, (before, after) in enumerate(((1, 16), (16, 16), (16, 32), (32, 32)), 1):
        layers[f"conv{number}"] = nn.Conv2d(before, after, 3, padding=1)
        layers[f"relu{number}"] = nn.ReLU()
        if number % 2 == 0:
            layers[f"pool{number}"] = nn.MaxPool2d(2)
    return nn.Sequential(OrderedDict(layers, flat=nn.Flatten(), head=nn.Linear(128, 10)))


def load_data() -> list[Tensor]:
    """Return training images, test images, training labels and test labels."""
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels, labels, test_size=0.2, random_state=0, stratify=labels)
    train, test, *labels = map(torch.as_tensor, parts)
    images = [((part - train.mean()) / train.std()).float().reshape(-1, 1, 8, 8) for part in (train, test)]
    return [*images, *labels]


def train(epochs: int, every: int, seed: int) -> tuple[nero.Watch, float]:
    """Train a watched network; return the watch and the test accuracy."""
    torch.manual_seed(seed)
    images, test_images, labels, test_labels = load_data()
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
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    return watched, accuracy


def main(argv: list[str] | None = None) -> int:
    """Train, draw and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for the picture and the record (default: out)"
    )
    parser.add_argument("--epochs", type=int, default=50, help="number of epochs of 1,437 digits (default: 50)")
    parser.add_argument("--every", type=int, default=10, help="steps between readings (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the batches (default: 0)")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the matrices are too small for threads to help
    watched, accuracy = train(options.epochs, options.every, options.seed)
    path = options.out / "watch.png"
    watched.plot(path)
    record = {
        "seed": options.seed,
        "torch": torch.__version__,
        "epochs": options.epochs,
        "test_accuracy": round(accuracy, 4),
        "readings": [
            {"step": reading.step, "degrees_from_start": {
                layer.name: round(layer.from_start.middle * 180 / torch.pi, 2)
                for layer in reading.layers if layer.role == "neuron"
            }}
            for reading in watched.readings
        ],
    }  # fmt: skip
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    print(watched.readings[-1])
    print(f"test accuracy: {accuracy:.1%}; picture: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
