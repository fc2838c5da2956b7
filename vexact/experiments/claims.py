"""The rules that decide claims, fixed before any run: frozen dataclasses whose fields are what a study file may set.
Here those about sizes; `bits.py` and `steps.py` have the others.

A verdict is `confirmed here`, `opposite`, `inconclusive` or `not testable`. Three things hold for every rule about
sizes. An arm's gap is mean(arm) − mean(exact); seeds are independent once arms have parted, so nothing is paired. A gap
*counts* where its bootstrap interval (19 in 20) lies outside the null band: from the smallest to the greatest gap
of the null arms, 0 among them. With fewer than FEW = 8 seeds there is no verdict but `inconclusive`, with the numbers.

What one arm of k is said to do, as with `which: any`, has k chances to come out by luck: there intervals cover
1 − 0.05/k (Bonferroni). A claim that all of k arms must bear out needs no such thing.

Rules about bits need one run: equality is not a matter of luck. A new rule is a dataclass, a line in RULES and a test
that gives each of its verdicts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vexact.experiments.bits import Always, EqualBits
from vexact.experiments.evidence import Evidence
from vexact.experiments.gaps import base_of, by_dose, chosen, finite, gaps, null_band
from vexact.experiments.statistics import (
    difference_interval,
    lead_interval,
    mean,
    of_several,
    rank_correlation,
    ratio_interval,
)
from vexact.experiments.steps import Leads, Matched, Rarer, Together
from vexact.experiments.verdict import BAND, CONFIRMED, FEW, INCONCLUSIVE, NOT_TESTABLE, OPPOSITE, SUCCESS, Verdict


@dataclass(frozen=True)
class Gap:
    """Whether arms differ from the exact one: `expect` lower, higher or none. which: `all` arms, or `any` of them."""

    arms: str
    endpoint: str = SUCCESS
    expect: str = "lower"
    which: str = "all"
    margin: float = 0.05  # a gap whose interval lies inside ± margin is none; chance that is wider shows nothing
    against: str = ""  # by default the exact arm that they stand beside

    def text(self) -> str:
        if self.expect == "none":
            return (
                f"The 95 % bootstrap interval of each gap of {self.endpoint} lies within ± {self.margin:g} (opposite: "
                f"one counts, at 1 − 0.05/k of k arms). {BAND}"
            )
        extra = "" if self.which == "all" else " Of k arms intervals cover 1 − 0.05/k."
        return f"{self.which} of the gaps of {self.endpoint} count, and are {self.expect}. {BAND}{extra}"

    def judge(self, evidence: Evidence) -> Verdict:
        found = gaps(evidence, self.arms, self.endpoint, self.against)
        if not found.of:
            return Verdict(NOT_TESTABLE, found.numbers())
        if found.seeds < FEW:
            return Verdict(INCONCLUSIVE, found.numbers())
        surely = [found.sign(gap) for gap in found.any_of.values()]
        if self.expect == "none":
            near = all(-self.margin <= gap.low and gap.high <= self.margin for gap in found.of.values())
            return Verdict(CONFIRMED if near else OPPOSITE if any(surely) else INCONCLUSIVE, found.numbers())
        wanted = -1 if self.expect == "lower" else 1
        right = [found.sign(gap) == wanted for gap in found.of.values()]
        if all(right) if self.which == "all" else wanted in surely:
            return Verdict(CONFIRMED, found.numbers())
        return Verdict(OPPOSITE if -wanted in surely and not any(right) else INCONCLUSIVE, found.numbers())


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
        low, high = null_band(evidence, self.arms, self.endpoint)
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
class Order:
    """Whether an endpoint's means come in the order in which arms are named, the smallest first."""

    arms: str
    endpoint: str

    def text(self) -> str:
        return (
            f"mean {self.endpoint} rises from each of the arms, in the order named, to the next, by the 95 % bootstrap "
            "interval of the difference (opposite: one of k falls, at 1 − 0.05/k)."
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
        surely = [difference_interval(b, a, of_several(len(rises))) for a, b in pairwise(samples)]
        return Verdict(OPPOSITE if any(rise.high < 0.0 for rise in surely) else INCONCLUSIVE, numbers)


@dataclass(frozen=True)
class Best:
    """Whether one remedy comes nearest to the exact arm, and mends anything at all. untreated: the arm without one."""

    arms: str
    best: str
    untreated: str
    endpoint: str = SUCCESS

    def text(self) -> str:
        return (
            f"Of all arms {self.best} has the smallest |gap| of {self.endpoint}, nearer than the next one's by more "
            f"than null arms are off, and it is above {self.untreated}, both by 95 % bootstrap intervals (opposite: it "
            f"is below it so, or another one's |gap| is smaller by as much). Not testable where {self.untreated} has "
            f"no gap that counts. {BAND}"
        )

    def judge(self, evidence: Evidence) -> Verdict:
        found = gaps(evidence, f"{self.arms}, {self.best}", self.endpoint)
        harm = gaps(evidence, self.untreated, self.endpoint)
        others = [evidence.arms[name].values(self.endpoint) for name in found.of if name != self.best]
        if self.best not in found.of or not harm.of or not others:
            return Verdict(NOT_TESTABLE, found.numbers())
        best = evidence.arms[self.best].values(self.endpoint)
        base = base_of(evidence, self.best, self.endpoint)
        mended = difference_interval(best, chosen(evidence, self.untreated)[0].values(self.endpoint))
        lead = lead_interval(best, others, base)
        numbers = {
            **found.numbers(),
            "untreated": harm.numbers()["gaps"],
            "ranking": sorted(found.of, key=lambda name: abs(found.of[name].value)),
            "mended": mended.numbers(),
            "lead": lead.numbers(),
        }
        if min(found.seeds, harm.seeds) < FEW:
            return Verdict(INCONCLUSIVE, numbers)
        if not any(harm.sign(gap) for gap in harm.of.values()):
            return Verdict(NOT_TESTABLE, numbers)
        chance = max(map(abs, found.band))
        if lead.low > chance and mended.low > 0.0:
            return Verdict(CONFIRMED, numbers)
        return Verdict(OPPOSITE if mended.high < 0.0 or lead.high < -chance else INCONCLUSIVE, numbers)


@dataclass(frozen=True)
class Within:
    """Whether an endpoint's mean lies between two bounds. unit: arms in whose mean of it that mean is counted, all of
    whose runs must be above 0; their seeds are then resampled too."""

    arms: str
    endpoint: str
    low: float = -math.inf
    high: float = math.inf
    unit: str = ""

    def text(self) -> str:
        limits = {"at least": self.low, "at most": self.high}
        bounds = " and ".join(f"{word} {bound:g}" for word, bound in limits.items() if math.isfinite(bound))
        counted = f" in units of that of {self.unit}" if self.unit else ""
        return f"mean {self.endpoint} of each arm{counted} is {bounds}, by its 95 % bootstrap interval."

    def fault(self) -> str:
        """What cannot be meant, empty where nothing is."""
        if math.isinf(self.low) and math.isinf(self.high):
            return "needs low, high or both"
        return f"low = {self.low:g} is above high = {self.high:g}" if self.low > self.high else ""

    def judge(self, evidence: Evidence) -> Verdict:
        unit = [value for arm in chosen(evidence, self.unit) for value in arm.values(self.endpoint)]
        unit = unit if self.unit else [1.0]
        samples = {arm.name: arm.values(self.endpoint) for arm in chosen(evidence, self.arms)}
        samples = {name: values for name, values in samples.items() if values}
        known = all(math.isfinite(value) for values in samples.values() for value in values)
        if not samples or not known or not unit or not all(0.0 < value < math.inf for value in unit):
            return Verdict(NOT_TESTABLE, {})
        found = {name: ratio_interval(values, unit) for name, values in samples.items()}
        seeds = min(map(len, [*samples.values(), *([unit] if self.unit else [])]))
        numbers = {"means": {name: interval.numbers() for name, interval in found.items()}, "seeds": seeds}
        if seeds < FEW:
            return Verdict(INCONCLUSIVE, numbers)
        if all(self.low <= interval.low and interval.high <= self.high for interval in found.values()):
            return Verdict(CONFIRMED, numbers)
        surely = [ratio_interval(values, unit, of_several(len(found))) for values in samples.values()]
        outside = any(interval.low > self.high or interval.high < self.low for interval in surely)
        return Verdict(OPPOSITE if outside else INCONCLUSIVE, numbers)


RULES: dict[str, type[Any]] = {
    "equal-bits": EqualBits,
    "always": Always,
    "gap": Gap,
    "dose-response": DoseResponse,
    "together": Together,
    "leads": Leads,
    "matched": Matched,
    "order": Order,
    "best": Best,
    "within": Within,
    "rarer": Rarer,
}
# What parameters that are words may be, by rule and parameter.
WORDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("equal-bits", "expect"): ("equal", "different"),
    ("always", "expect"): ("all", "none"),
    ("gap", "expect"): ("lower", "higher", "none"),
    ("gap", "which"): ("all", "any"),
}
