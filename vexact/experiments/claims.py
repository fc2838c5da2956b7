"""The rules that decide claims, fixed before any run: frozen dataclasses whose fields are what a study file may set.

A verdict is `confirmed here`, `opposite`, `inconclusive` or `not testable`. Three things hold for every rule about
sizes. An arm's gap is mean(arm) − mean(exact); seeds are independent once arms have parted, so nothing is paired. A gap
*counts* where its bootstrap interval (19 in 20) lies outside the null band: from the smallest to the greatest gap
of the null arms, 0 among them. With fewer than FEW seeds there is no verdict but `inconclusive`, with the numbers.

Rules about bits need one run: equality is not a matter of luck. A new rule is a dataclass here, a line in RULES and a
test that gives each of its verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from vexact.experiments.evidence import Evidence
from vexact.experiments.gaps import by_dose, chosen, finite, gaps, null_band
from vexact.experiments.statistics import (
    Interval,
    difference_interval,
    mean,
    mean_interval,
    rank_correlation,
    rank_correlation_interval,
)

CONFIRMED, OPPOSITE, INCONCLUSIVE, NOT_TESTABLE = "confirmed here", "opposite", "inconclusive", "not testable"
FEW = 5  # seeds below which an interval by resampling says nothing
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


@dataclass(frozen=True)
class EqualBits:
    """Whether runs end with the very weights of another arm's, seed by seed."""

    arms: str
    against: str
    expect: str = "equal"  # or `different`, for a control

    def text(self) -> str:
        return f"At equal seeds every run's weights at the end are {self.expect} in bits, compared with {self.against}."

    def judge(self, evidence: Evidence) -> Verdict:
        pairs = [
            (f"{arm.name}, seed {seed}", print_ == theirs[seed])
            for arm in chosen(evidence, self.arms)
            for other in chosen(evidence, self.against)
            for theirs in [dict(zip(other.seeds, other.fingerprints, strict=True))]
            for seed, print_ in zip(arm.seeds, arm.fingerprints, strict=True)
            if seed in theirs
        ]
        if not pairs:
            return Verdict(NOT_TESTABLE, {"compared": 0})
        equal = [name for name, same in pairs if same]
        wanted = len(equal) == len(pairs) if self.expect == "equal" else not equal
        numbers = {"compared": len(pairs), "equal": len(equal), "different": [n for n, same in pairs if not same][:8]}
        return Verdict(CONFIRMED if wanted else OPPOSITE, numbers)


@dataclass(frozen=True)
class Always:
    """Whether an endpoint has one value in every run (`expect: all`), or in none, as a control must (`none`)."""

    arms: str
    endpoint: str
    value: float = 0.0
    expect: str = "all"

    def text(self) -> str:
        return f"{self.endpoint} is {self.value:g} in {'every run' if self.expect == 'all' else 'no run'}."

    def judge(self, evidence: Evidence) -> Verdict:
        values = [value for arm in chosen(evidence, self.arms) for value in arm.values(self.endpoint)]
        if not values:
            return Verdict(NOT_TESTABLE, {"runs": 0})
        equal = sum(value == self.value for value in values)
        wanted = equal == len(values) if self.expect == "all" else equal == 0
        return Verdict(
            CONFIRMED if wanted else OPPOSITE,
            {"runs": len(values), "equal": equal, "min": finite(min(values)), "max": finite(max(values))},
        )


@dataclass(frozen=True)
class Gap:
    """Whether arms differ from the exact one: `expect` lower, higher or none. which: `all` arms, or `any` of them."""

    arms: str
    endpoint: str = SUCCESS
    expect: str = "lower"
    which: str = "all"
    margin: float = 0.1  # a gap inside ± margin is none
    against: str = ""  # by default the exact arm

    def text(self) -> str:
        if self.expect == "none":
            return f"The interval of each gap of {self.endpoint} lies within ± {self.margin:g} or the null band."
        return f"{self.which} of the gaps of {self.endpoint} count, and are {self.expect}. {BAND}"

    def judge(self, evidence: Evidence) -> Verdict:
        found = gaps(evidence, self.arms, self.endpoint, self.against)
        if not found.of:
            return Verdict(NOT_TESTABLE, found.numbers())
        if found.seeds < FEW:
            return Verdict(INCONCLUSIVE, found.numbers())
        signs = [found.sign(gap) for gap in found.of.values()]
        if self.expect == "none":
            near = [self._near(gap, found.band) for gap in found.of.values()]
            return Verdict(CONFIRMED if all(near) else OPPOSITE if any(signs) else INCONCLUSIVE, found.numbers())
        wanted = -1 if self.expect == "lower" else 1
        right = [sign == wanted for sign in signs]
        if all(right) if self.which == "all" else any(right):
            return Verdict(CONFIRMED, found.numbers())
        wrong = [sign == -wanted for sign in signs]
        return Verdict(OPPOSITE if any(wrong) and not any(right) else INCONCLUSIVE, found.numbers())

    def _near(self, gap: Interval, band: tuple[float, float]) -> bool:
        return gap.low >= min(-self.margin, band[0]) and gap.high <= max(self.margin, band[1])


