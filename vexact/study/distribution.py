"""What a mismatch looks like: size, tail, dependence on the token's probability, on position and on length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vexact.arithmetic import Floats, at_rank, exp, expm1, mean, median_deviation, total, variance
from vexact.study.metrics import Compared, Pairs, measure_pairs
from vexact.study.odds import log_odds

PROBABILITIES = (0.0, 0.5, 0.9, 0.99, 0.999)  # lower edges of bins of the trainer's probability
POSITIONS = (0, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
TOP = 0.01  # the tail: this share of the tokens, by their part of K3


@dataclass(frozen=True)
class Bin:
    """Tokens of one bin, low ≤ value < high. share: of all K3. log_odds_*: of those with a probability below 1 only.

    mean: of Δ, with its sign. Values of a bin without tokens are 0; such bins are left out.
    """

    low: float
    high: float
    tokens: int
    differing: int
    mean: float
    abs_mean: float
    abs_max: float
    k3: float
    share: float
    log_odds_mad: float
    log_odds_p05: float
    log_odds_p95: float


@dataclass(frozen=True)
class Sequences:
    """ΣΔ of each sequence, in nats. per_1000: what 1000 tokens add, by a line through 0 (least squares).

    slope: the same by a line with an intercept, and its standard error; None where all lengths are equal or fewer than
    three sequences were compared.
    """

    number: int
    shortest: int
    longest: int
    mean: float
    std: float
    min: float
    max: float
    per_1000: float
    slope_per_1000: float | None
    slope_error: float | None


@dataclass(frozen=True)
class Distribution:
    """measures: `measure_pairs`. tail_share: of K3, what its top 1 % of tokens carry; their number: tail_tokens."""

    measures: dict[str, float]
    by_probability: tuple[Bin, ...]
    by_position: tuple[Bin, ...]
    sequences: Sequences
    tail_tokens: int
    tail_share: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def describe(pairs: Pairs) -> Distribution:
    """pairs: of each rollout, float32 [tokens]: the sampler's, the trainer's; none empty, at least one.

    Raises ValueError where nothing is given.
    """
    if not pairs:
        raise ValueError("nothing to describe: no pair of log-probabilities")
    found = Compared.of(pairs)
    parts = expm1(found.delta) - found.delta
    probability = exp(found.trainer)
    position = np.concatenate([np.arange(length, dtype=np.float64) for length in found.lengths])
    tail = math.ceil(TOP * len(parts))
    return Distribution(
        measures=measure_pairs(pairs),
        by_probability=tuple(_bins(found, parts, probability, PROBABILITIES)),
        by_position=tuple(_bins(found, parts, position, POSITIONS)),
        sequences=_sequences(found),
        tail_tokens=tail,
        tail_share=tail_share(parts),
    )


def tail_share(parts: Floats) -> float:
    """Of the sum of the parts of K3, what the top 1 % of the tokens carry; 0 where there is nothing to share."""
    whole = total(parts)
    return total(np.sort(parts)[len(parts) - math.ceil(TOP * len(parts)) :]) / whole if whole > 0.0 else 0.0


def _bins(found: Compared, parts: Floats, value: Floats, edges: Sequence[float]) -> Iterator[Bin]:
    whole = total(parts)
    for low, high in pairwise((*edges, math.inf)):
        where = (value >= low) & (value < high)
        if where.any():
            yield _bin(found, parts, where, (low, high), whole)


def _bin(found: Compared, parts: Floats, where: NDArray[np.bool_], edges: tuple[float, float], whole: float) -> Bin:
    delta, part = found.delta[where], parts[where]
    moved = np.sort(log_odds(found.trainer[where], found.sampler[where]))
    return Bin(
        low=edges[0],
        high=edges[1],
        tokens=len(delta),
        differing=int(found.differs[where].sum()),
        mean=0.0 + mean(delta),
        abs_mean=mean(np.abs(delta)),
        abs_max=float(np.abs(delta).max()),
        k3=mean(part),
        share=total(part) / whole if whole > 0.0 else 0.0,
        log_odds_mad=median_deviation(moved) if len(moved) else 0.0,
        log_odds_p05=at_rank(moved, 0.05) if len(moved) else 0.0,
        log_odds_p95=at_rank(moved, 0.95) if len(moved) else 0.0,
    )


def _sequences(found: Compared) -> Sequences:
    sums, lengths = found.sums(found.delta), np.array(found.lengths, dtype=np.float64)
    slope, error = _slope(lengths, sums)
    return Sequences(
        number=len(sums),
        shortest=min(found.lengths),
        longest=max(found.lengths),
        mean=0.0 + mean(sums),
        std=math.sqrt(variance(sums)),
        min=float(sums.min()),
        max=float(sums.max()),
        per_1000=1000.0 * total(lengths * sums) / total(lengths * lengths),
        slope_per_1000=slope,
        slope_error=error,
    )


def _slope(x: Floats, y: Floats) -> tuple[float | None, float | None]:
    """Of the line of least squares, per 1000 of x, and its standard error."""
    away = x - mean(x)
    spread = total(away * away)
    if len(x) < 3 or spread == 0.0:
        return None, None
    slope = total(away * y) / spread
    rest = (y - mean(y)) - slope * away
    return 1000.0 * slope, 1000.0 * math.sqrt(total(rest * rest) / (len(x) - 2) / spread)
