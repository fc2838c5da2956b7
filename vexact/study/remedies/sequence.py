"""Remedies of whole sequences: one value of a sequence's ratios decides, or weighs, all of its tokens.

With Δ_t the log-ratio of its T live tokens, by `ratio` one of `vexact.model.remedy.Ratios` (`correction`, `current` or
`drift`): `product` exp(ΣΔ), whose spread grows with length like √T; `geometric`
exp(ΣΔ/T), verl's K1, whose spread shrinks like 1/√T; `k2` the mean of ½Δ² and `k3` that of e^Δ − 1 − Δ. No fixed bound
on the first two carries over to another length. `Bounds` can therefore be given as κ, in units of the root mean square
RMS of a token's Δ as it was calibrated:

    product  |ΣΔ| ≤ κ·√T·RMS          geometric  |ΣΔ/T| ≤ κ·RMS/√T

which for independent tokens are the same bound (our reading of what a length-aware bound is; papers give fixed ones).
Scaled bounds are compared in log space; a fixed one with exp of a sum, which is infinite, and above every bound, where
float32 ends. Weights are clamped at e^88.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vexact.model.remedy import Plain, Ratio, Ratios, Weighted
from vexact.study.remedies.token import LARGEST, estimate

Level = Literal["product", "geometric", "k2", "k3"]


@dataclass(frozen=True)
class Bounds:
    """Where a sequence's value may lie. kappa above 0: the scaled bounds of the module, and low and high are unused."""

    low: float = 0.0
    high: float = 2.0
    kappa: float = 0.0
    rms: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high:
            raise ValueError(f"a sequence's bounds need 0 ≤ low ≤ high, not {self.low} and {self.high}")
        if self.kappa and self.rms <= 0.0:
            raise ValueError(f"bounds of kappa need the rms of a token's log-ratio, above 0, not {self.rms}")

    def width(self, level: Level, counts: Tensor) -> Tensor:
        """What |ΣΔ| (product) or |ΣΔ/T| (geometric) may be with kappa: float32 [sequences]. counts: their T."""
        root = torch.sqrt(counts.clamp(min=1.0))  # correctly rounded, as products and quotients are
        return root * (self.kappa * self.rms) if level == "product" else (self.kappa * self.rms) / root


class _OfSequences(Plain):
    def __init__(self, bounds: Bounds, level: Level, ratio: Ratio) -> None:
        self.bounds, self.level = bounds, level
        self.ratio, self.every_update = ratio, ratio != "correction"

    def log(self, ratios: Ratios) -> Tensor:
        return ratios.of(self.ratio)

    def value(self, ratios: Ratios, mask: Tensor) -> Tensor:
        """ΣΔ or ΣΔ/T of each sequence, float32 [sequences]."""
        log = self.log(ratios)
        return ratios.sums(log, mask) if self.level == "product" else ratios.means(log, mask)


class SequenceTIS(_OfSequences):
    """Sequence truncated importance sampling: every token of a sequence has the weight min(Πr, C), or that of the
    geometric mean (verl's `rollout_is: sequence`, whose C is 2; VCPO, arXiv 2602.17616, takes 8; TRL's
    `sequence_truncate`).

    Without a cap the product is the one weight whose mean is right for whole sequences. It has no lower bound.
    """

    def __init__(
        self,
        cap: float = 2.0,
        level: Literal["product", "geometric"] = "product",
        ratio: Ratio = "correction",
        kappa: float = 0.0,
        rms: float = 0.0,
    ) -> None:
        super().__init__(Bounds(0.0, cap, kappa, rms), level, ratio)
        if cap <= 0.0:
            raise ValueError(f"sequence TIS needs a cap above 0, not {cap}")

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        value = self.value(ratios, mask).clamp(max=LARGEST)
        if self.bounds.kappa:
            weight = ratios.kernels.exp(torch.minimum(value, self.bounds.width(self.level, ratios.counts(mask))))
        else:
            weight = ratios.kernels.exp(value).clamp(max=self.bounds.high)
        return Weighted(ratios.spread(weight), mask)


