"""The clipped surrogate of PPO and GRPO, one token at a time.

For a token with log-ratio Δ = log π − log μ of the current policy π and the behaviour policy μ that sampled it, ratio
r = exp(Δ), advantage A and divisor n:

    loss = −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) / n       (PPO, arXiv 1707.06347, eq. 7)

The step's loss is the sum over its tokens. n comes from the whole step before any gradient is taken, so neither loss
nor gradient of a token knows its micro-batch. Everything is elementwise and exp is the kernels' own; what is clipped is
selected away before arithmetic and not multiplied by 0. Run it, and its backward, inside `keeping_subnormals`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vexact.recipe import LossSection
from vexact.training import functions
from vexact.training.subnormals import ALONE
from vexact_kernels import Kernels


@dataclass(frozen=True)
class TokenLosses:
    """Of one token each: loss (float32, with gradient), ratio (float32, without), clipped (bool)."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


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
    current: Tensor, behaviour: Tensor, advantage: Tensor, divisor: Tensor, loss: LossSection, kernels: Kernels
) -> TokenLosses:
    """Losses of tokens, from float32 [n] each: logprobs under the current and the behaviour policy, advantages,
    divisors.

    With w = A/n the loss is −(w·r) where the ratio is not clipped and −(w·bound) where it is; its gradient with respect
    to `current` is −w·r and 0. That equals the formula above: for A > 0 only the upper bound can bind, for A < 0 only
    the lower one, and A = 0 gives 0.
    """
    columns = (x.split(ALONE) for x in (current, behaviour, advantage, divisor))
    parts = [_surrogate(c, b, a, d, loss, kernels) for c, b, a, d in zip(*columns, strict=True)]
    return TokenLosses(
        torch.cat([part.loss for part in parts]),
        torch.cat([part.ratio for part in parts]),
        torch.cat([part.clipped for part in parts]),
    )


def _surrogate(
    current: Tensor, behaviour: Tensor, advantage: Tensor, divisor: Tensor, loss: LossSection, kernels: Kernels
) -> TokenLosses:
    ratio = kernels.exp(current.detach() - behaviour)
    low, high = 1.0 - loss.clip_low, 1.0 + loss.clip_high
    over, under = (advantage > 0) & (ratio > high), (advantage < 0) & (ratio < low)
    clipped = over | under
    dead = clipped | (advantage == 0)
    live = functions.exp(torch.where(dead, 0.0, current - behaviour), kernels)
    bound = torch.where(over, high, low)
    weight = advantage / divisor
    return TokenLosses(-(torch.where(dead, bound, live) * weight), ratio, clipped)
