"""A small GAN, its data and its metric."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("typer")

from nero_lab.data import ImageDataset, Images
from nero_lab.image_metrics import FrechetMetric
from nero_lab.loops.adversarial import Adversarial
from nero_lab.models.biggan import GANPair
from nero_lab.tasks import TASKS

CPU = torch.device("cpu")
PAPERS = TASKS["cgan"]


def made(examples=7, tests=6, size=16):
    """Make noise in which each class is brighter than the last."""
    generator = torch.Generator().manual_seed(0)

    def images(count):
        labels = torch.arange(count) % 10
        noise = torch.randint(100, (count, 3, size, size), generator=generator)
        return Images((noise + 15 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels)

    return ImageDataset("cifar10", images(examples), images(tests), (0.4,) * 3, (0.2,) * 3)


def tiny_metrics(_):
    """Return a metric whose features are the means of 4 x 4 pixels."""

    def features(pixels):
        return F.avg_pool2d(pixels.float(), 4).flatten(1)

    return [FrechetMetric("Fréchet distance, quarters", "distance", features)]


TINY = replace(
    PAPERS,
    model=partial(GANPair, base=1, blocks=2, chunk=3, class_features=5, rows=12),
    batch=4,
    epochs=3,
    loop=partial(Adversarial, metrics=tiny_metrics),
)
