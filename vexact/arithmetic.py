"""Float64 arithmetic of the host whose bits are the same on every machine: sums rounded once, functions of our own.

Nothing here is on the way to a weight. numpy's exponential and logarithm, and the order of its sums, are not the same
everywhere; its elementwise + − × ÷ and sorting are.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LN2 = math.log(2.0)
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # their sum is ln 2 to 86 bits
TERMS = 15
ODD_TERMS = 11


def total(values: Floats) -> float:
    """The exact sum, rounded once."""
    return math.fsum(values.tolist())


def mean(values: Floats) -> float:
    return total(values) / len(values)


def variance(values: Floats) -> float:
    """Of the values themselves: divided by their number."""
    away = values - mean(values)
    return mean(away * away)


def at_rank(ordered: Floats, share: float) -> float:
    """The smallest of the values, ordered upwards, that at least this share of them does not exceed: one of them."""
    return float(ordered[min(max(math.ceil(share * len(ordered)) - 1, 0), len(ordered) - 1)])


def median_deviation(values: Floats) -> float:
    """The median distance from the median, by rank."""
    middle = at_rank(np.sort(values), 0.5)
    return at_rank(np.sort(np.abs(values - middle)), 0.5)


def exp(x: Floats) -> Floats:
    """e^x within 2 ulps for |x| below 700; −inf gives 0. The C library's is not the same on every machine."""
    halvings = np.rint(np.clip(x, -1000.0, 1000.0) / LN2)
    rest = (np.clip(x, -1000.0, 1000.0) - halvings * LN2_HIGH) - halvings * LN2_LOW
    with np.errstate(over="ignore", under="ignore"):
        return np.ldexp(1.0 + _series(rest), halvings.astype(np.int64))


def expm1(x: Floats) -> Floats:
    """e^x − 1, without the loss of digits near 0."""
    small = np.abs(x) < LN2 / 2.0
    return np.where(small, _series(np.where(small, x, 0.0)), exp(x) - 1.0)


def log(x: Floats) -> Floats:
    """ln x within 2 ulps for normal x above 0; 0 gives −inf."""
    part, power = np.frexp(np.where(x > 0.0, x, 1.0))
    low = part < math.sqrt(0.5)
    part, power = np.where(low, 2.0 * part, part), np.where(low, power - 1, power).astype(np.float64)
    return np.where(x > 0.0, power * LN2_HIGH + (_area((part - 1.0) / (part + 1.0)) + power * LN2_LOW), -math.inf)


def log1p(x: Floats) -> Floats:
    """ln(1 + x), without the loss of digits near 0."""
    small = np.abs(x) < 0.25
    near = np.where(small, x, 0.0)
    return np.where(small, _area(near / (2.0 + near)), log(1.0 + x))


def log_complement(logp: Floats) -> Floats:
    """ln(1 − p) of ln p at most 0, whichever of the two is small; ln p = 0 gives −inf."""
    near_one = logp > -LN2
    safe = np.where(near_one, logp, -LN2)
    return np.where(near_one, log(-expm1(safe)), log1p(-exp(np.where(near_one, -1.0, logp))))


def _series(x: Floats) -> Floats:
    """e^x − 1 for |x| up to ln 2 / 2: its power series, the smallest terms first."""
    total = np.zeros_like(x)
    for n in range(TERMS, 0, -1):
        total = (1.0 + total) * x / n
    return total


def _area(s: Floats) -> Floats:
    """ln((1 + s) / (1 − s)) for |s| up to 0.172: its power series, the smallest terms first."""
    square, rest = s * s, np.zeros_like(s)
    for n in range(ODD_TERMS, 0, -1):
        rest = square * (1.0 / (2 * n + 1) + rest)
    return 2.0 * s + 2.0 * s * rest
