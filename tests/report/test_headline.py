"""The two sentences at the top, and numbers as they are written."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vexact.experiments.verdict import FEW
from vexact.report import headline as headlines
from vexact.report.headline import few_seeds, headline, verdict_of
from vexact.report.number import pairs, written
from vexact.report.study import Arm, Claim, SeedRun, Study


def study(*verdicts: str, seeds: int = 2, question: str = "Does it harm?") -> Study:
    runs = tuple(SeedRun(seed, {}) for seed in range(seeds))
    claims = tuple(Claim(str(i), f"Claim {i}.", "", verdict, None) for i, verdict in enumerate(verdicts))
    return Study("t", question, (Arm("a", "arm", "a", {}, runs),) * 2, claims)


def test_the_headline_follows_from_the_claims() -> None:
    asked, found = headline(study("confirmed here", "opposite", "inconclusive", "confirmed here"))
    assert asked == "Does it harm?"
    assert found == (
        "Of 4 claims, 2 confirmed here, 1 came out opposite and 1 inconclusive (2 arms, 4 runs, 2 seeds each): "
        "Claim 0; Claim 3."
    )


def test_without_claims_nothing_is_claimed() -> None:
    asked, found = headline(study(question=""))
    assert asked == "No question was asked beforehand of these runs."
    assert "nothing is claimed" in found and "confirmed" not in found


def test_a_verdict_may_be_longer_or_unheard_of() -> None:
    assert verdict_of(Claim("", "", "", "not testable by construction", None)) == "not testable"
    assert "1 undecided" in headline(study("undecided"))[1]


@pytest.mark.parametrize(("seeds", "words"), [(1, "One seed"), (7, "7 seeds give ranges"), (8, "")])
def test_few_seeds_are_said(seeds: int, words: str) -> None:
    assert few_seeds(study(seeds=seeds)).startswith(words) and bool(few_seeds(study(seeds=seeds))) == bool(words)
    assert headlines.FEW == FEW


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0.123456, "0.123"), (-0.5, "−0.5"), (1234.5678, "1235"), (6e-4, "6e−4"), (3.0, "3"), (None, "–"),
        (math.nan, "–"), (math.inf, "∞"), (True, "yes"), (12345678, "12\u202f345\u202f678"), (100.0, "100"),
    ],
)  # fmt: skip
def test_numbers_are_short(value: Any, text: str) -> None:
    assert written(value) == text


def test_numbers_of_claims_may_be_nested() -> None:
    numbers = {"gap": {"low": 0.1, "high": None}, "band": [0.0, 0.25], "rows": [{"n": 1}, {"n": 2}]}
    assert pairs(numbers) == [
        ("gap", "low 0.1, high –"), ("band", "0, 0.25"), ("rows 1", "n 1"), ("rows 2", "n 2"),
    ]  # fmt: skip