@dataclass(frozen=True)
class DoseResponse:
    """Whether harm against a placebo at the same dose grows with the dose."""

    arms: str
    placebo: str
    dose: str = "mismatch.k3"
    endpoint: str = SUCCESS

    def text(self) -> str:
        return (
            f"harm = mean {self.endpoint} of the placebo − that of the arm at equal {self.dose}. At the greatest dose "
            "it counts, and it never falls from one dose to the next by more than the null band is wide (opposite: "
            f"the arm is better there, and that counts). {BAND}"
        )

    def judge(self, evidence: Evidence) -> Verdict:
        treated, placebo = by_dose(evidence, self.arms, self.dose), by_dose(evidence, self.placebo, self.dose)
        doses = sorted(treated.keys() & placebo.keys())
        pairs = {dose: (placebo[dose].values(self.endpoint), treated[dose].values(self.endpoint)) for dose in doses}
        pairs = {dose: sides for dose, sides in pairs.items() if all(sides)}
        if not pairs:
            return Verdict(NOT_TESTABLE, {"doses": doses})
        low, high = null_band(evidence, self.endpoint)
        harm = {dose: difference_interval(*sides) for dose, sides in pairs.items()}
        values = [interval.value for interval in harm.values()]
        seeds = min(len(side) for sides in pairs.values() for side in sides)
        numbers = {
            "harm": {f"{dose:g}": interval.numbers() for dose, interval in harm.items()},
            "null_band": [low, high],
            "rank_correlation": finite(rank_correlation(list(harm), values)),
            "seeds": seeds,
        }
        if seeds < FEW or len(harm) < 2:
            return Verdict(INCONCLUSIVE, numbers)
        last = harm[max(harm)]
        grows = all(b >= a - (high - low) for a, b in pairwise(values))
        if last.low > -low and grows:  # harm is the negative of a gap
            return Verdict(CONFIRMED, numbers)
        return Verdict(OPPOSITE if last.high < -high else INCONCLUSIVE, numbers)


@dataclass(frozen=True)
class Together:
    """Whether one step comes early where another does: collapse and ESS below ½, over all runs of the arms."""

    arms: str
    first: str = "ess_below_half"
    second: str = "collapse_step"

    def text(self) -> str:
        return (
            f"Over runs that reached both, Spearman's ρ of {self.first} and {self.second} is above 0 (opposite: "
            f"below), by its 95 % bootstrap interval; at least {FEW} such runs."
        )

    def judge(self, evidence: Evidence) -> Verdict:
        pairs = [
            pair
            for arm in chosen(evidence, self.arms)
            if arm.endpoints.get("ess_min") or self.first != "ess_below_half"
            for pair in zip(arm.values(self.first), arm.values(self.second), strict=True)
        ]
        both = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
        numbers: dict[str, Any] = {
            "runs": len(pairs),
            "both": len(both),
            f"{self.first}_only": sum(math.isfinite(a) and not math.isfinite(b) for a, b in pairs),
            f"{self.second}_only": sum(math.isfinite(b) and not math.isfinite(a) for a, b in pairs),
            "first_before_second": sum(a <= b for a, b in both),
        }
        if not any(math.isfinite(b) for _, b in pairs):
            return Verdict(NOT_TESTABLE, numbers)
        if len(both) < FEW:
            return Verdict(INCONCLUSIVE, numbers)
        rho = rank_correlation_interval([a for a, _ in both], [b for _, b in both])
        numbers["rank_correlation"] = {name: finite(value) for name, value in rho.numbers().items()}
        return Verdict(CONFIRMED if rho.low > 0.0 else OPPOSITE if rho.high < 0.0 else INCONCLUSIVE, numbers)


