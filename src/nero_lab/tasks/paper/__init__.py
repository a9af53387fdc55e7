"""The eleven experiments of the paper, one file each, in the words of the paper's appendix."""

from nero_lab.protocol import Task
from nero_lab.tasks.paper import (
    cgan,
    cifar10_ablation,
    cifar10_granularity,
    cifar10_resnet18,
    cifar10_vgg11,
    imagenet,
    mnist_deep,
    mnist_reparameterised,
    pong,
    translation,
    wikitext2,
)

TASKS: tuple[Task, ...] = (
    mnist_deep.task,
    mnist_reparameterised.task,
    cifar10_vgg11.task,
    cifar10_resnet18.task,
    cifar10_ablation.task,
    cifar10_granularity.task,
    wikitext2.task,
    translation.task,
    pong.task,
    cgan.task,
    imagenet.task,
)
