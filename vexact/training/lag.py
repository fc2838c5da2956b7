"""How far the trainer has moved from the weights that sampled: the lag ratio ℓ = p_θ/p_s, both in its own arithmetic.

Measured before the first update of a step, on ratios as they are, neither clipped nor masked. The effective sample size
(Σℓ)²/(nΣℓ²), 1 where all are equal, is formed from ℓ/max ℓ, so that nothing overflows; float64, sums rounded once,
exponentials of our own: what a remedy decides by it is decided alike on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vexact.arithmetic import Floats, exp, expm1, mean, total, variance


def no_lag(tokens: int, sequences: int) -> dict[str, float]:
    """What `measure_lag` gives where the sampler is not older: without a comparison."""
    return {
        "ess_token": 1.0,
        "ess_token_lognormal": 1.0,
        "ess_tokens": tokens,
        "ess_sequence": 1.0,
        "ess_sequence_lognormal": 1.0,
        "ess_sequences": sequences,
        "lag_k3": 0.0,
    }


def measure_lag(current: Tensor, source: Tensor, cuts: Sequence[slice]) -> dict[str, float]:
    """current, source: log p_θ and log p_s of sampled tokens, float32 [tokens]; cuts: the rows of each sequence.

    By name: the effective sample size over tokens, and over sequences with the product of their ratios; beside each
    exp(−Var log ℓ), what it would be were ℓ log-normal, and n, as of n values it can be no less than 1/n; lag_k3, the
    mean over tokens of ℓ − 1 − log ℓ. An effective size of what is not finite is 0.
    """
    delta = _float64(current) - _float64(source)
    sequences = np.array([total(delta[cut]) for cut in cuts])
    return {
        "ess_token": effective(delta),
        "ess_token_lognormal": lognormal(delta),
        "ess_tokens": len(delta),
        "ess_sequence": effective(sequences),
        "ess_sequence_lognormal": lognormal(sequences),
        "ess_sequences": len(sequences),
        "lag_k3": _k3(delta),
    }


def k3(current: Tensor, earlier: Tensor) -> float:
    """The mean over tokens of r − 1 − log r with r = e^(current − earlier), of float32 log-probabilities [tokens]: in
    float64, as float32 loses it below differences of 1e-3. Infinite where one of them is not finite."""
    return _k3(_float64(current) - _float64(earlier))


def _k3(delta: Floats) -> float:
    return mean(expm1(delta) - delta) if np.isfinite(delta).all() else float("inf")


def effective(log: Floats) -> float:
    """(Σw)²/(nΣw²) of weights w = e^log: in [1/n, 1]."""
    if not np.isfinite(log).all():
        return 0.0
    weights = exp(log - log.max())
    return total(weights) ** 2 / (len(weights) * total(weights * weights))


def lognormal(log: Floats) -> float:
    """exp(−Var log w), which the effective size of log-normal weights tends to."""
    if not np.isfinite(log).all():
        return 0.0
    return float(exp(np.array([-variance(log)]))[0])


def _float64(x: Tensor) -> Floats:
    """Exactly, subnormals too: numpy converts without torch's ambient flush."""
    return x.cpu().numpy().astype(np.float64)
