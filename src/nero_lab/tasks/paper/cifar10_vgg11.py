"""VGG-11 on CIFAR-10, no batch norm: every optimiser without momentum, β = β₂ = 0.999, no weight decay.

The learning rate is tuned over {0.0001, 0.001, 0.01, 0.1, 1}.
"""

from dataclasses import replace
from typing import Any

from nero_lab.data.augmentation import crop_flip_rotate
from nero_lab.models.vgg import vgg11
from nero_lab.protocol import Contender, Seconds, Task, warm_up_then_drop

#: Settings of the paper's four experiments with classifiers on CIFAR-10: batches of 128; a random crop of the image
#: padded by 4, a flip, a rotation of up to 15°; 5 epochs of linear warm-up, step by step, then the learning rate times
#: 0.2 at epochs 100, 150 and 180, of 199 in all.
CIFAR10: dict[str, Any] = {
    "dataset": "cifar10",
    "epochs": 199,
    "batch": 128,
    "schedule": warm_up_then_drop(5, 0.2, at=(100, 150, 180)),
    "augment": crop_flip_rotate,
    "metric": "test_accuracy",
}

task = Task(
    name="cifar10-vgg11",
    shows="Table 1, Figure 5",
    title="Nero out of the box, against SGD, Adam and LAMB at their best",
    model=vgg11,
    contenders={
        "nero": Contender("nero", best=0.01),
        "sgd": Contender("sgd", best=0.1),
        "adam": Contender("adam", best=0.001),
        "lamb": Contender("lamb", best=0.01),
    },
    grid=(0.0001, 0.001, 0.01, 0.1, 1.0),
    seconds=Seconds(405, 121, 509_000),
    **CIFAR10,
)

#: Is one rate stable across batch sizes? Every contender at its rate for batches of 128, for as many epochs.
batches = tuple(
    replace(
        task,
        name=f"cifar10-vgg11-b{batch}",
        study="claims",
        shows="",
        title="Does a rate serve other batch sizes?",
        batch=batch,
        grid=(),
        seeds=1,
        seconds=Seconds(),
    )
    for batch in (32, 512, 2048)
)
