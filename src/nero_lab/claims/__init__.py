"""The paper's claims in words, put to the test on small perceptrons, whose data and training the studies share."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nero_lab import baselines
from nero_lab.data import ImageDataset, load
from nero_lab.protocol import Schedule, linear_decay

PIXELS = 784
EVAL_BATCH = 2000


class Split(NamedTuple):
    """Images as rows of normalised pixels, and their labels."""

    inputs: Tensor
    labels: Tensor

    def first(self, count: int) -> "Split":
        """Return the first examples."""
        return Split(self.inputs[:count], self.labels[:count])


class Digits(NamedTuple):
    """MNIST in memory."""

    train: Split
    test: Split


def load_digits(folder: Path | None) -> Digits:
    """Load MNIST from a folder, or download it there."""
    data = cast(ImageDataset, load("mnist", folder))
    train, test = (Split(data.normalise(part.pixels).flatten(1), part.labels) for part in (data.train, data.test))
    return Digits(train, test)


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers of a network in order."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def train(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    data: Split,
    *,
    lr: float,
    batch: int,
    epochs: int,
    seed: int,
    schedule: Schedule | None = None,
    after_epoch: Callable[[int], None] | None = None,
    after_step: Callable[[int], None] | None = None,
) -> list[float]:
    """Train a network and return the share of right answers in each epoch, counted while it trains.

    Args:
        model: the network.
        optimiser: its optimiser.
        data: the training set.
        lr: the rate at the start.
        batch: the examples of a step; a last smaller batch is left out.
        epochs: the number of epochs.
        seed: the seed of the order of the examples.
        schedule: the factor of the rate; by default it falls linearly to zero.
        after_epoch: called with the number of finished epochs.
        after_step: called with the number of finished steps.
    """
    generator = torch.Generator().manual_seed(seed)
    per_epoch = len(data.labels) // batch
    schedule = schedule or linear_decay(epochs)
    accuracy, step = [], 0
    for epoch in range(epochs):
        model.train()
        right = torch.zeros((), dtype=torch.long)
        order = torch.randperm(len(data.labels), generator=generator)
        for rows in torch.split(order[: per_epoch * batch], batch):
            baselines.set_rate(optimiser, lr * schedule(step, per_epoch))
            optimiser.zero_grad()
            outputs = model(data.inputs[rows])
            cross_entropy(outputs, data.labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            right += (outputs.argmax(1) == data.labels[rows]).sum()
            step += 1
            if after_step is not None:
                after_step(step)
        accuracy.append(right.item() / (per_epoch * batch))
        if after_epoch is not None:
            after_epoch(epoch + 1)
    return [round(share, 6) for share in accuracy]


@torch.no_grad()
def evaluate(model: nn.Module, data: Split) -> tuple[float, float]:
    """Return the mean loss and the share of errors in evaluation mode; an output that is not finite is an error."""
    model.eval()
    loss, wrong = 0.0, 0
    for inputs, labels in zip(torch.split(data.inputs, EVAL_BATCH), torch.split(data.labels, EVAL_BATCH), strict=True):
        outputs = model(inputs).float()
        loss += cross_entropy(outputs, labels, reduction="sum").item()
        is_right = (outputs.argmax(1) == labels) & outputs.isfinite().all(1)
        wrong += int((~is_right).sum())
    return loss / len(data.labels), wrong / len(data.labels)


def measure_test(model: nn.Module, data: Digits) -> dict[str, float]:
    """Return the loss and the share of errors on the test set, as a record holds them."""
    loss, error = evaluate(model, data.test)
    return {"test_loss": loss, "test_error": error}


def weight_norm(weights: Iterable[Tensor]) -> float:
    """Return the norm of all weights as one vector."""
    return math.sqrt(sum(float(weight.detach().square().sum()) for weight in weights))
