"""A task asks questions and scores answers. It knows text only: no tokens, no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from vexact.errors import BadInput
from vexact.recipe import TaskSection

Prompt = str | tuple[Mapping[str, str], ...]  # text, or the messages (role, content) of a chat
Split = Literal["train", "held_out"]
ITEMS = 1 << 31  # positions of a split: 0 … ITEMS - 1


class TaskError(BadInput):
    """A task that cannot be had here. One line: which, and what to install or to change."""


@dataclass(frozen=True)
class Item:
    """One question.

    index: its position in the endless list of its split. prompt: the text that a completion follows, or a chat's
    messages, for the tokenizer's template. answer: what is right. solution: a whole completion that is right, working
    and stop included, for a supervised start; empty where the task knows none. columns: what else is known of the
    question, by name; reward functions of TRL's and verl's form get these.
    """

    index: int
    prompt: Prompt
    answer: str
    solution: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """Items are a function of (seed, split, index), so a run can be taken up at any step."""

    stop: str  # a completion also ends with the first token whose text holds this; empty: with the model's end alone

    def item(self, index: int) -> Item:
        """The training question at a position 0 … 2^31 - 1."""
        ...

    def reward(self, item: Item, completion: str) -> float:
        """How good a completion's text is."""
        ...


class SplitTask(Task, Protocol):
    """A task with questions for evaluation that no training item of any seed asks: all that `load_task` gives."""

    binary: bool  # rewards are 0 or 1, so that one can be flipped

    def count(self, split: Split) -> int | None:
        """How many questions a split has before they come again; None: the list is endless."""
        ...

    def item(self, index: int, split: Split = "train") -> Item:
        """The question at a position of a split. Raises IndexError, and TaskError where the split is empty."""
        ...


@dataclass(frozen=True)
class Answer:
    """A completion that waits for its reward. request, sample: the address of the rollout; ids: its tokens."""

    item: Item
    completion: str
    request: int
    sample: int
    ids: Sequence[int] = ()


def check_index(index: int) -> None:
    """Raises IndexError."""
    if not 0 <= index < ITEMS:
        raise IndexError(f"item {index} is outside 0 … {ITEMS - 1}")


def text_of(prompt: Prompt) -> str:
    """A prompt as one text: what tells two questions apart."""
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


def load_task(section: TaskSection, seed: int) -> SplitTask:
    """The task that a recipe names. Raises TaskError where it, its package or one of its options is not to be had."""
    from vexact.tasks.chat import Chat, check_chat
    from vexact.tasks.file import File
    from vexact.tasks.modsum import Modsum
    from vexact.tasks.reasoning import ChainSum, Gym

    own: dict[str, type[SplitTask]] = {"chain_sum": ChainSum, "modsum": Modsum, "file": File}
    task: SplitTask = own.get(section.name, Gym)(section, seed)  # type: ignore[call-arg]
    if section.stop and task.stop != section.stop:
        raise TaskError(f"task.stop: {section.name} has its own, {task.stop!r}")
    if section.chat or section.system:
        task = Chat(task, section)
    check_chat(task, section)
    return task
