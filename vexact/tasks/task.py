"""A task asks questions and scores answers. It knows text only: no tokens, no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vexact.errors import BadInput
from vexact.recipe import TaskSection


class TaskError(BadInput):
    """A task that cannot be had here. One line: which, and what to install."""


@dataclass(frozen=True)
class Item:
    """One question. index: its position in the task's endless list; prompt: the text that a completion follows."""

    index: int
    prompt: str
    answer: str


class Task(Protocol):
    """Items are a function of (seed, index), so a run can be taken up at any step."""

    stop: str  # a completion ends with the first token whose text holds this

    def item(self, index: int) -> Item:
        """The question at a position 0 … 2^31 - 1."""
        ...

    def reward(self, item: Item, completion: str) -> float:
        """How good a completion's text is, 0 … 1."""
        ...


def load_task(section: TaskSection, seed: int) -> Task:
    """The task that a recipe names. Raises TaskError where its package is not installed."""
    from vexact.tasks.reasoning import ChainSum

    return {"chain_sum": ChainSum}[section.name](section, seed)
