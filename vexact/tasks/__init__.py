"""Prompts and rewards."""

from vexact.tasks.task import Item, Task, load_task

__all__ = ["Item", "Task", "load_task"]