@dataclass(frozen=True)
class Order:
    """Whether an endpoint's means come in the order in which arms are named, the smallest first."""

    arms: str
    endpoint: str

    def text(self) -> str:
        return (
            f"mean {self.endpoint} rises from each of the arms, in the order named, to the next, by the 95 % bootstrap "
            "interval of the difference (opposite: one falls so)."
        )

    def judge(self, evidence: Evidence) -> Verdict:
        arms = [arm for arm in chosen(evidence, self.arms) if arm.values(self.endpoint)]
        if len(arms) < 2:
            return Verdict(NOT_TESTABLE, {"arms": [arm.name for arm in arms]})
        samples = [arm.values(self.endpoint) for arm in arms]
        rises = [difference_interval(b, a) for a, b in pairwise(samples)]
        seeds = min(map(len, samples))
        numbers = {
            "means": {arm.name: finite(mean(values)) for arm, values in zip(arms, samples, strict=True)},
            "rises": [rise.numbers() for rise in rises],
            "seeds": seeds,
        }
        if seeds < FEW:
            return Verdict(INCONCLUSIVE, numbers)
        if all(rise.low > 0.0 for rise in rises):
            return Verdict(CONFIRMED, numbers)
        return Verdict(OPPOSITE if any(rise.high < 0.0 for rise in rises) else INCONCLUSIVE, numbers)


@dataclass(frozen=True)
class Best:
    """Whether one remedy comes nearest to the exact arm, and mends anything at all. untreated: the arm without one."""

    arms: str
    best: str
    untreated: str
    endpoint: str = SUCCESS

    def text(self) -> str:
        return (
            f"Of all arms {self.best} has the smallest |gap| of {self.endpoint}, and it is above {self.untreated} by "
            "its 95 % bootstrap interval (opposite: it is below it so, or another one's |gap| is smaller and the "
            f"difference of the two counts). Not testable where {self.untreated} has no gap that counts. {BAND}"
        )

    def judge(self, evidence: Evidence) -> Verdict:
        found = gaps(evidence, f"{self.arms}, {self.best}", self.endpoint)
        harm = gaps(evidence, self.untreated, self.endpoint)
        if self.best not in found.of or not harm.of:
            return Verdict(NOT_TESTABLE, found.numbers())
        ranking = sorted(found.of, key=lambda name: abs(found.of[name].value))
        best = evidence.arms[self.best].values(self.endpoint)
        mended = difference_interval(best, chosen(evidence, self.untreated)[0].values(self.endpoint))
        ahead = difference_interval(best, evidence.arms[ranking[0]].values(self.endpoint))
        numbers = {**found.numbers(), "untreated": harm.numbers()["gaps"], "ranking": ranking}
        numbers |= {"mended": mended.numbers(), "against_nearest": ahead.numbers()}
        if min(found.seeds, harm.seeds) < FEW:
            return Verdict(INCONCLUSIVE, numbers)
        if not any(harm.sign(gap) for gap in harm.of.values()):
            return Verdict(NOT_TESTABLE, numbers)
        if ranking[0] == self.best and mended.low > 0.0:
            return Verdict(CONFIRMED, numbers)
        beaten = ranking[0] != self.best and found.sign(ahead) != 0
        return Verdict(OPPOSITE if mended.high < 0.0 or beaten else INCONCLUSIVE, numbers)


@dataclass(frozen=True)
class AtMost:
    """Whether an endpoint's mean stays at or below a bound."""

    arms: str
    endpoint: str
    bound: float

    def text(self) -> str:
        return f"mean {self.endpoint} of each arm is at most {self.bound:g}, by its 95 % bootstrap interval."

    def judge(self, evidence: Evidence) -> Verdict:
        samples = {arm.name: arm.values(self.endpoint) for arm in chosen(evidence, self.arms)}
        found = {name: mean_interval(values) for name, values in samples.items() if values}
        if not found:
            return Verdict(NOT_TESTABLE, {})
        seeds = min(len(samples[name]) for name in found)
        numbers = {"means": {name: interval.numbers() for name, interval in found.items()}, "seeds": seeds}
        if seeds < FEW:
            return Verdict(INCONCLUSIVE, numbers)
        if all(interval.high <= self.bound for interval in found.values()):
            return Verdict(CONFIRMED, numbers)
        return Verdict(OPPOSITE if any(i.low > self.bound for i in found.values()) else INCONCLUSIVE, numbers)


RULES: dict[str, type[Any]] = {
    "equal-bits": EqualBits,
    "always": Always,
    "gap": Gap,
    "dose-response": DoseResponse,
    "together": Together,
    "order": Order,
    "best": Best,
    "at-most": AtMost,
}
# What parameters that are words may be, by rule and parameter.
WORDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("equal-bits", "expect"): ("equal", "different"),
    ("always", "expect"): ("all", "none"),
    ("gap", "expect"): ("lower", "higher", "none"),
    ("gap", "which"): ("all", "any"),
}