class SequenceRejection(_OfSequences):
    """Keeps a sequence where low ≤ value ≤ high and rejects it whole elsewhere; weights are 1.

    verl's `seq_sum_k1` and `seq_mean_k1` are `product` and `geometric` with bounds on the inverse, and `seq_mean_k2`
    (2 to 2.5 are usual), `seq_mean_k3` (0.01; 0.001 to 0.1) are `k2` and `k3`, which have no lower bound there.
    NeMo-RL's geometric band is 0.999 to 1.002. A value that is not a number is kept, so that it is seen.
    """

    def __init__(
        self,
        low: float,
        high: float,
        level: Level = "product",
        ratio: Ratio = "correction",
        kappa: float = 0.0,
        rms: float = 0.0,
    ) -> None:
        if not 0.0 <= low <= high:
            raise ValueError(f"sequence rejection needs 0 ≤ low ≤ high, not {low} and {high}")
        if kappa and level in ("k2", "k3"):
            raise ValueError(f"sequence rejection by {level} has no bounds of kappa")
        super().__init__(Bounds(low, high, kappa, rms), level, ratio)
        self.low, self.high = low, high

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        return Weighted(torch.ones_like(ratios.correction), mask & ratios.spread(self.kept(ratios, mask)))

    def kept(self, ratios: Ratios, mask: Tensor) -> Tensor:
        """Which sequences are kept: bool [sequences]."""
        if self.level in ("k2", "k3"):
            value = ratios.means(estimate(self.level, self.log(ratios), ratios), mask)
            return ~((value < self.low) | (value > self.high))
        value = self.value(ratios, mask)
        if self.bounds.kappa:
            return ~(value.abs() > self.bounds.width(self.level, ratios.counts(mask)))
        ratio = ratios.kernels.exp(value)
        return ~((ratio < self.low) | (ratio > self.high))


class SequenceMask(SequenceRejection):
    """TRL's `sequence_mask`, its default with the bounds 0 and 3: a sequence outside is rejected whole, and inside
    every token has the weight Πr (or that of the geometric mean). verl calls the same a masked importance sampling.

    TRL multiplies the loss of what it masks by 0 and keeps it in the denominator; here it leaves the divisor.
    """

    def __init__(
        self,
        low: float = 0.0,
        high: float = 3.0,
        level: Literal["product", "geometric"] = "product",
        ratio: Ratio = "correction",
        kappa: float = 0.0,
        rms: float = 0.0,
    ) -> None:
        super().__init__(low, high, level, ratio, kappa, rms)

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        kept = self.kept(ratios, mask)
        weight = ratios.kernels.exp(self.value(ratios, mask).clamp(max=LARGEST))
        return Weighted(ratios.spread(torch.where(kept, weight, 0.0)), mask & ratios.spread(kept))


class NegativesMask(Plain):
    """Leaves a sequence out where A < 0 and mean_t(log q − log p_θ) > δ: off-policy sequence masking of DeepSeek-V3.2
    (arXiv 2512.02556, Eq. 9), with π_old the *sampler's* recorded probabilities. Weights are 1.

    Its δ is not published; TRL suggests 0.5, slime and Miles 1e-4. The mean is over the live tokens. A sequence has one
    advantage; where tokens differ, that of its first one decides. ratio: `current` is the paper's.
    """

    def __init__(self, delta: float, ratio: Ratio = "current") -> None:
        if delta <= 0.0 or math.isnan(delta):
            raise ValueError(f"the mask of negatives needs a delta above 0, not {delta}")
        self.delta, self.ratio, self.every_update = delta, ratio, ratio != "correction"

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        log = ratios.of(self.ratio)
        negative = torch.stack([advantages[cut][0] < 0 for cut in ratios.cuts])
        dropped = negative & (ratios.means(log, mask) < -self.delta)
        return Weighted(torch.ones_like(log), mask & ~ratios.spread(dropped))
