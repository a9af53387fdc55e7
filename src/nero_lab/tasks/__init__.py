"""The tasks of the lab by name: the paper's experiments, the studies of claims, of today, and of depth."""

from difflib import get_close_matches

from nero_lab.protocol import SettingError, Task
from nero_lab.tasks import depth, paper, today
from nero_lab.tasks.paper import cgan, cifar10, imagenet, mnist, pong

#: Tasks on claims that the paper makes in words.
CLAIMS = (mnist.balanced_start, *cifar10.batches, pong.variants, cgan.with_momentum, imagenet.parts)
TASKS: dict[str, Task] = {task.name: task for task in (*paper.TASKS, *CLAIMS, *today.TASKS, *depth.TASKS)}


def task_named(name: str, *optimisers: str) -> Task:
    """Return the task of that name, with contenders to match the optimisers asked for.

    Args:
        name: a key of :data:`TASKS`.
        *optimisers: if these are forms of ``lr="auto"``, the task comes with these forms as its contenders and with
            their grid (:func:`nero_lab.tasks.depth.by_depth`). Otherwise it comes as it is.
    """
    if name not in TASKS:
        close = [task for task in TASKS if task.startswith(name)] or get_close_matches(name, TASKS, 1)
        fix = f"did you mean {close[0]}?" if close else f"take one of {', '.join(TASKS)}"
        raise SettingError(f"there is no task {name!r}: {fix}")
    if depth.FORMS.keys().isdisjoint(optimisers):
        return TASKS[name]
    if others := sorted(set(optimisers) - depth.FORMS.keys()):
        raise SettingError(
            f"the grid of {', '.join(depth.FORMS)} holds trusts instead of rates: sweep {', '.join(others)} apart"
        )
    return depth.by_depth(TASKS[name])
