"""A small vision transformer on CIFAR-10, with random crops and flips.

20 epochs of batches of 500, which divide the data: one shape to compile. One epoch of warm-up, then a cosine.
"""

from dataclasses import replace
from functools import partial

from nero_lab.data.augmentation import crop_flip_rotate
from nero_lab.models.vit import VisionTransformer
from nero_lab.protocol import Seconds, Task, warm_up_then_cosine
from nero_lab.tasks.today.contenders import around

EPOCHS = 20
#: The middle of each contender's seven rates, and the best that the search has found.
RATES = {
    "nero": (0.02, 0.02),
    "nero-momentum": (0.01, 0.005),
    "nero-momentum-free": (0.015, 0.0075),
    "nero-momentum-auto": (0.05, 0.05),
    "adamw": (0.003, 0.0015),
    "muon": (0.02, 0.02),
}

task = Task(
    name="vit",
    study="today",
    shows="",
    title="A vision transformer of 4.8 M parameters on CIFAR-10",
    dataset="cifar10",
    model=VisionTransformer,
    contenders={name: replace(around(name, 7, middle), best=best) for name, (middle, best) in RATES.items()},
    grid=(),
    epochs=EPOCHS,
    batch=500,
    schedule=warm_up_then_cosine(1, EPOCHS),
    metric="test_accuracy",
    augment=partial(crop_flip_rotate, degrees=0.0),
    smoothing=0.1,
    precision="bf16",
    is_compiled=True,
    seconds=Seconds(bf16=51),
)
