"""What a training step measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vexact.model.remedy import Ratios, Weighted
from vexact.training.functions import mean
from vexact.training.lag import k3, no_lag
from vexact_kernels import Kernels


@dataclass(frozen=True)
class StepMetrics:
    """One step of the trainer. Log-ratios are current − behaviour, in nats; entropies of the tempered distribution.

    version: of the policy behind the step. skipped: why weights did not move (`nothing to train`, `discarded by the
    remedy`, `gradient is not finite`; of several updates how many it befell), empty where all of them moved. objective,
    aggregation: what `loss` is made of, and the mean over. updates: that moved the weights. tokens: of the rollouts
    given and not dropped, rejected ones among them. mismatch_*: how many of them were compared (where a step has
    several updates and π_old is not scored, those of the first), how many have a recomputed log-probability that
    differs from the recorded one in any bit, and the largest difference, at the weights that the step began with.

    loss, grad_norm: mean over updates. ratio_*, clip_fraction, k3, entropy, kl, skew_*: over all updates' tokens;
    ratio: the one that the objective clips, to the anchor; kl: the estimate of KL to the reference policy, 0 without
    one; skew_*: mean share of the loss beyond that at ratio 1, of tokens with an advantage above, and below, 0;
    policy_drift_*: of log p_θ − log π_old over the tokens of all updates where π_old is known, how many they are, K3
    and the largest size: 0 of a single update, which begins at π_old, None where it is known of none.
    clip_factor: the smallest. remedy_weight_*, remedy_ratio_max (before any cap): at the start of the step;
    remedy_rejected_*: sequences, and tokens, that were not trained because of it, summed over updates. remedy_lr: what
    it multiplied the learning rate by. ess_*, lag_k3: of `lag.py`, before the first update. centre_weight_*: the
    weights w_a of centred scores over all updates' tokens, 1 without centring. candidate: whether the weights that the
    step began with may still be taken back; acceptance_*: of `acceptance.py`, with advantages folded, and not (`raw`),
    0 where no remedy asks; rollbacks: how often weights were taken back so far. Values of a step without tokens are 0,
    its ratios and weights 1.
    """

    version: int
    skipped: str
    objective: str
    aggregation: str
    rollouts: int
    dropped_empty: int
    dropped_nonfinite: int
    updates: int
    tokens: int
    nonfinite_tokens: int
    loss: float
    mismatch_compared: int
    mismatch_tokens: int
    mismatch_max: float
    ratio_min: float
    ratio_max: float
    clip_fraction: float
    k3: float
    entropy: float
    kl: float
    skew_positive: float
    skew_negative: float
    policy_drift_tokens: int
    policy_drift_k3: float | None
    policy_drift_max: float | None
    grad_norm: float
    clip_factor: float
    remedy_weight_min: float
    remedy_weight_mean: float
    remedy_weight_max: float
    remedy_weight_std: float
    remedy_ratio_max: float
    remedy_rejected_sequences: int
    remedy_rejected_tokens: int
    remedy_lr: float
    ess_token: float
    ess_token_lognormal: float
    ess_tokens: int
    ess_sequence: float
    ess_sequence_lognormal: float
    ess_sequences: int
    lag_k3: float
    centre_weight_min: float
    centre_weight_mean: float
    centre_weight_max: float
    candidate: int
    acceptance_token: float
    acceptance_token_raw: float
    acceptance_sequence: float
    acceptance_sequence_raw: float
    rollbacks: int

    def measured(self) -> dict[str, Any]:
        """By name, without what is not known."""
        return {name: value for name, value in asdict(self).items() if value is not None}


NO_TOKENS: dict[str, Any] = {
    "updates": 0,
    "tokens": 0,
    "nonfinite_tokens": 0,
    "loss": 0.0,
    "mismatch_compared": 0,
    "mismatch_tokens": 0,
    "mismatch_max": 0.0,
    "ratio_min": 1.0,
    "ratio_max": 1.0,
    "clip_fraction": 0.0,
    "k3": 0.0,
    "entropy": 0.0,
    "kl": 0.0,
    "skew_positive": 0.0,
    "skew_negative": 0.0,
    "policy_drift_tokens": 0,
    "policy_drift_k3": 0.0,
    "policy_drift_max": 0.0,
    "grad_norm": 0.0,
    "clip_factor": 1.0,
    "remedy_weight_min": 1.0,
    "remedy_weight_mean": 1.0,
    "remedy_weight_max": 1.0,
    "remedy_weight_std": 0.0,
    "remedy_ratio_max": 1.0,
    "remedy_rejected_sequences": 0,
    "remedy_rejected_tokens": 0,
    "remedy_lr": 1.0,
    **no_lag(0, 0),
    "centre_weight_min": 1.0,
    "centre_weight_mean": 1.0,
    "centre_weight_max": 1.0,
    "candidate": 0,
    "acceptance_token": 0.0,
    "acceptance_token_raw": 0.0,
    "acceptance_sequence": 0.0,
    "acceptance_sequence_raw": 0.0,
    "rollbacks": 0,
}


class TokenRecord:
    """Per-token values of an update, filled in micro-batches and measured whole, so that no cut shows in a metric."""

    def __init__(self, behaviour: Tensor, advantage: Tensor, old: Tensor | None) -> None:
        """behaviour: the log-probabilities that sampling left; advantage: of its rollout; old: those of π_old, where
        they are known. float32 [tokens] each."""
        self.behaviour, self.advantage, self.old = behaviour, advantage, old
        self.current, self.entropy, self.loss, self.ratio, self.kl = (torch.empty_like(behaviour) for _ in range(5))
        self.clipped, self.finite = (torch.empty_like(behaviour, dtype=torch.bool) for _ in range(2))
        self.centre = torch.ones_like(behaviour)  # w_a of a centred score

    @property
    def columns(self) -> list[Tensor]:
        """What is measured, in a fixed order."""
        return [self.current, self.entropy, self.loss, self.ratio, self.kl, self.clipped, self.finite, self.centre]


@dataclass(frozen=True)
class UpdateRecord:
    """One update. tokens: None where nothing was trained. moved: whether the weights did."""

    tokens: TokenRecord | None
    rejected_sequences: int = 0
    rejected_tokens: int = 0
    moved: bool = False
    grad_norm: float = 0.0
    clip_factor: float = 1.0


def measure_updates(updates: Sequence[UpdateRecord], kernels: Kernels) -> dict[str, Any]:
    """The fields of StepMetrics that are sums, means or extremes over updates and their tokens."""
    rejected = {
        "remedy_rejected_sequences": sum(update.rejected_sequences for update in updates),
        "remedy_rejected_tokens": sum(update.rejected_tokens for update in updates),
    }
    trained = [(update, update.tokens) for update in updates if update.tokens is not None]
    if not trained:
        return rejected
    losses = [float(kernels.sum(tokens.loss)) for _, tokens in trained]
    return {
        "updates": sum(update.moved for update in updates),
        "loss": average(losses),
        "grad_norm": average([update.grad_norm for update, _ in trained]),
        "clip_factor": min(update.clip_factor for update, _ in trained),
        **_over_tokens([tokens for _, tokens in trained], kernels),
        **_policy_drift([tokens for _, tokens in trained], len(updates) == 1),
        **rejected,
    }


def _over_tokens(records: Sequence[TokenRecord], kernels: Kernels) -> dict[str, Any]:
    def column(name: str) -> Tensor:
        return torch.cat([getattr(record, name) for record in records])

    ratio, clipped = column("ratio"), column("clipped")
    centre = column("centre")
    return {
        "nonfinite_tokens": int((~column("finite")).sum()),
        "ratio_min": float(ratio.min()),
        "ratio_max": float(ratio.max()),
        "clip_fraction": int(clipped.sum()) / len(clipped),
        "k3": k3(column("current"), column("behaviour")),
        "entropy": float(mean(column("entropy"), kernels)),
        "kl": float(mean(column("kl"), kernels)),
        **_skew(ratio, column("advantage"), kernels),
        "centre_weight_min": float(centre.min()),
        "centre_weight_mean": float(mean(centre, kernels)),
        "centre_weight_max": float(centre.max()),
    }


def _skew(ratio: Tensor, advantage: Tensor, kernels: Kernels) -> dict[str, float]:
    """C(r) = −(r − 1)·A of a token is its share of the loss beyond what it would be at r = 1 (arXiv 2605.14220, eq. 5):
    the mean over tokens with A > 0 and over those with A < 0; 0 of none."""
    share = -((ratio - 1.0) * advantage)
    found = {}
    for name, where in (("positive", advantage > 0), ("negative", advantage < 0)):
        total = kernels.sum(torch.where(where, share, 0.0))
        found[f"skew_{name}"] = 0.0 + float(total / where.sum().clamp(min=1).to(total.dtype))
    return found


def _policy_drift(records: Sequence[TokenRecord], alone: bool) -> dict[str, Any]:
    """alone: the only update of a step, which begins at π_old."""
    if alone:
        return {"policy_drift_tokens": sum(len(record.current) for record in records)}
    known = [(record.current, record.old) for record in records if record.old is not None]
    if not known:
        return {"policy_drift_k3": None, "policy_drift_max": None}
    current, old = (torch.cat(column) for column in zip(*known, strict=True))
    return {
        "policy_drift_tokens": len(current),
        "policy_drift_k3": k3(current, old),
        "policy_drift_max": float((current - old).abs().max()),
    }


def measure_mismatch(scored: Tensor, recorded: Tensor) -> dict[str, Any]:
    """Log-probabilities float32 [tokens] as the trainer scored them at the weights it began with, and as recorded."""
    differs = scored.view(torch.int32) != recorded.view(torch.int32)
    return {
        "mismatch_compared": len(scored),
        "mismatch_tokens": int(differs.sum()),
        "mismatch_max": float((scored - recorded).abs().max()),
    }


def measure_remedy(ratios: Ratios, found: Weighted) -> dict[str, float]:
    """Of a batch's tokens, what a remedy answered. Weights: of kept tokens, 1 where none is kept."""
    kept = int(found.kept.sum())
    largest = {"remedy_ratio_max": float(ratios.token(ratios.correction).max())}
    if not kept:
        return largest
    weights, kernels = found.weights, ratios.kernels
    total = kernels.sum(torch.where(found.kept, weights, 0.0))
    middle = total / torch.full_like(total, float(kept))
    spread = kernels.sum(torch.where(found.kept, (weights - middle) * (weights - middle), 0.0))
    return {
        "remedy_weight_min": float(torch.where(found.kept, weights, math.inf).min()),
        "remedy_weight_mean": float(middle),
        "remedy_weight_max": float(torch.where(found.kept, weights, -math.inf).max()),
        "remedy_weight_std": math.sqrt(float(spread) / kept),
        **largest,
    }


def skipped(updates: Sequence[UpdateRecord]) -> str:
    """Why updates did not move the weights, empty where all of them did."""
    empty = sum(update.tokens is None for update in updates)
    broken = sum(update.tokens is not None and not update.moved for update in updates)
    if broken:
        return "gradient is not finite" + (f" in {broken} of {len(updates)} updates" if len(updates) > 1 else "")
    if empty:
        return "nothing to train" + (f" in {empty} of {len(updates)} updates" if empty < len(updates) else "")
    return ""


def average(values: Sequence[float]) -> float:
    """In float64. A value that is not finite makes the mean not finite, whatever the others are."""
    if all(math.isfinite(value) for value in values):
        return math.fsum(values) / len(values)
    return values[0] if len(values) == 1 else math.nan
