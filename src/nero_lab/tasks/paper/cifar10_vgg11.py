"""VGG-11 on CIFAR-10, no batch norm: every optimiser without momentum, β = β₂ = 0.999, no weight decay.

The learning rate is tuned over {0.0001, 0.001, 0.01, 0.1, 1}.
"""

from dataclasses import replace

from nero_lab.models.vgg import vgg11
from nero_lab.protocol import Contender, Seconds, Task
from nero_lab.tasks.paper.cifar10 import CIFAR10

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
