"""The study of today: Nero beside the optimisers that people use in 2026."""

from nero_lab.protocol import Task
from nero_lab.tasks.today import airbench, gpt, vit

TASKS: tuple[Task, ...] = (*gpt.TASKS, vit.task, airbench.task)
