"""The study of today: Nero beside the optimisers that people use in 2026."""

from nero_lab.protocol import Task

TASKS: tuple[Task, ...] = ()
