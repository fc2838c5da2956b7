"""Questions as chats, for the tokenizer's template."""

from __future__ import annotations

from dataclasses import replace

from vexact.recipe import TaskSection
from vexact.tasks.task import Item, Split, SplitTask, TaskError


class Chat:
    """A task whose text prompts become one message of a user; `task.system` stands in front of every chat."""

    def __init__(self, task: SplitTask, section: TaskSection) -> None:
        self._task, self._section = task, section
        self.stop, self.binary = task.stop, task.binary

    def count(self, split: Split) -> int | None:
        return self._task.count(split)

    def item(self, index: int, split: Split = "train") -> Item:
        item = self._task.item(index, split)
        prompt, system = item.prompt, self._section.system
        if isinstance(prompt, str):
            if not self._section.chat:
                return item
            prompt = ({"role": "user", "content": prompt},)
        if system:
            if prompt[0]["role"] == "system":
                raise TaskError(f"task.system: item {index} has a system message already")
            prompt = ({"role": "system", "content": system}, *prompt)
        return replace(item, prompt=prompt)

    def reward(self, item: Item, completion: str) -> float:
        return self._task.reward(item, completion)


def check_chat(task: SplitTask, section: TaskSection) -> None:
    """Raises TaskError where a key of chats would have no effect, judging by the first item."""
    if isinstance(task.item(0).prompt, str):
        for key in ("system", "chat_template_kwargs"):
            if getattr(section, key):
                raise TaskError(f"task.{key} is of chats, but task {section.name} asks in plain text; set task.chat")
