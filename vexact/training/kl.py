"""Estimators of KL(π ‖ π_ref) from the sampled token (Schulman, http://joschu.net/blog/kl-approx.html).

With d = log π − log π_ref of a token drawn from π:

    k1 = d                  unbiased; its gradient ∇log π has mean 0, so in a loss it is noise and no penalty: refused
    k2 = d²/2               biased; its gradient d·∇log π has the mean of KL's own: E[d·∇log π] = ∇KL(π ‖ π_ref)
    k3 = exp(−d) − 1 + d    unbiased, never negative; its gradient (1 − exp(−d))·∇log π has the mean of the gradient of
                            the other divergence, KL(π_ref ‖ π) (GRPO, arXiv 2402.03300, eq. 4; TRL's beta)
    k3+                     the value of k3 with the gradient of k2 (verl's k3+)

Off-policy the token was drawn from π_old: the mean under π needs the weight sg(π/π_old), which `importance` sets
(DeepSeek-V3.2, arXiv 2512.02556; TRL's use_bias_correction_kl); on-policy it is exactly 1.

In a reward only the value counts, held constant. With k1 the policy gradient of r − β·Σd is exactly that of E[r] −
β·KL of the sequences; k2 and k3 lack the term that k1 does not have, E[∇k].
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vexact.recipe import KLSection
from vexact.training import functions
from vexact_kernels import Kernels


def kl_term(current: Tensor, reference: Tensor, kl: KLSection, kernels: Kernels) -> Tensor:
    """The estimate of each token in a loss: float32 [n], with the gradient of its estimator; k1 is refused."""
    difference = current - reference
    if kl.estimator == "k2":
        return _k2(difference)
    if kl.estimator == "k3":
        return _k3(difference, kernels)
    if kl.estimator == "k3+":
        return _GradientOf.apply(_k2(difference), _k3(difference.detach(), kernels))
    raise ValueError(f"{kl.estimator} is no estimator for a loss")


def kl_value(current: Tensor, reference: Tensor, kl: KLSection, kernels: Kernels) -> Tensor:
    """The estimate of each token without gradient: float32 [n]."""
    difference = current.detach() - reference
    if kl.estimator == "k1":
        return difference
    return _k2(difference) if kl.estimator == "k2" else _k3(difference, kernels)


def kl_penalty(current: Tensor, reference: Tensor, kl: KLSection, kernels: Kernels) -> float:
    """What a rollout's reward loses: coef times the sum over its tokens, in float64, rounded once a sum."""
    return kl.coef * math.fsum(kl_value(current, reference, kl, kernels).tolist())


def _k2(difference: Tensor) -> Tensor:
    return (difference * difference) * 0.5


def _k3(difference: Tensor, kernels: Kernels) -> Tensor:
    # exp − 1 first: near 0 it is exact, and d is then added to what is about −d
    return (functions.exp(-difference, kernels) - 1.0) + difference


class _GradientOf(torch.autograd.Function):
    """The value of the second, the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, slope: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None
