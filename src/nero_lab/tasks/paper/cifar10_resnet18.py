"""ResNet-18 on CIFAR-10: as VGG-11, on a network with batch norm and skips."""

from nero_lab.models.resnet import resnet18
from nero_lab.protocol import Contender, Seconds, Task
from nero_lab.tasks.paper.cifar10_vgg11 import CIFAR10

task = Task(
    name="cifar10-resnet18",
    shows="Table 1, Figure 5",
    title="The same on a residual network with batch norm",
    model=resnet18,
    contenders={
        "nero": Contender("nero", best=0.01),
        "sgd": Contender("sgd", best=0.1),
        "adam": Contender("adam", best=0.01),
        "lamb": Contender("lamb", best=0.1),
    },
    grid=(0.0001, 0.001, 0.01, 0.1, 1.0),
    seconds=Seconds(1280, 358, 1_190_000),
    side_by_side=2,
    **CIFAR10,
)
