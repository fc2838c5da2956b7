"""Rules about which step comes early, and which comes first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vexact.experiments.endpoints import STEPS
from vexact.experiments.evidence import Evidence
from vexact.experiments.gaps import chosen, finite, references
from vexact.experiments.statistics import (
    COVERED,
    fisher_test,
    median,
    rank_correlation,
    rank_correlation_interval,
    sign_test,
)
from vexact.experiments.verdict import CONFIRMED, FEW, INCONCLUSIVE, NOT_TESTABLE, OPPOSITE, Verdict

LISTED = 40  # runs by name
Pair = tuple[str, float, float]  # run, first step, second step; infinite where it was not reached


@dataclass(frozen=True)
class Together:
    """Whether one step comes early where another does: collapse and ESS below ½, inside arms. What sets arms apart,
    as their lag, would make any two steps go together."""

    arms: str
    first: str = "ess_below_half"
    second: str = "collapse_step"

    def text(self) -> str:
        return (
            f"Inside arms, of runs that reached both, Spearman's ρ of {self.first} and {self.second} is above 0 "
            f"(opposite: below), by its 95 % bootstrap interval, runs resampled inside arms; of arms with at least "
            f"{FEW} such runs."
        )

    def judge(self, evidence: Evidence) -> Verdict:
        arms = {arm: list(pairs) for arm, pairs in _pairs(evidence, self.arms, self.first, self.second)}
        every = [pair for pairs in arms.values() for pair in pairs]
        both = {arm: [(a, b) for _, a, b in pairs if math.isfinite(a + b)] for arm, pairs in arms.items()}
        missed = [name for name, a, b in every if math.isfinite(b) and math.isinf(a)]
        behind = [name for name, a, b in every if math.isfinite(a + b) and a > b]
        numbers: dict[str, Any] = {
            "runs": len(every),
            "both": sum(map(len, both.values())),
            f"{self.first}_only": sum(math.isfinite(a) and math.isinf(b) for _, a, b in every),
            f"{self.second}_only": len(missed),
            "first_before_second": sum(math.isfinite(a + b) and a <= b for _, a, b in every),
            "missed": missed[:LISTED],  # the second step without the first
            "behind": behind[:LISTED],  # the first only after the second
            "by_arm": {
                arm: {"runs": len(pairs), "rank_correlation": finite(rank_correlation(*_columns(pairs)))}
                for arm, pairs in both.items()
                if pairs
            },
        }
        if not any(math.isfinite(b) for _, _, b in every):
            return Verdict(NOT_TESTABLE, numbers)
        enough = [_columns(pairs) for pairs in both.values() if len(pairs) >= FEW]
        if not enough:
            return Verdict(INCONCLUSIVE, numbers)
        rho = rank_correlation_interval(enough)
        numbers["rank_correlation"] = {name: finite(value) for name, value in rho.numbers().items()}
        return Verdict(CONFIRMED if rho.low > 0.0 else OPPOSITE if rho.high < 0.0 else INCONCLUSIVE, numbers)


@dataclass(frozen=True)
class Leads:
    """Whether one step comes before another: success that falls before K3 rises, or without that it does.

    control: arms in which nothing makes the first step come, by default the exact and its null ones. A step that they
    reach as often is none that a cause has led to: it says nothing that the second one did not warn of it.
    """

    arms: str
    first: str
    second: str
    control: str = ""

    def text(self) -> str:
        return (
            f"Of runs that reached either, {self.first} comes before {self.second} (or the other is not reached at "
            f"all) in more than a half, by an exact sign test at 2.5 % (opposite: in less); at least {FEW} such runs. "
            f"Confirmed only where more runs reach {self.first} than without a cause, by Fisher's exact test at 2.5 %."
        )

    def judge(self, evidence: Evidence) -> Verdict:
        every = [pair for _, pairs in _pairs(evidence, self.arms, self.first, self.second) for pair in pairs]
        reached = [(name, a, b) for name, a, b in every if math.isfinite(a) or math.isfinite(b)]
        right = [name for name, a, b in reached if a < b]
        wrong = [name for name, a, b in reached if a > b]
        numbers: dict[str, Any] = {
            "runs": len(every),
            "reached_neither": len(every) - len(reached),
            "first_leads": len(right),
            "second_leads": len(wrong),
            f"{self.first}_only": sum(math.isinf(b) for _, _, b in reached),
            f"{self.second}_only": sum(math.isinf(a) for _, a, _ in reached),
            "medians": {
                self.first: finite(median([a for _, a, _ in every])),
                self.second: finite(median([b for _, _, b in every])),
            },
            "second_leads_in": wrong[:LISTED],
            "without_cause": self._without_cause(evidence, [a for _, a, _ in every]),
        }
        if not reached:
            return Verdict(NOT_TESTABLE, numbers)
        if len(right) + len(wrong) < FEW:
            return Verdict(INCONCLUSIVE, numbers)
        tail = (1.0 - COVERED) / 2.0
        numbers["chance"] = sign_test(max(len(right), len(wrong)), min(len(right), len(wrong)))
        if numbers["chance"] > tail:
            return Verdict(INCONCLUSIVE, numbers)
        if len(right) < len(wrong):
            return Verdict(OPPOSITE, numbers)
        return Verdict(CONFIRMED if numbers["without_cause"]["chance"] <= tail else INCONCLUSIVE, numbers)

    def _without_cause(self, evidence: Evidence, steps: list[float]) -> dict[str, Any]:
        """How many runs of the control reach the first step, and the chance of so many in the arms were it all one."""
        exact = references(evidence, self.arms)
        arms = [arm for role in ("exact", "null") for name in exact for arm in evidence.beside(name, role)]
        if self.control:
            arms = chosen(evidence, self.control)
        given = [value for arm in arms for value in arm.values(self.first)]
        reached, others = (sum(map(math.isfinite, values)) for values in (given, steps))
        chance = fisher_test(others, len(steps) - others, reached, len(given) - reached)
        return {"runs": len(given), "reached": reached, "chance": chance}


@dataclass(frozen=True)
class Rarer:
    """Whether fewer runs reach a step in one arm than in another: runs that a trigger saves from collapse and another
    does not. Runs of a seed share their start and the questions, so those that only one of the two arms lost are named.
    """

    arms: str  # two of them: where it is to come to fewer runs, and where to more
    endpoint: str = "collapse_step"

    def fault(self) -> str:
        """What cannot be meant, empty where nothing is."""
        return "" if self.endpoint in STEPS else f"endpoint = {self.endpoint} is not one of {', '.join(STEPS)}"

    def text(self) -> str:
        return (
            f"{self.endpoint} is reached by a smaller share of the first arm's runs than of the second's, by Fisher's "
            "exact test at 2.5 % (opposite: by a greater one). Not testable where neither's reach it."
        )

    def judge(self, evidence: Evidence) -> Verdict:
        arms = chosen(evidence, self.arms)
        reached = [
            {seed: math.isfinite(step) for seed, step in zip(arm.seeds, arm.by_run(self.endpoint), strict=True)
             if not math.isnan(step)}
            for arm in arms
        ]  # fmt: skip
        numbers: dict[str, Any] = {
            "reached": {
                arm.name: f"{sum(runs.values())} of {len(runs)}" for arm, runs in zip(arms, reached, strict=True)
            }
        }
        if len(arms) < 2 or not any(any(runs.values()) for runs in reached):
            return Verdict(NOT_TESTABLE, numbers)
        numbers["only_in"] = {
            arm.name: [f"seed {seed}" for seed, lost in mine.items() if lost and not other.get(seed, True)][:LISTED]
            for arm, mine, other in zip(arms, reached, reached[::-1], strict=True)
        }
        counts = [(sum(runs.values()), len(runs) - sum(runs.values())) for runs in reached]
        chances = {"fewer": fisher_test(*counts[1], *counts[0]), "more": fisher_test(*counts[0], *counts[1])}
        numbers |= {"chance": chances, "seeds": min(map(len, reached))}
        tail = (1.0 - COVERED) / 2.0
        if numbers["seeds"] < FEW:
            return Verdict(INCONCLUSIVE, numbers)
        if chances["fewer"] <= tail:
            return Verdict(CONFIRMED, numbers)
        return Verdict(OPPOSITE if chances["more"] <= tail else INCONCLUSIVE, numbers)


@dataclass(frozen=True)
class Matched:
    """Whether a control was given as much as what it stands beside: two arms' medians of an endpoint, as `syncs`.

    What claims `needs` it: two arms that differ in how often they did something say nothing of when to do it.
    """

    arms: str
    endpoint: str = "syncs"
    within: float = 0.2

    def text(self) -> str:
        return f"The arms' medians of {self.endpoint} lie within {100 * self.within:g} % of the greatest of them."

    def judge(self, evidence: Evidence) -> Verdict:
        samples = {arm.name: arm.values(self.endpoint) for arm in chosen(evidence, self.arms)}
        samples = {name: values for name, values in samples.items() if values}
        middles = {name: median(values) for name, values in samples.items()}
        seeds = min(map(len, samples.values()), default=0)
        numbers = {"medians": {name: finite(value) for name, value in middles.items()}, "seeds": seeds}
        if len(samples) < 2:
            return Verdict(NOT_TESTABLE, numbers)
        if seeds < FEW or not all(map(math.isfinite, middles.values())):
            return Verdict(INCONCLUSIVE, numbers)
        low, high = min(middles.values()), max(middles.values())
        return Verdict(CONFIRMED if high - low <= self.within * abs(high) else OPPOSITE, numbers)


def _pairs(evidence: Evidence, patterns: str, first: str, second: str) -> Iterator[tuple[str, list[Pair]]]:
    """Of each arm, of its runs that measured both."""
    for arm in chosen(evidence, patterns):
        columns = (arm.seeds, arm.by_run(first), arm.by_run(second))
        yield (
            arm.name,
            [
                (f"{arm.name}, seed {seed}", a, b)
                for seed, a, b in zip(*columns, strict=True)
                if not math.isnan(a) and not math.isnan(b)
            ],
        )


def _columns(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [a for a, _ in pairs], [b for _, b in pairs]
