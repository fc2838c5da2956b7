"""Prompts and rewards.

A run loads its task and a Scoring for it; each step asks the task for items and the Scoring for the rewards of all
completions together.
"""

from vexact.tasks.scoring import RewardError, Scores, Scoring
from vexact.tasks.task import Answer, Item, Split, Task, TaskError, load_task

__all__ = ["Answer", "Item", "RewardError", "Scores", "Scoring", "Split", "Task", "TaskError", "load_task"]
