"""A metric by step: of one seed, and of an arm's seeds together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median


@dataclass(frozen=True)
class Curve:
    """A metric of one run. steps ascend; values are finite: those that were not are counted in `lost`."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    lost: int = 0

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> Curve:
        """Of points in any order; of two at one step the later one holds."""
        by_step = dict(points)
        kept = {step: float(value) for step, value in sorted(by_step.items()) if math.isfinite(value)}
        return cls(tuple(kept), tuple(kept.values()), len(by_step) - len(kept))

    def end(self, share: float = 0.2) -> float:
        """The median of the last values, at least one of them: `share` of all. NaN where there is none."""
        count = max(1, round(len(self.values) * share))
        return median(self.values[-count:]) if self.values else math.nan

    def first_below(self, bound: float) -> float:
        """The first step whose value is below; infinity where none is, NaN where there is no value."""
        if not self.values:
            return math.nan
        return next((float(s) for s, v in zip(self.steps, self.values, strict=True) if v < bound), math.inf)


@dataclass(frozen=True)
class Band:
    """Of several curves: at each step the smallest, the median and the largest value, and of how many."""

    steps: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    middle: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> Band:
        by_step: dict[int, list[float]] = {}
        for curve in curves:
            for step, value in zip(curve.steps, curve.values, strict=True):
                by_step.setdefault(step, []).append(value)
        steps = sorted(by_step)
        return cls(
            tuple(steps),
            tuple(min(by_step[step]) for step in steps),
            tuple(median(by_step[step]) for step in steps),
            tuple(max(by_step[step]) for step in steps),
            tuple(len(by_step[step]) for step in steps),
        )

    def thinned(self, most: int) -> Band:
        """At most that many points, each of neighbouring steps: their smallest, median and largest, so that no spike is
        lost. Itself where it has no more."""
        if len(self.steps) <= most:
            return self
        cuts = [len(self.steps) * i // most for i in range(most + 1)]
        parts = [slice(begin, end) for begin, end in pairwise(cuts)]
        return Band(
            tuple(self.steps[part.stop - 1] for part in parts),
            tuple(min(self.low[part]) for part in parts),
            tuple(median(self.middle[part]) for part in parts),
            tuple(max(self.high[part]) for part in parts),
            tuple(min(self.counts[part]) for part in parts),
        )

    @property
    def wide(self) -> bool:
        """Whether low and high are apart anywhere."""
        return any(low < high for low, high in zip(self.low, self.high, strict=True))


def spread(values: Iterable[float]) -> tuple[float, float, float]:
    """Smallest, median and largest of the finite ones; NaN where there is none. Infinities count only where all are."""
    known = [value for value in values if not math.isnan(value)]
    finite = [value for value in known if math.isfinite(value)] or known
    return (min(finite), median(finite), max(finite)) if finite else (math.nan,) * 3
