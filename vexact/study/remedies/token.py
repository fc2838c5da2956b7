"""Remedies of single tokens: weights and masks from the ratio r = p/q of the sampled token.

r is the `ratio` that a remedy is given: `correction` π_old/q, `current` p_θ/q or `drift` p_θ/π_old, the last two anew
before each update (`vexact.model.remedy.Ratios` has their names in the literature). Every ratio is exp of a float32
log-ratio, so it is 0 or infinite where float32 ends; what is not capped is clamped at e^±88, the range of float32
itself, so that weights are finite. What a mask rejects leaves the divisor of the loss too: that is this engine's rule
for everything it rejects, and differs from projects that keep such tokens in the denominator.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vexact.model.remedy import Plain, Ratio, Ratios, Weighted

Criterion = Literal["ratio", "k2", "k3"]
Divergence = Literal["tv", "kl"]
Side = Literal["trainer", "sampler"]
LARGEST = 88.0  # log-ratio of a weight that nothing else bounds: e^88 is 1.65e38
FINITE = 3.4e38  # just below the largest float32


class _OfTokens(Plain):
    def __init__(self, ratio: Ratio) -> None:
        self.ratio, self.every_update = ratio, ratio != "correction"

    def log(self, ratios: Ratios) -> Tensor:
        return ratios.of(self.ratio)


class TokenTIS(_OfTokens):
    """Token truncated importance sampling: weight max(floor, min(r, cap)) of each token (TRL's `token_truncate`,
    verl's `rollout_is: token`; the cap of 2 is theirs). With floor 0 biased downwards only where the cap binds; biased
    for whole sequences even without a cap, because the prefix keeps the sampler's distribution.
    """

    def __init__(self, cap: float = 2.0, floor: float = 0.0, ratio: Ratio = "correction") -> None:
        super().__init__(ratio)
        if not 0.0 <= floor <= cap or cap <= 0.0:
            raise ValueError(f"token TIS needs 0 ≤ floor ≤ cap, cap above 0, not floor {floor} and cap {cap}")
        self.cap, self.floor = cap, floor

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        log = self.log(ratios)
        if self.cap > FINITE:  # there the clamp of the log-ratio is the cap, so that the weight is finite
            log = torch.clamp(log, max=LARGEST)
        return Weighted(torch.clamp(ratios.token(log), self.floor, self.cap), mask)


class TokenRejection(_OfTokens):
    """Keeps a token where low ≤ value ≤ high and rejects it elsewhere; weights are 1.

    value: r itself (`ratio`), ½(log r)² (`k2`) or r − 1 − log r (`k3`), the estimates of KL(q‖p) of one token. verl's
    `token_k1`, `token_k2` (1.5 to 3 are usual) and `token_k3` are these; its token_k1 bounds the inverse ratio.
    """

    def __init__(self, low: float, high: float, criterion: Criterion = "ratio", ratio: Ratio = "correction") -> None:
        super().__init__(ratio)
        if not 0.0 <= low <= high:
            raise ValueError(f"token rejection needs 0 ≤ low ≤ high, not {low} and {high}")
        self.low, self.high, self.criterion = low, high, criterion

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        value = estimate(self.criterion, self.log(ratios), ratios)
        kept = ~((value < self.low) | (value > self.high))
        return Weighted(torch.ones_like(value), mask & kept)


class IcePop(_OfTokens):
    """Weight r where low ≤ r ≤ high, and no part in the loss elsewhere: IcePop of Ring-1T (arXiv 2510.18855; verl and
    NeMo-RL use its 0.5 and 5).
    """

    def __init__(self, low: float = 0.5, high: float = 5.0, ratio: Ratio = "correction") -> None:
        super().__init__(ratio)
        if not 0.0 <= low <= high < FINITE:
            raise ValueError(f"IcePop needs 0 ≤ low ≤ high, finite, not {low} and {high}")
        self.low, self.high = low, high

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        value = ratios.token(self.log(ratios))
        kept = mask & (value >= self.low) & (value <= self.high)
        return Weighted(torch.where(kept, value, 0.0), kept)


class CIS(_OfTokens):
    """Confidence-aware truncation: weight min(r, 1 + λ·max(1 − p, κ)) (arXiv 2609.32444, λ 2.3 and κ 5e-3 its own).

    The more certain a token, the less its ratio may exceed 1, as the noise of a log-probability shrinks with 1 − p.
    Which p is meant we know from notes alone: our reading takes the trainer's, that of the ratio's numerator; `side`
    takes the sampler's recorded one instead.
    """

    def __init__(
        self, scale: float = 2.3, least: float = 5e-3, side: Side = "trainer", ratio: Ratio = "correction"
    ) -> None:
        super().__init__(ratio)
        if scale <= 0.0 or least < 0.0:
            raise ValueError(f"CIS needs lambda above 0 and kappa at least 0, not {scale} and {least}")
        self.scale, self.least, self.side = scale, least, side

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        log, sampler = self.log(ratios), recorded(ratios)
        trainer = sampler + (ratios.current if self.every_update else ratios.correction)
        p = torch.clamp(ratios.token(sampler if self.side == "sampler" else trainer), max=1.0)
        cap = 1.0 + self.scale * torch.clamp(1.0 - p, min=self.least)
        return Weighted(torch.minimum(ratios.token(log), cap), mask)


class DPPO(Plain):
    """Divergence instead of ratio: a token is left out where its step would lead further out of a trust region around
    what the sampler *recorded* (DPPO, arXiv 2602.04879; verl's `dppo_tv`, `dppo_kl`). Weights are 1.

    With p = p_θ(a), the current policy, and q = q(a), and D = |p − q| (`tv`) or the divergence of the two-outcome
    distributions q·log(q/p) + (1 − q)·log((1 − q)/(1 − p)) (`kl`), the sign rule written out:

        A > 0:  left out where p > q and D > δ     (it is likelier than it was by enough already)
        A < 0:  left out where p < q and D > δ     (it is less likely already)
        A = 0:  kept, it moves nothing

    δ = 0.2 for `tv` is the usual one; 0.05 for `kl` is our choice. The paper's weight min(p/q, 20) is
    `loss.remedy.ratio = sampler` with a clip of its own. 1 − p is formed in float32 and clamped at 2⁻²⁴, half a step
    below 1, so that D is finite.
    """

    every_update = True

    def __init__(self, delta: float = 0.2, divergence: Divergence = "tv") -> None:
        if delta <= 0.0:
            raise ValueError(f"DPPO needs a delta above 0, not {delta}")
        self.delta, self.divergence = delta, divergence

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        sampler = recorded(ratios)
        q = torch.clamp(ratios.token(sampler), max=1.0)
        p = torch.clamp(ratios.token(sampler + ratios.current), max=1.0)
        if self.divergence == "tv":
            distance = (p - q).abs()
        else:
            rest_q, rest_p = (torch.clamp(1.0 - x, min=2.0**-24) for x in (q, p))
            log = ratios.kernels.log
            distance = rest_q * (log(rest_q) - log(rest_p)) - q * ratios.current
        far = distance > self.delta
        outward = ((advantages > 0) & (p > q)) | ((advantages < 0) & (p < q))
        return Weighted(torch.ones_like(q), mask & ~(far & outward))


def estimate(criterion: str, log: Tensor, ratios: Ratios) -> Tensor:
    """Of one token: r, ½(log r)², or r − 1 − log r: float32, of the log-ratio's shape. The last is never below 0, which
    rounding alone would make it near log r = 0, under a lower bound of 0."""
    if criterion == "ratio":
        return ratios.token(log)
    if criterion == "k2":
        return (log * log) * 0.5
    return torch.clamp((ratios.token(log) - 1.0) - log, min=0.0)


def recorded(ratios: Ratios) -> Tensor:
    """log q of the sampled tokens. Raises ValueError where the caller gave none."""
    if ratios.sampler is None:
        raise ValueError("this remedy needs the sampler's log-probabilities (Ratios.sampler)")
    return ratios.sampler
