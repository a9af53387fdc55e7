"""The eleven experiments of the paper, in the words of the paper's appendix."""

from nero_lab.protocol import Task
from nero_lab.tasks.paper import cgan, cifar10, imagenet, mnist, pong, translation, wikitext2

TASKS: tuple[Task, ...] = (
    mnist.deep,
    mnist.reparameterised,
    cifar10.vgg,
    cifar10.resnet,
    cifar10.ablation,
    cifar10.granularity,
    wikitext2.task,
    translation.task,
    pong.task,
    cgan.task,
    imagenet.task,
)
