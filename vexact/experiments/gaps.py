"""How far arms are from the exact one, and how far chance alone takes them: what most rules of claims rest on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from vexact.experiments.evidence import ArmEvidence, Evidence
from vexact.experiments.statistics import Interval, difference_interval, mean, of_several
from vexact.experiments.study import split


@dataclass(frozen=True)
class Gaps:
    """Of an endpoint. of: arm → mean(arm) − mean(exact); any_of: the same with wider intervals, for what one arm of
    several is said to do; band: from the smallest to the greatest gap of the null arms, 0 among them; seeds: of the arm
    that has fewest, the exact one included."""

    endpoint: str
    of: Mapping[str, Interval]
    any_of: Mapping[str, Interval]
    band: tuple[float, float]
    seeds: int

    def sign(self, gap: Interval) -> int:
        """−1 or 1 where a gap counts, else 0."""
        low, high = self.band
        return -1 if gap.high < low else 1 if gap.low > high else 0

    def numbers(self) -> dict[str, Any]:
        return {
            "endpoint": self.endpoint,
            "gaps": {name: {**gap.numbers(), "counts": self.sign(gap)} for name, gap in self.of.items()},
            "null_band": list(self.band),
            "seeds": self.seeds,
        }


def gaps(evidence: Evidence, patterns: str, endpoint: str, against: str = "") -> Gaps:
    """Against the exact arm that the arms stand beside, or the arms that `against` matches.

    Runs without the endpoint are left out; where nothing is left, no gap is found. A step that was not reached has no
    mean, so no gap of it is ever found.
    """
    base = base_of(evidence, patterns, endpoint, against)
    samples = {arm.name: arm.values(endpoint) for arm in chosen(evidence, patterns)}
    usable = {name: values for name, values in samples.items() if values and all(map(math.isfinite, values))}
    if not base or not all(map(math.isfinite, base)):
        usable = {}
    return Gaps(
        endpoint,
        {name: difference_interval(values, base) for name, values in usable.items()},
        {name: difference_interval(values, base, of_several(len(usable))) for name, values in usable.items()},
        null_band(evidence, patterns, endpoint, against),
        min([len(base), *map(len, usable.values())]) if usable else 0,
    )


def null_band(evidence: Evidence, patterns: str, endpoint: str, against: str = "") -> tuple[float, float]:
    """The smallest and the greatest gap of a null arm to its own exact one, 0 among them: of the exact arm that the
    arms stand beside, and of that beside what `against` matches."""
    found = []
    for name in references(evidence, f"{patterns}, {against}"):
        exact = [value for arm in evidence.beside(name, "exact") for value in arm.values(endpoint)]
        nulls = [arm.values(endpoint) for arm in evidence.beside(name, "null")]
        found += [mean(values) - mean(exact) for values in nulls if values and exact]
    found = [gap for gap in found if math.isfinite(gap)]
    return min([0.0, *found]), max([0.0, *found])


def references(evidence: Evidence, patterns: str) -> list[str]:
    """The exact arms that the arms stand beside, by name: of a rule that compares them it is one."""
    return list(dict.fromkeys(evidence.reference(arm) for arm in chosen(evidence, patterns)))


def base_of(evidence: Evidence, patterns: str, endpoint: str, against: str = "") -> list[float]:
    """The values that gaps are measured from: of the arms that `against` matches, or of the exact one."""
    if against:
        return [value for arm in chosen(evidence, against) for value in arm.values(endpoint)]
    exact = [arm for name in references(evidence, patterns)[:1] for arm in evidence.beside(name, "exact")]
    return [value for arm in exact for value in arm.values(endpoint)]


def chosen(evidence: Evidence, patterns: str) -> list[ArmEvidence]:
    """The arms with runs whose names match, in the order of the patterns."""
    found: list[ArmEvidence] = []
    for pattern in split(patterns):
        found += [arm for arm in evidence.arms.values() if fnmatchcase(arm.name, pattern) and arm not in found]
    return [arm for arm in found if arm.seeds]


def by_dose(evidence: Evidence, patterns: str, key: str) -> dict[float, ArmEvidence]:
    """The arms that have that override, a number above 0, by it."""
    return {
        float(arm.overrides[key]): arm for arm in chosen(evidence, patterns) if float(arm.overrides.get(key) or 0.0) > 0
    }


def finite(value: float) -> float | None:
    """As JSON has it: null for what is not finite."""
    return value if math.isfinite(value) else None
