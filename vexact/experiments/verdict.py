"""What every rule of claims shares: the four verdicts, and how many seeds one needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from vexact.experiments.evidence import Evidence

CONFIRMED, OPPOSITE, INCONCLUSIVE, NOT_TESTABLE = "confirmed here", "opposite", "inconclusive", "not testable"
# Seeds below which an interval by resampling says nothing: for two arms of five seeds it misses the truth in 12 to 13
# cases of 100, of eight in 9, of sixteen in 7, where 5 are claimed (tests/experiments/test_statistics.py).
FEW = 8
SUCCESS = "late_trainer"  # of one evaluation alone the questions' luck is a large part
BAND = "A gap counts where its 95 % bootstrap interval over seeds lies outside the gaps of the null arms and 0."


@dataclass(frozen=True)
class Verdict:
    """verdict: one of the four. numbers: what it rests on, as JSON."""

    verdict: str
    numbers: Mapping[str, Any]


class Rule(Protocol):
    """`arms` and its like are patterns of arms' names, which commas separate."""

    def text(self) -> str:
        """The rule in words."""
        ...

    def judge(self, evidence: Evidence) -> Verdict: ...
