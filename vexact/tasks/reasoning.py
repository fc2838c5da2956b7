"""Tasks from reasoning-gym: sums asked by a few solved examples, and every other one by its name.

The sums suit a base model, which answers by going on; an exact first line is rewarded. The others are the library's
own questions, scored by the library.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from vexact.recipe import TaskSection
from vexact.tasks.options import check_names, check_range, options_of
from vexact.tasks.split import first_of
from vexact.tasks.task import ITEMS, Item, Split, TaskError, check_index

PREFIX = "reasoning_gym:"  # in front of a name: the library's task even where this project has one of that name
BLOCK_BITS = 9
OPTIONS = "task.options"


@dataclass(frozen=True)
class ChainSumOptions:
    """`task.options` of chain_sum. shots: solved examples in front of each question."""

    terms: int = 2
    digits: int = 1
    shots: int = 4

    def __post_init__(self) -> None:
        check_range(1, 1 << 10, OPTIONS, terms=self.terms, digits=self.digits)
        check_range(0, 1 << 10, OPTIONS, shots=self.shots)


class ChainSum:
    """`Q: … 5 - 9 =` and `A:`, behind solved examples. The reward is 1 where the first line is the answer, else 0.

    The library's own scorer would give half a point to 18 where 8 is right.
    """

    stop = "\n"
    binary = True

    def __init__(self, section: TaskSection, seed: int) -> None:
        self._options = options_of(ChainSumOptions, section.options, OPTIONS)
        self._seed, self._share = seed, section.held_out
        self._drawn = lru_cache(maxsize=None)(self._draws)
        shown = (self._entry(ITEMS + i, "train") for i in range(self._options.shots))  # from behind the questions
        self._examples = "".join(f"{_asked(entry)} {entry['answer']}\n\n" for entry in shown)

    def count(self, split: Split) -> None:
        return None

    def item(self, index: int, split: Split = "train") -> Item:
        check_index(index)
        entry = self._entry(index, split)
        answer = str(entry["answer"])
        return Item(index, self._examples + _asked(entry), answer, f" {answer}{self.stop}", _columns(entry))

    def reward(self, item: Item, completion: str) -> float:
        return float(completion.partition("\n")[0].strip() == item.answer)

    def _entry(self, position: int, split: Split) -> dict[str, Any]:
        return first_of(split, self._share, lambda attempt: self._drawn(attempt, split)[position], _question)

    def _draws(self, attempt: int, split: Split) -> Any:
        """The library draws item i from seed + i. Seeds far apart keep runs, splits and attempts from sharing items."""
        own = self._options
        return _library("chain_sum").create_dataset(
            "chain_sum",
            seed=(attempt << 98) + (int(split == "held_out") << 97) + (self._seed << 32),
            size=ITEMS + own.shots,
            min_terms=own.terms,
            max_terms=own.terms,
            min_digits=own.digits,
            max_digits=own.digits,
        )


class Gym:
    """A task of the library by name, with its own options. A completion's answer is what its last
    `<answer>…</answer>` holds, else all of it; the library's scorer says how good that is, 0 … 1.

    Some of the library's tasks make all of their items at once, some take 32-bit seeds only: items come in blocks of
    512, each of them a small data set whose seed is a hash of (seed, split, attempt, block).
    """

    binary = False

    def __init__(self, section: TaskSection, seed: int) -> None:
        self.name = section.name.removeprefix(PREFIX)
        self.stop = section.stop
        self._options, self._seed, self._share = dict(section.options), seed, section.held_out
        self._library = _library(section.name)
        self._check()
        self._drawn = lru_cache(maxsize=256)(self._draws)
        self._scorer = self._draws("train", 0, 0)

    def count(self, split: Split) -> None:
        return None

    def item(self, index: int, split: Split = "train") -> Item:
        check_index(index)
        block, offset = index >> BLOCK_BITS, index & ((1 << BLOCK_BITS) - 1)
        entry = first_of(split, self._share, lambda attempt: self._drawn(split, attempt, block)[offset], _question)
        return Item(index, str(entry["question"]), str(entry["answer"]), columns=_columns(entry))

    def reward(self, item: Item, completion: str) -> float:
        found = self._library.utils.extract_answer(completion)
        return float(self._scorer.score_answer(completion.strip() if found is None else found, dict(item.columns)))

    def _check(self) -> None:
        known = self._library.factory.DATASETS
        if self.name not in known:
            check_names([self.name], [*OWN, *known], "task.name", "task")
        options = {item.name for item in fields(known[self.name][1])} - {"seed", "size"}
        check_names(self._options, sorted(options), f"{OPTIONS} of {self.name}")

    def _draws(self, split: Split, attempt: int, block: int) -> Any:
        address = f"{self.name}/{self._seed}/{split}/{attempt}/{block}"
        seed = int.from_bytes(hashlib.sha256(address.encode()).digest()[:4], "little") >> BLOCK_BITS << BLOCK_BITS
        try:
            return self._library.create_dataset(self.name, seed=seed, size=1 << BLOCK_BITS, **self._options)
        except Exception as error:  # the library checks by assert, and each task in its own way
            raise TaskError(f"task {self.name}: reasoning-gym refuses its options ({_line(error)})") from error


OWN = ("chain_sum", "modsum", "file")  # tasks of this project; every other name is the library's


def _library(task: str) -> Any:
    try:
        with warnings.catch_warnings():  # its needs hold invalid escapes, which Python mentions on first sight
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
            import reasoning_gym.factory
            import reasoning_gym.utils
    except ImportError:
        raise TaskError(f"task {task} needs the package reasoning-gym: pip install reasoning-gym") from None
    return reasoning_gym


def _columns(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("question", "answer", "metadata")}


def _question(entry: Mapping[str, Any]) -> str:
    return str(entry["question"])


def _asked(entry: Mapping[str, Any]) -> str:
    return f"Q: {entry['question']}\nA:"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
