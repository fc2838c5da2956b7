"""Sums from reasoning-gym, asked by a few solved examples: a base model answers by going on."""

from __future__ import annotations

import warnings
from typing import Any

from vexact.recipe import TaskSection
from vexact.tasks.task import Item, TaskError

ITEMS = 1 << 31  # the list of questions; the examples come from behind it


class ChainSum:
    """`Q: … 5 - 9 =` and `A:`, behind solved examples. The reward is 1 where the first line is the answer, else 0.

    The library's own scorer would give half a point to 18 where 8 is right.
    """

    stop = "\n"

    def __init__(self, section: TaskSection, seed: int) -> None:
        try:
            with warnings.catch_warnings():  # its needs hold invalid escapes, which Python mentions on first sight
                warnings.simplefilter("ignore", SyntaxWarning)
                from reasoning_gym import create_dataset
        except ImportError:
            raise TaskError("task chain_sum needs the package reasoning-gym: pip install reasoning-gym") from None
        # The library draws item i from seed + i. Seeds far apart keep two runs from sharing their items.
        self._items: Any = create_dataset(
            "chain_sum",
            seed=seed << 32,
            size=ITEMS + section.shots,
            min_terms=section.terms,
            max_terms=section.terms,
            min_digits=section.digits,
            max_digits=section.digits,
        )
        self._examples = "".join(f"{_asked(entry)} {entry['answer']}\n\n" for entry in self._behind(section.shots))

    def item(self, index: int) -> Item:
        if not 0 <= index < ITEMS:
            raise IndexError(f"item {index} is outside 0 … {ITEMS - 1}")
        entry = self._items[index]
        return Item(index, self._examples + _asked(entry), str(entry["answer"]))

    def reward(self, item: Item, completion: str) -> float:
        return float(completion.partition("\n")[0].strip() == item.answer)

    def _behind(self, count: int) -> list[dict[str, Any]]:
        return [self._items[ITEMS + i] for i in range(count)]


def _asked(entry: dict[str, Any]) -> str:
    return f"Q: {entry['question']}\nA:"
