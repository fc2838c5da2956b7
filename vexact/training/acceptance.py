"""Whether a fresh batch speaks for the weights that sampled it: what a remedy that may take a step back decides by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vexact.arithmetic import exp, mean, total

LARGEST = 20.0  # |log ρ| beyond which it is clamped: e^20 is 4.9e8


def measure_acceptance(correction: Tensor, advantages: Tensor, cuts: Sequence[slice]) -> dict[str, float]:
    """−mean(ρÂ): the step-2 measure of arXiv 2606.29526, by our reading. float64, on the host.

    correction: log ρ = log p_θ' − log q_θ' of sampled tokens, float32 [tokens], clamped at ±20; advantages: float32
    [tokens]; cuts: the rows of each sequence. Over tokens; and over sequences, with the product of their ratios and the
    advantage of their first token. `raw`: with advantages as they are; without it they are folded, their mean taken off
    first, so that an exact sampler gives 0 up to rounding.
    """
    delta, weight = (x.cpu().numpy().astype(np.float64) for x in (correction, advantages))
    sums = np.array([total(delta[cut]) for cut in cuts])
    firsts = np.array([weight[cut][0] for cut in cuts])
    found = {}
    for level, log, gain in (("token", delta, weight), ("sequence", sums, firsts)):
        ratio = exp(np.clip(log, -LARGEST, LARGEST))
        found[f"acceptance_{level}"] = 0.0 - mean(ratio * (gain - mean(gain)))
        found[f"acceptance_{level}_raw"] = 0.0 - mean(ratio * gain)
    return found
