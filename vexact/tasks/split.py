"""Which questions are kept for evaluation.

The question's own text decides, by the first 64 bits of its SHA-256. So no question is ever in both splits, whatever
the seed, the position or the number of copies of it, and runs of different seeds keep the same questions back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from vexact.tasks.task import Split, TaskError

T = TypeVar("T")
ATTEMPTS = 4096  # a split with any question at all is missed less often than a bit flips in memory


def is_held_out(question: str, share: float) -> bool:
    """True for about `share` (0 … 1) of all questions."""
    bits = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big")
    return bits < int(share * 2.0**64)  # the product is exact: a power of two


def first_of(split: Split, share: float, candidate: Callable[[int], T], question: Callable[[T], str]) -> T:
    """The first of candidate(0), candidate(1), … whose question belongs to the split. Raises TaskError."""
    if split not in ("train", "held_out"):
        raise ValueError(f"split is {split!r}, must be train or held_out")
    if split == "held_out" and share == 0.0:
        raise TaskError("task.held_out is 0: no questions are kept for evaluation")
    for attempt in range(ATTEMPTS):
        found = candidate(attempt)
        if is_held_out(question(found), share) == (split == "held_out"):
            return found
    raise TaskError(f"task.held_out = {share}: {ATTEMPTS} questions were drawn, none for the split {split}")
