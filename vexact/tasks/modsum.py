"""Short chains of modular additions on an alphabet of a few signs: a task that a tiny model learns within minutes.

`3+9+4=` is followed by `2,6` and a line's end: the sums so far, modulo 10. Numbers are one sign each (a = 10, b = 11,
…), so the models `tiny-modsum` and `tiny` can read them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from vexact.model.tokenizer import NUMERALS
from vexact.recipe import TaskSection
from vexact.tasks.options import check_range, options_of
from vexact.tasks.split import first_of
from vexact.tasks.task import Item, Split, check_index
from vexact_kernels.reference import philox

MASK = (1 << 32) - 1
OPTIONS = "task.options"


@dataclass(frozen=True)
class ModsumOptions:
    """`task.options` of modsum. Each length from min_terms to max_terms is as frequent as another."""

    modulus: int = 10
    min_terms: int = 4
    max_terms: int = 4

    def __post_init__(self) -> None:
        check_range(2, len(NUMERALS), OPTIONS, modulus=self.modulus)
        check_range(2, 16, OPTIONS, min_terms=self.min_terms)
        check_range(self.min_terms, 16, OPTIONS, max_terms=self.max_terms)


class Modsum:
    """The reward is 1 where what stands behind the last comma of the first line is the answer, else 0."""

    stop = "\n"
    binary = True

    def __init__(self, section: TaskSection, seed: int) -> None:
        self.options = options_of(ModsumOptions, section.options, OPTIONS)
        self._share = section.held_out
        self._key = int.from_bytes(hashlib.sha256(f"modsum/{seed}".encode()).digest()[:8], "little")

    def count(self, split: Split) -> None:
        return None

    def item(self, index: int, split: Split = "train") -> Item:
        check_index(index)
        terms = first_of(split, self._share, lambda attempt: self._terms(index, attempt), _question)
        sums = self._sums(terms)
        return Item(index, _question(terms), NUMERALS[sums[-1]], ",".join(NUMERALS[s] for s in sums) + self.stop)

    def reward(self, item: Item, completion: str) -> float:
        return float(completion.partition(self.stop)[0].rpartition(",")[2] == item.answer)

    def _terms(self, index: int, attempt: int) -> list[int]:
        """Numbers 0 … modulus - 1. 96 random bits make them: none is likelier than another by more than 2^-22."""
        counter = (index, attempt, 0, 0)
        *words, length = philox(counter, (self._key & MASK, self._key >> 32))
        options = self.options
        count = options.min_terms + length * (options.max_terms - options.min_terms + 1) // (1 << 32)
        bits = words[0] | words[1] << 32 | words[2] << 64
        return [bits // options.modulus**i % options.modulus for i in range(count)]

    def _sums(self, terms: list[int]) -> list[int]:
        """The sums of the first two terms, the first three, …, modulo."""
        return [sum(terms[: i + 1]) % self.options.modulus for i in range(1, len(terms))]


def _question(terms: list[int]) -> str:
    return "+".join(NUMERALS[term] for term in terms) + "="
