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
RESAMPLES = 2000
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


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean over seeds: percentile bootstrap."""
    return _interval(mean(values), _means(values, np.random.default_rng(SEED)))


def difference_interval(a: Sequence[float], b: Sequence[float]) -> Interval:
    """mean(a) − mean(b) of two independent samples: percentile bootstrap, each resampled on its own."""
    generator = np.random.default_rng(SEED)
    return _interval(mean(a) - mean(b), _means(a, generator) - _means(b, generator))


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's ρ, ties at their mean rank; NaN where either is constant or there are fewer than two."""
    if len(x) < 2:
        return math.nan
    a, b = ranks(x), ranks(y)
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / size if size else math.nan


def rank_correlation_interval(x: Sequence[float], y: Sequence[float]) -> Interval:
    """Spearman's ρ, pairs resampled; resamples in which either is constant are left out. NaN bounds where all are."""
    generator = np.random.default_rng(SEED)
    chosen = generator.integers(0, len(x), (RESAMPLES, len(x)))
    left, right = np.asarray(x, np.float64), np.asarray(y, np.float64)
    found = [rank_correlation(left[row].tolist(), right[row].tolist()) for row in chosen]
    return _interval(rank_correlation(x, y), np.asarray([rho for rho in found if not math.isnan(rho)]))


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


def _interval(value: float, resampled: Floats) -> Interval:
    if not len(resampled):
        return Interval(value, math.nan, math.nan)
    edge = (1.0 - COVERED) / 2.0
    low, high = np.quantile(resampled, [edge, 1.0 - edge])
    return Interval(value, float(low), float(high))
