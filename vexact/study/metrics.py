"""How far the log-probabilities that sampling left are from those that training finds: what `tim/*` measures.

Δ = log π_train − log π_sampler of a sampled token, r = e^Δ; the trainer's at the weights that the step began with. With
sampler and trainer at one version this is the discrepancy of their arithmetic, and under exact arithmetic each measure
has its ideal value; where the sampler's weights are older, their staleness is in it too. Means are over all tokens, or
over all sequences where a name says so.

Float64 throughout (`vexact.arithmetic`): every machine finds the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vexact.arithmetic import Floats, at_rank, exp, expm1, log1p, mean, median_deviation, total, variance
from vexact.study.odds import log_odds

Pairs = Sequence[tuple[Tensor, Tensor]]
LARGEST = 20.0  # |log-ratio| of a token, |sum| of a sequence, beyond which χ² counts no more: verl's SAFETY_BOUND
EXTREME = math.log(2.0)  # |Δ| beyond which a token is extreme: F(2) of arXiv 2510.11370
BAD = 0.5  # fall of the probability at which an update with a negative advantage counts as bad (DPPO)
# What each measure is where both sides agree in every bit, or nothing was compared.
IDEAL: Mapping[str, float] = {
    "tokens": 0, "sequences": 0, "differing": 0,
    "abs_mean": 0.0, "abs_p95": 0.0, "abs_p99": 0.0, "abs_max": 0.0, "k1": 0.0, "k2": 0.0, "k3": 0.0,
    "ratio_min": 1.0, "ratio_mean": 1.0, "ratio_max": 1.0, "extreme_fraction": 0.0, "multiplicative_error": 1.0,
    "ess": 1.0, "ess_lognormal": 1.0, "ess_sequence": 1.0, "ess_sequence_lognormal": 1.0,
    "chi2_token": 0.0, "chi2_sequence": 0.0,
    "probability_mean": 0.0, "probability_std": 0.0, "probability_max": 0.0,
    "log_ppl_mean": 0.0, "log_ppl_abs_mean": 0.0, "log_ppl_min": 0.0, "log_ppl_max": 0.0, "ppl_ratio": 1.0,
}  # fmt: skip
# What `measure_pairs` adds, where both sides agree. Entropies are the data's own and have no ideal value.
OFFLINE: Mapping[str, float] = {
    "m2": 0.0, "js": 0.0, "pearson": 1.0, "k3_max": 0.0, "k3_std": 0.0,
    "log_odds_tokens": 0, "log_odds_mad": 0.0, "log_odds_p05": 0.0, "log_odds_p95": 0.0, "k3_per_entropy": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """Live tokens of both sides as float64, exactly. lengths: of the sequences, in order; none is 0.

    differs: bool [tokens], whether the two float32 differ in a bit.
    """

    sampler: Floats
    trainer: Floats
    lengths: tuple[int, ...]
    differs: NDArray[np.bool_]

    @staticmethod
    def of(pairs: Pairs) -> Compared:
        """pairs: of each rollout, float32 [tokens]: recorded by the sampler, found by the trainer; none empty."""
        if not pairs:
            return Compared(np.zeros(0), np.zeros(0), (), np.zeros(0, dtype=np.bool_))
        recorded, scored = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
        differs = (recorded.view(torch.int32) != scored.view(torch.int32)).cpu().numpy()
        return Compared(float64(recorded), float64(scored), tuple(len(pair[0]) for pair in pairs), differs)

    @property
    def delta(self) -> Floats:
        return self.trainer - self.sampler

    def sums(self, values: Floats) -> Floats:
        """Of a value of each token, the sum over each sequence: float64 [sequences]."""
        cuts = np.cumsum(self.lengths)[:-1]
        return np.array([total(part) for part in np.split(values, cuts)]) if self.lengths else np.zeros(0)


def measure_gap(pairs: Pairs) -> dict[str, float]:
    """pairs: as `Compared.of` takes them. The measures of a step, by name; all are cheap.

    With their source where another name is usual: tokens and sequences compared, how many tokens differ in a bit; mean,
    percentiles (by rank) and largest |Δ|; k1 = mean(−Δ), k2 = mean(Δ²)/2, k3 = mean(r − 1 − Δ), estimates of
    KL(sampler‖trainer); r; the share of tokens with max(r, 1/r) > 2; mean e^|Δ| (NeMo-RL's token_mult_prob_error);
    ess = (Σr)²/(nΣr²) of tokens and of sequences, whose r is the product, unclipped, from logarithms; beside it what it
    would be if r were log-normal, exp(−Var log r), which needs fewer samples; χ² of tokens mean(r²) − 1 and of
    sequences; |p_train − p_sampler| (verl's rollout_probs_diff_*: std over n − 1); per sequence the difference of log
    perplexities −mean(Δ), and the mean of its exponential (verl's rollout_corr_helper).
    """
    tokens, differing = _counts(pairs)
    counts = {"tokens": tokens, "sequences": len(pairs), "differing": differing}
    if not differing:  # as nearly always: Δ is 0, and everything else follows
        return {**IDEAL, **counts}
    found = Compared.of(pairs)
    delta = found.delta
    sequences = found.sums(delta)
    perplexity = np.array([0.0 - s / length for s, length in zip(sequences, found.lengths, strict=True)])
    excess = expm1(delta)  # r − 1
    ratio, bounded = 1.0 + excess, expm1(2.0 * np.clip(delta, -LARGEST, LARGEST))
    distance = np.abs(delta)
    ordered = np.sort(distance)
    k1, m2 = mean(-delta), mean(delta * delta)
    return {
        **counts,
        "abs_mean": mean(distance),
        "abs_p95": at_rank(ordered, 0.95),
        "abs_p99": at_rank(ordered, 0.99),
        "abs_max": float(ordered[-1]),
        "k1": k1,
        "k2": m2 / 2.0,
        "k3": mean(excess - delta),
        "ratio_min": float(ratio.min()),
        "ratio_mean": mean(ratio),
        "ratio_max": float(ratio.max()),
        "extreme_fraction": int((distance > EXTREME).sum()) / len(delta),
        "multiplicative_error": mean(exp(distance)),
        # the ratios are there already; their logarithms are needed only where a square could overflow
        "ess": mean(ratio) ** 2 / mean(ratio * ratio) if ordered[-1] < 100.0 else effective_share(delta),
        "ess_lognormal": lognormal_share(max(m2 - k1 * k1, 0.0)),
        "ess_sequence": effective_share(sequences),
        "ess_sequence_lognormal": lognormal_share(variance(sequences)),
        "chi2_token": mean(bounded),
        "chi2_sequence": mean(expm1(2.0 * np.clip(sequences, -LARGEST, LARGEST))),
        **_probabilities(exp(found.sampler), exp(found.trainer)),
        "log_ppl_mean": mean(perplexity),
        "log_ppl_abs_mean": mean(np.abs(perplexity)),
        "log_ppl_min": float(perplexity.min()),
        "log_ppl_max": float(perplexity.max()),
        "ppl_ratio": mean(exp(perplexity)),
    }


def measure_pairs(pairs: Pairs) -> dict[str, float]:
    """`measure_gap`, and what is not worth a training step's time.

    m2 = mean(Δ²) (M2PO); js: Jensen–Shannon divergence from the sampler's tokens, each token's part at least 0;
    Pearson's r of the probabilities (verl's rollout_actor_probs_pearson_corr); spread and largest part of k3; width of
    the log-odds displacement logit p_train − logit p_sampler, over the tokens whose probability is below 1 on both
    sides: median deviation, 5th and 95th percentile; entropy of the sampler −mean(log q) and of the trainer
    −mean(r log p) from the same tokens (NeMo-RL), in nats; k3 over the first (prime-rl).
    """
    found, gap = Compared.of(pairs), measure_gap(pairs)
    if not len(found.sampler):
        return {**gap, **OFFLINE, "entropy_sampler": 0.0, "entropy_trainer": 0.0}
    delta = found.delta
    parts, moved = expm1(delta) - delta, log_odds(found.trainer, found.sampler)
    ordered = np.sort(moved)
    entropy = 0.0 - mean(found.sampler)
    return {
        **gap,
        "m2": mean(delta * delta),
        "js": mean(jensen_shannon(delta)),
        # by definition where nothing differs: two roots of a sum are not its square
        "pearson": pearson(exp(found.sampler), exp(found.trainer)) if gap["differing"] else 1.0,
        "k3_max": float(parts.max()),
        "k3_std": math.sqrt(variance(parts)),
        "log_odds_tokens": len(moved),
        "log_odds_mad": median_deviation(moved) if len(moved) else 0.0,
        "log_odds_p05": at_rank(ordered, 0.05) if len(moved) else 0.0,
        "log_odds_p95": at_rank(ordered, 0.95) if len(moved) else 0.0,
        "k3_per_entropy": gap["k3"] / entropy if entropy > 0.0 else 0.0,
        "entropy_sampler": entropy,
        "entropy_trainer": 0.0 - mean(exp(delta) * found.trainer),
    }


def measure_skew(pairs: Pairs, advantages: Sequence[float]) -> dict[str, float]:
    """How a step's loss is skewed. advantages: of each sequence, in the order of pairs, finite.

    C(r) = −(r − 1)·A, a token's share of the loss beyond what it would be at r = 1 (arXiv 2605.14220, eq. 5): its mean
    over the tokens with A > 0 and over those with A < 0, with their numbers; and the share of tokens with A < 0 whose
    probability is lower by half for the trainer than for the sampler (DPPO's bad updates). Empty: 0.
    """
    found = Compared.of(pairs)
    spread = np.repeat(np.asarray(advantages, dtype=np.float64), found.lengths)
    skew = -expm1(found.delta) * spread
    fallen = exp(found.sampler) - exp(found.trainer) >= BAD
    measures: dict[str, float] = {}
    for name, where in (("positive", spread > 0.0), ("negative", spread < 0.0)):
        measures[f"skew_{name}"] = 0.0 + mean(skew[where]) if where.any() else 0.0
        measures[f"skew_{name}_tokens"] = int(where.sum())
    bad = int((fallen & (spread < 0.0)).sum())
    return {**measures, "bad_tokens": bad, "bad_fraction": bad / len(spread) if len(spread) else 0.0}


def measure_split(
    current: Sequence[Tensor],
    exact: Sequence[Tensor],
    recorded: Sequence[Tensor],
    proximal: Sequence[Tensor] | None = None,
) -> dict[str, float]:
    """The parts of log p_θ − log q, each of them as `measure_gap` measures it, with its name before the measure's.

    Per rollout float32 [tokens], none empty: current log p_θ and exact log p_s, in the trainer's arithmetic at the
    weights in training and at those that sampled; recorded log q, as sampled; proximal log p_old, where there is one.

    discrepancy = log p_s − log q; lag = log p_θ − log p_s = drift + staleness, with drift = log p_θ − log p_old and
    staleness = log p_old − log p_s; whole = log p_θ − log q.
    """
    parts = {
        "whole": _pairs(recorded, current),
        "lag": _pairs(exact, current),
        "discrepancy": _pairs(recorded, exact),
    }
    if proximal is not None:
        parts |= {"drift": _pairs(proximal, current), "staleness": _pairs(exact, proximal)}
    return {f"{part}/{name}": value for part, pairs in parts.items() for name, value in measure_gap(pairs).items()}


def effective_share(logs: Floats) -> float:
    """Effective share of a sample (Σw)²/(nΣw²), in (0, 1], from its weights' logarithms; exactly 1 for equal ones.

    It is 1/(1 + χ²) of the weights divided by their mean. Nothing overflows: the largest weight is 1.
    """
    weights = exp(logs - logs.max())
    return mean(weights) ** 2 / mean(weights * weights)


def lognormal_share(variance_of_logs: float) -> float:
    """What `effective_share` tends to for log-normal weights: exp(−Var log w)."""
    return float(exp(np.array([-variance_of_logs]))[0])


def jensen_shannon(delta: Floats) -> Floats:
    """½ (r log r − (1 + r) log((1 + r)/2)) of each token, whose mean under the sampler is the divergence in nats.

    Written with h = Δ/2 as ½ ((r − 1) h − (r + 1) log cosh h), which loses no digits at small Δ.
    """
    half = delta / 2.0
    sinh = (expm1(half) - expm1(-half)) / 2.0
    near = np.abs(half) < 1.0
    cosh = np.where(
        near,
        log1p(np.where(near, sinh * sinh, 0.0)) / 2.0,
        np.abs(half) - math.log(2.0) + log1p(exp(-2.0 * np.abs(half))),
    )
    excess = expm1(delta)
    return (excess * half - (excess + 2.0) * cosh) / 2.0


def float64(x: Tensor) -> Floats:
    """Exactly, subnormals too: numpy converts without torch's ambient flush."""
    return x.cpu().numpy().astype(np.float64)


def _counts(pairs: Pairs) -> tuple[int, int]:
    """Tokens, and how many of them differ in a bit."""
    if not pairs:
        return 0, 0
    recorded, scored = (torch.cat([pair[side] for pair in pairs]).view(torch.int32) for side in (0, 1))
    return len(recorded), int((recorded != scored).sum())


def _probabilities(sampler: Floats, trainer: Floats) -> dict[str, float]:
    distance = np.abs(trainer - sampler)
    middle, n = mean(distance), len(distance)
    away = distance - middle
    return {
        "probability_mean": middle,
        "probability_std": math.sqrt(total(away * away) / (n - 1)) if n > 1 else 0.0,
        "probability_max": float(distance.max()),
    }


def pearson(x: Floats, y: Floats) -> float:
    """Pearson's r; 1 where one side is the same throughout, which correlates with nothing."""
    x, y = x - mean(x), y - mean(y)
    scale = math.sqrt(total(x * x)) * math.sqrt(total(y * y))
    return total(x * y) / scale if scale > 0.0 else 1.0


def _pairs(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(before, after, strict=True))
