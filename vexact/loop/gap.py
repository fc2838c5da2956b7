"""How far the log-probabilities that sampling left are from those that training finds: what `tim/*` measures.

Δ = log π_train − log π_sampler of a sampled token, r = e^Δ; the trainer's at the weights that the step began with. With
sampler and trainer at one version this is the discrepancy of their arithmetic, and under exact arithmetic each measure
has its ideal value; where the sampler's weights are older, their staleness is in it too.

Host arithmetic in float64, sums correctly rounded (math.fsum), exponentials of our own: nothing here is on the way to a
weight, and still every machine finds the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
LARGEST = 20.0  # |log-ratio| of a token, |sum| of a sequence, beyond which χ² counts no more: verl's SAFETY_BOUND
# What each measure is where both sides agree in every bit, or nothing was compared.
IDEAL: Mapping[str, float] = {
    "tokens": 0, "differing": 0, "abs_mean": 0.0, "abs_max": 0.0, "k1": 0.0, "k2": 0.0, "k3": 0.0,
    "ratio_min": 1.0, "ratio_mean": 1.0, "ratio_max": 1.0, "multiplicative_error": 1.0, "ess": 1.0,
    "chi2_token": 0.0, "chi2_sequence": 0.0, "probability_mean": 0.0, "probability_max": 0.0,
    "log_ppl_mean": 0.0, "log_ppl_abs_mean": 0.0, "log_ppl_min": 0.0, "log_ppl_max": 0.0, "ppl_ratio": 1.0,
}  # fmt: skip


def measure_gap(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """pairs: of each rollout, float32 [tokens]: recorded by the sampler, found by the trainer. None may be empty.

    Measures by name, with their source where another name is usual: tokens compared, how many differ in a bit; mean and
    largest |Δ|; k1 = mean(−Δ), k2 = mean(Δ²)/2, k3 = mean(r − 1 − Δ), estimates of KL(sampler‖trainer); r; mean e^|Δ|
    (NeMo-RL's token_mult_prob_error); ess = (Σr)²/(nΣr²); χ² of tokens mean(r²) − 1 and of sequences, whose r is the
    product; |p_train − p_sampler|; per sequence the difference of log perplexities −mean(Δ), and the mean of its
    exponential (verl's rollout_corr_helper).
    """
    if not pairs:
        return dict(IDEAL)
    recorded, scored = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
    differing = int((recorded.view(torch.int32) != scored.view(torch.int32)).sum())
    if not differing:  # as nearly always: Δ is 0, and everything else follows
        return {**IDEAL, "tokens": len(recorded)}
    cuts = np.cumsum([len(pair[0]) for pair in pairs])[:-1]
    sampler, trainer = _float64(recorded), _float64(scored)
    delta = trainer - sampler
    sequences = [math.fsum(part.tolist()) for part in np.split(delta, cuts)]
    perplexity = np.array([0.0 - total / len(pair[0]) for total, pair in zip(sequences, pairs, strict=True)])
    excess = expm1(delta)  # r − 1
    ratio, bounded = 1.0 + excess, expm1(2.0 * np.clip(delta, -LARGEST, LARGEST))
    probability = np.abs(exp(trainer) - exp(sampler))
    return {
        "tokens": len(delta),
        "differing": differing,
        "abs_mean": mean(np.abs(delta)),
        "abs_max": float(np.abs(delta).max()),
        "k1": mean(-delta),
        "k2": mean(delta * delta) / 2.0,
        "k3": mean(excess - delta),
        "ratio_min": float(ratio.min()),
        "ratio_mean": mean(ratio),
        "ratio_max": float(ratio.max()),
        "multiplicative_error": mean(exp(np.abs(delta))),
        "ess": mean(ratio) ** 2 / mean(ratio * ratio),
        "chi2_token": mean(bounded),
        "chi2_sequence": mean(expm1(2.0 * np.clip(sequences, -LARGEST, LARGEST))),
        "probability_mean": mean(probability),
        "probability_max": float(probability.max()),
        "log_ppl_mean": mean(perplexity),
        "log_ppl_abs_mean": mean(np.abs(perplexity)),
        "log_ppl_min": float(perplexity.min()),
        "log_ppl_max": float(perplexity.max()),
        "ppl_ratio": mean(exp(perplexity)),
    }


def mean(values: Floats) -> float:
    return math.fsum(values.tolist()) / len(values)


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


LN2 = math.log(2.0)
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # their sum is ln 2 to 86 bits
TERMS = 15


def _series(x: Floats) -> Floats:
    """e^x − 1 for |x| up to ln 2 / 2: its power series, the smallest terms first."""
    total = np.zeros_like(x)
    for n in range(TERMS, 0, -1):
        total = (1.0 + total) * x / n
    return total


def _float64(x: Tensor) -> Floats:
    """Exactly, subnormals too: numpy converts without torch's ambient flush."""
    return x.cpu().numpy().astype(np.float64)
