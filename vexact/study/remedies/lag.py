"""Weights from the ratio of the policy that is updated, and the centring of scores: the parts that DLC is made of.

Li, Zhou and Lan ("On the Origin and Evolution of Training-Inference Mismatch in LLM Reinforcement Learning", 29 October
2026, known to us from its abstract alone) correct discrepancy and lag apart. DLC here is *our reading* of that
abstract:

    g = A·(w_a s_a − Σ_v q_v w_v s_v),   w_v = clip(ℓ_v) held constant,   ℓ_v = p_θ(v)/p_s(v)

with both sides of ℓ in the trainer's arithmetic, together with a synchronisation of the sampler where the effective
sample size of ℓ falls below ½ (`steps.Resync`).
Centring with w = 1 is Score Centering (arXiv 2609.20807). It estimates the *sampler's* policy gradient, as importance
sampling estimates the trainer's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vexact.model.remedy import Centring, Clip, Plain, Ratios, Weighted
from vexact.study.remedies.token import LARGEST


class Centre(Plain):
    """Scores centred by the trainer's backward pass, exactly over the whole vocabulary. It gives no weight of its own:
    w_a is part of what is centred.
    """

    beforehand = False

    def __init__(self, centring: Centring) -> None:
        check(centring)
        self.centre = centring
        self.needs_lag = centring.base == "lag"


class RatioWeight(Plain):
    """Weight w_a = clip(r) of each token without centring, r = p_θ/p_s (`lag`) or p_θ/q (`sampler`), anew before each
    update.

    `truncate`: into low … high. `ppo`: 0 where r is above high and A > 0, or below low and A < 0; the token stays in
    the divisor, as a clipped one of PPO does. `none`: r itself, token importance sampling, clamped at e^88.
    """

    every_update = True

    def __init__(self, centring: Centring) -> None:
        check(centring)
        self.of = centring
        self.needs_lag = centring.base == "lag"

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        log = ratios.current
        if self.of.base == "lag":
            if ratios.lag is None:
                raise ValueError("the lag ratio needs log-probabilities at the sampler's weights (Ratios.lag)")
            log = ratios.lag
        value = ratios.token(torch.clamp(log, max=LARGEST))
        return Weighted(clipped(value, advantages, self.of.clip, self.of.low, self.of.high), mask)


def clipped(value: Tensor, advantages: Tensor, clip: Clip, low: float, high: float) -> Tensor:
    """Ratios, float32 of any shape, by one of the three rules of `RatioWeight`."""
    if clip == "truncate":
        return torch.clamp(value, low, high)
    if clip == "none":
        return value
    outside = ((advantages > 0) & (value > high)) | ((advantages < 0) & (value < low))
    return torch.where(outside, 0.0, value)


def check(centring: Centring) -> None:
    """Raises ValueError for bounds that nothing can meet."""
    if centring.clip != "none" and not 0.0 <= centring.low <= centring.high:
        raise ValueError(f"a clip needs 0 ≤ low ≤ high, not {centring.low} and {centring.high}")
