"""The clipped surrogate of PPO and GRPO, one token at a time.

For a token with log-ratio Δ = log π_new − log π_old and ratio r = exp(Δ), advantage A and divisor n:

    loss = −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) / n       (PPO, arXiv 1707.06347, eq. 7)

The step's loss is the sum over its tokens. n comes from the whole step before any gradient is taken, so neither loss
nor gradient of a token knows its micro-batch. Everything is elementwise and exp is the kernels' own; what is clipped is
selected away before arithmetic and not multiplied by 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vexact.recipe import LossSection
from vexact_kernels import Kernels


@dataclass(frozen=True)
class TokenLosses:
    """Of one token each: loss (float32, with gradient), ratio (float32, without), clipped (bool)."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


class Exp(torch.autograd.Function):
    """exp of float32 by the kernels, with its gradient dy·y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Kernels) -> Tensor:
        y = kernels.exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return dy * y, None


def divisors(lengths: Sequence[int], loss: LossSection) -> Tensor:
    """What each token's loss is divided by: float32 [sum of lengths], rollouts behind one another.

    `token_mean`: all tokens of the step count alike; `sequence_mean`: all rollouts count alike (mean over rollouts of
    the mean over their tokens); `fixed`: a constant, `fixed_length` times the number of rollouts (Dr. GRPO).
    """
    lengths_ = torch.tensor(lengths, dtype=torch.int64)
    each = {
        "token_mean": torch.full_like(lengths_, int(lengths_.sum())),
        "sequence_mean": lengths_ * len(lengths),
        "fixed": torch.full_like(lengths_, loss.fixed_length * len(lengths)),
    }[loss.aggregation]
    return each.to(torch.float32).repeat_interleave(lengths_)


def clipped_surrogate(
    new: Tensor, old: Tensor, advantage: Tensor, divisor: Tensor, loss: LossSection, kernels: Kernels
) -> TokenLosses:
    """Losses of tokens, from float32 [n] each: logprobs under the current and the old policy, advantages, divisors.

    With w = A/n the loss is −(w·r) where the ratio is not clipped and −(w·bound) where it is; its gradient with respect
    to `new` is −w·r and 0. That equals the formula above: for A > 0 only the upper bound can bind, for A < 0 only the
    lower one, and A = 0 gives 0.
    """
    ratio = kernels.exp(new.detach() - old)
    low, high = 1.0 - loss.clip_low, 1.0 + loss.clip_high
    over, under = (advantage > 0) & (ratio > high), (advantage < 0) & (ratio < low)
    clipped = over | under
    dead = clipped | (advantage == 0)
    live = Exp.apply(torch.where(dead, 0.0, new - old), kernels)
    bound = torch.where(over, high, low)
    weight = advantage / divisor
    return TokenLosses(-(torch.where(dead, bound, live) * weight), ratio, clipped)
