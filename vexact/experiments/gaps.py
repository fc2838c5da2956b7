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


def gaps(evidence: Evidence, patterns: str, endpoint: str, against: str = "", nulls: str = "") -> Gaps:
    """Against the exact arm, or the arms that `against` matches. nulls: as of `null_band`.

    Runs without the endpoint are left out; where nothing is left, no gap is found. A step that was not reached has no
    mean, so no gap of it is ever found.
    """
    base = [value for arm in base_of(evidence, against) for value in arm.values(endpoint)]
    samples = {arm.name: arm.values(endpoint) for arm in chosen(evidence, patterns)}
    usable = {name: values for name, values in samples.items() if values and all(map(math.isfinite, values))}
    if not base or not all(map(math.isfinite, base)):
        usable = {}
    return Gaps(
        endpoint,
        {name: difference_interval(values, base) for name, values in usable.items()},
        {name: difference_interval(values, base, of_several(len(usable))) for name, values in usable.items()},
        null_band(evidence, endpoint, against, nulls),
        min([len(base), *map(len, usable.values())]) if usable else 0,
    )


def null_band(evidence: Evidence, endpoint: str, against: str = "", nulls: str = "") -> tuple[float, float]:
    """The smallest and the greatest gap of a null arm to the exact one, 0 among them.

    nulls: arms that differ from those that `against` matches by chance alone, whatever their role: an objective or a
    coding of rewards with another exact arm has null arms of its own. Without it, those of the study and its exact arm.
    """
    base = [value for arm in base_of(evidence, against if nulls else "") for value in arm.values(endpoint)]
    by_chance = [arm.values(endpoint) for arm in (chosen(evidence, nulls) if nulls else evidence.of_role("null"))]
    found = [mean(values) - mean(base) for values in by_chance if values and base]
    found = [gap for gap in found if math.isfinite(gap)]
    return min([0.0, *found]), max([0.0, *found])


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


def base_of(evidence: Evidence, against: str) -> list[ArmEvidence]:
    """What gaps are measured from: the arms that match, or the exact one."""
    return chosen(evidence, against) if against else evidence.of_role("exact")
