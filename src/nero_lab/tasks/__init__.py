"""The paper's experiments, each a small file that reads like the appendix's paragraph."""

from nero_lab.protocol import SettingError, Task
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

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
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
}


def task_named(name: str) -> Task:
    """The task of that name."""
    if name not in TASKS:
        raise SettingError(f"there is no task {name!r}: take one of {', '.join(TASKS)}")
    return TASKS[name]
