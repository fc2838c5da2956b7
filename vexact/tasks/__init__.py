"""Prompts and rewards."""

from vexact.tasks.task import Item, Task, TaskError, load_task

__all__ = ["Item", "Task", "TaskError", "load_task"]
