"""VGG-11 on CIFAR-10, no batch norm: every optimiser without momentum, β = β₂ = 0.999, no weight decay.

The learning rate is tuned over {0.0001, 0.001, 0.01, 0.1, 1}.
"""

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
