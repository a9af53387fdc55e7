"""Settings shared by the paper's CIFAR-10 experiments.

Batches of 128; a random crop of the image padded by 4, a flip, a rotation of up to 15°; 5 epochs of linear
warm-up, step by step, then the learning rate times 0.2 at epochs 100, 150 and 180, of 199 in all.
"""

from typing import Any

from nero_lab.data.augmentation import crop_flip_rotate
from nero_lab.protocol import warm_up_then_drop

CIFAR10: dict[str, Any] = {
    "dataset": "cifar10",
    "epochs": 199,
    "batch": 128,
    "schedule": warm_up_then_drop(5, 0.2, at=(100, 150, 180)),
    "augment": crop_flip_rotate,
    "metric": "test_accuracy",
}
