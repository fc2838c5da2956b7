"""What a training step measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vexact.training.functions import mean
from vexact_kernels import Kernels


@dataclass(frozen=True)
class StepMetrics:
    """One step of the trainer. Log-ratios are current − behaviour, in nats; entropies of the tempered distribution.

    version: of the policy behind the step. skipped: why the weights did not move (`nothing to train`, `gradient is not
    finite`), empty where they did. aggregation: what `loss` is the mean over. mismatch_*: tokens whose
    recomputed log-probability differs from the recorded one in any bit, and the largest difference. Values of a step
    without tokens are 0, its ratios 1.
    """

    version: int
    skipped: str
    aggregation: str
    rollouts: int
    dropped_empty: int
    dropped_nonfinite: int
    tokens: int
    nonfinite_tokens: int
    loss: float
    mismatch_tokens: int
    mismatch_max: float
    ratio_min: float
    ratio_max: float
    clip_fraction: float
    k3: float
    entropy: float
    grad_norm: float
    clip_factor: float


class TokenRecord:
    """Per-token values of a step, filled in micro-batches and measured whole, so that no cut shows in a metric."""

    def __init__(self, behaviour: Tensor) -> None:
        """behaviour: float32 [tokens], the log-probabilities that sampling left."""
        self.behaviour = behaviour
        self.current, self.entropy, self.loss, self.ratio = (torch.empty_like(behaviour) for _ in range(4))
        self.clipped, self.finite = (torch.empty(len(behaviour), dtype=torch.bool) for _ in range(2))

    def measure(self, kernels: Kernels) -> dict[str, Any]:
        """The fields of StepMetrics that are sums or extremes over tokens. Needs at least one token."""
        count = len(self.behaviour)
        difference = self.current - self.behaviour
        differs = self.current.view(torch.int32) != self.behaviour.view(torch.int32)
        return {
            "tokens": count,
            "nonfinite_tokens": int((~self.finite).sum()),
            "loss": float(kernels.sum(self.loss)),
            "mismatch_tokens": int(differs.sum()),
            "mismatch_max": float(difference.abs().max()),
            "ratio_min": float(self.ratio.min()),
            "ratio_max": float(self.ratio.max()),
            "clip_fraction": int(self.clipped.sum()) / count,
            "k3": float(mean((self.ratio - 1.0) - difference, kernels)),
            "entropy": float(mean(self.entropy, kernels)),
        }


NO_TOKENS: dict[str, Any] = {
    "tokens": 0,
    "nonfinite_tokens": 0,
    "loss": 0.0,
    "mismatch_tokens": 0,
    "mismatch_max": 0.0,
    "ratio_min": 1.0,
    "ratio_max": 1.0,
    "clip_fraction": 0.0,
    "k3": 0.0,
    "entropy": 0.0,
    "grad_norm": 0.0,
    "clip_factor": 1.0,
}
