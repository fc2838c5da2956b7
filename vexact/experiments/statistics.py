"""The few statistics that claims are decided with. Float64 on the host, sums correctly rounded.

Arms share nothing once they have parted, so none of this pairs a seed of one arm with the same seed of another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
RESAMPLES = 4000
SEED = 20260514  # of the bootstrap: the same runs give the same intervals
COVERED = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and what covers it 19 times in 20, by resampling seeds."""

    value: float
    low: float
    high: float

    def numbers(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


def mean(values: Sequence[float]) -> float:
    """NaN of none."""
    return math.fsum(values) / len(values) if values else math.nan


def median(values: Sequence[float]) -> float:
    """Of values that may be infinite; NaN of none. Between two infinite ones it is infinite."""
    if not values:
        return math.nan
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return low if low == high else (low + high) / 2.0


def of_several(count: int) -> float:
    """What each of so many intervals must cover, that in 19 cases of 20 none of them misses: Bonferroni's."""
    return 1.0 - (1.0 - COVERED) / max(1, count)


def ratio_interval(values: Sequence[float], unit: Sequence[float], covered: float = COVERED) -> Interval:
    """mean(values) / mean(unit), unit not 0, of two independent samples: percentile bootstrap, each resampled on its
    own. A unit of one value is a number that is known."""
    generator = np.random.default_rng(SEED)
    return _interval(mean(values) / mean(unit), _means(values, generator) / _means(unit, generator), covered)


def difference_interval(a: Sequence[float], b: Sequence[float], covered: float = COVERED) -> Interval:
    """mean(a) − mean(b) of two independent samples: percentile bootstrap, each resampled on its own."""
    generator = np.random.default_rng(SEED)
    return _interval(mean(a) - mean(b), _means(a, generator) - _means(b, generator), covered)


def lead_interval(best: Sequence[float], others: Sequence[Sequence[float]], base: Sequence[float]) -> Interval:
    """How much nearer to mean(base) mean(best) is than the nearest of the others' means: all of them resampled, so that
    a sample which is the nearest by luck is not always the one. Negative where another one is nearer."""
    generator = np.random.default_rng(SEED)
    centre, own = _means(base, generator), _means(best, generator)
    away = np.stack([np.abs(_means(other, generator) - centre) for other in others])
    value = min(abs(mean(other) - mean(base)) for other in others) - abs(mean(best) - mean(base))
    return _interval(value, away.min(axis=0) - np.abs(own - centre))


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's ρ, ties at their mean rank; NaN where either is constant or there are fewer than two."""
    if len(x) < 2:
        return math.nan
    a, b = ranks(x), ranks(y)
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / size if size else math.nan


def rank_correlation_within(groups: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """Spearman's ρ of pairs (x, y) inside groups: ranks and their means are each group's own, so what sets groups apart
    adds nothing. NaN where either is constant in every group."""
    centred = [(ranks(x) - (len(x) + 1) / 2.0, ranks(y) - (len(y) + 1) / 2.0) for x, y in groups if len(x)]
    xx, yy, xy = (math.fsum(float((p * q).sum()) for p, q in pairs) for pairs in (
        [(a, a) for a, _ in centred], [(b, b) for _, b in centred], centred))  # fmt: skip
    return xy / math.sqrt(xx * yy) if xx and yy else math.nan


def rank_correlation_interval(groups: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Interval:
    """Spearman's ρ inside groups, pairs resampled in each; resamples in which either is constant are left out. NaN
    bounds where all are."""
    generator = np.random.default_rng(SEED)
    sides = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in groups]
    found = []
    for _ in range(RESAMPLES):
        rows = [generator.integers(0, len(x), len(x)) for x, _ in sides]
        drawn = [(x[row].tolist(), y[row].tolist()) for (x, y), row in zip(sides, rows, strict=True)]
        found.append(rank_correlation_within(drawn))
    return _interval(rank_correlation_within(groups), np.asarray([rho for rho in found if not math.isnan(rho)]))


def sign_test(right: int, wrong: int) -> float:
    """The chance of at least so many right ones of all, were right and wrong equally likely: one-sided, exact."""
    count = right + wrong
    return sum(math.comb(count, k) for k in range(right, count + 1)) / 2.0**count


def fisher_test(a: int, b: int, c: int, d: int) -> float:
    """The chance of at least `a` in the first cell of a two by two table [[a, b], [c, d]] with those margins, were rows
    and columns independent: Fisher's exact test, one-sided."""
    rows, column, count = a + b, a + c, a + b + c + d
    cells = range(a, min(rows, column) + 1)
    return sum(math.comb(column, k) * math.comb(count - column, rows - k) for k in cells) / math.comb(count, rows)


def ranks(values: Sequence[float]) -> Floats:
    """1 … n, equal values at the mean of theirs; infinite ones are the last."""
    x = np.asarray(values, np.float64)
    return np.asarray([(x < v).sum() + ((x == v).sum() + 1) / 2.0 for v in x], np.float64)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the least-squares line of y on x; NaN where x is constant."""
    mx, my = mean(x), mean(y)
    spread = math.fsum((a - mx) ** 2 for a in x)
    return math.fsum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / spread if spread else math.nan


def _means(values: Sequence[float], generator: np.random.Generator) -> Floats:
    x = np.asarray(values, np.float64)
    found: Floats = x[generator.integers(0, len(x), (RESAMPLES, len(x)))].mean(axis=1)
    return found


def _interval(value: float, resampled: Floats, covered: float = COVERED) -> Interval:
    if not len(resampled):
        return Interval(value, math.nan, math.nan)
    edge = (1.0 - covered) / 2.0
    low, high = np.quantile(resampled, [edge, 1.0 - edge])
    return Interval(value, float(low), float(high))
