"""Policy losses of single tokens. Their gradient, and not their value, is what they are made for.

Of a token: log-probability log π under the current policy and log π_old under the anchor, ratio r = exp(log π − log
π_old), advantage A, and weight w = A·(remedy's weight)/n, where n is the divisor of the aggregation. Each function
gives loss and gradient with respect to log π; both are elementwise, so neither knows the batch around the token. What
is clipped is selected away before arithmetic and not multiplied by 0: a ratio that overflows is harmless there, and is
not hidden where it counts. exp is the kernels' own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vexact.recipe import LossSection
from vexact.training import functions
from vexact_kernels import Kernels


@dataclass(frozen=True)
class Surrogate:
    """loss: float32 [n], with gradient. ratio: float32 [n], without, the one that is clipped. clipped: bool [n]."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


@dataclass(frozen=True)
class Terms:
    """What a policy loss is made of: float32 [n] each, only `current` with gradient.

    sequence_log_ratio: of each token's sequence the mean over its tokens of log π − log π_old (GSPO), else None.
    sequence_length: of each token's sequence the number of trained tokens, needed by GSPO with `epsilon_length`.
    """

    current: Tensor
    anchor: Tensor
    advantage: Tensor
    weight: Tensor
    sequence_log_ratio: Tensor | None = None
    sequence_length: Tensor | None = None


def reinforce(terms: Terms, loss: LossSection, kernels: Kernels) -> Surrogate:
    """l = −w·log π, gradient −w (Williams 1992; REINFORCE++, arXiv 2501.03262; RLOO, arXiv 2402.14740; verl's `gpg`).

    No ratio and no clip: right on-policy only. A = 0 gives exactly 0. The ratio is measured.
    """
    ratio = kernels.exp(terms.current.detach() - terms.anchor)
    live = torch.where(terms.advantage == 0, 0.0, terms.current)
    return Surrogate(-(live * terms.weight), ratio, torch.zeros_like(ratio, dtype=torch.bool))


def ppo(terms: Terms, loss: LossSection, kernels: Kernels) -> Surrogate:
    """l = −min(r·w, clip(r, 1 − ε_low, 1 + ε_high)·w): PPO, arXiv 1707.06347, eq. 7; ε_high > ε_low is the clip-higher
    of DAPO, arXiv 2503.14476, eq. 10. With `dual_clip` c also l = −max(·, c·w) where A < 0 (arXiv 1912.09729;
    verl's clip_ratio_c, TRL's delta). The gradient is −w·r where nothing binds, else 0.

    For A > 0 only the upper bound can bind, for A < 0 only the lower one and c; A = 0 gives 0.
    """
    return _clipped(terms.current - terms.anchor, terms, loss, kernels)


def gspo(terms: Terms, loss: LossSection, kernels: Kernels) -> Surrogate:
    """l = −min(s·w, clip(s, 1 − ε_low, 1 + ε_high)·w) with the sequence's s = exp(mean of log π − log π_old): GSPO,
    arXiv 2507.18071, eq. 5 to 7. The gradient is −w·s for each of its tokens where s is not clipped, else 0.

    That is the gradient of the sequence's own loss under every aggregation, as each divides all tokens of a sequence
    alike (eq. 10; written per token as in eq. 13, and in verl). A sequence is clipped whole.

    A mean over T tokens spreads like 1/√T, so a bound that suits one length clips nearly all or nearly nothing of
    another: with `epsilon_length` L both ε are those of L tokens, and ε·√(L/T) elsewhere (our reading).
    """
    if terms.sequence_log_ratio is None:
        raise ValueError("gspo needs sequence_log_ratio")
    # The difference is 0 and carries the gradient: s is a constant of the other tokens' log-probabilities.
    through = terms.current - terms.current.detach()
    return _clipped(terms.sequence_log_ratio + through, terms, loss, kernels)


def cispo(terms: Terms, loss: LossSection, kernels: Kernels) -> Surrogate:
    """l = −sg(min(r, cap))·w·log π, gradient −min(r, cap)·w: CISPO of MiniMax-M1, arXiv 2506.13585, eq. 4 and 5, whose
    cap is 1 + ε_high and which has no lower bound. `cap` is the largest weight itself, as TRL's epsilon_high is.

    Clipped tokens keep a gradient. A = 0 gives exactly 0.
    """
    ratio = kernels.exp(terms.current.detach() - terms.anchor)
    live = torch.where(terms.advantage == 0, 0.0, terms.current)
    capped = torch.clamp(ratio, max=loss.cap)
    return Surrogate(-(live * (capped * terms.weight)), ratio, ratio > loss.cap)


def _clipped(log_ratio: Tensor, terms: Terms, loss: LossSection, kernels: Kernels) -> Surrogate:
    ratio = kernels.exp(log_ratio.detach())
    positive, negative = terms.advantage > 0, terms.advantage < 0
    low, high = _bounds(terms, loss)
    dual = torch.full_like(ratio, dual_of(loss))
    over, under, beyond = positive & (ratio > high), negative & (ratio < low), negative & (ratio > dual)
    clipped = over | under | beyond
    dead = clipped | ~(positive | negative)
    live = functions.exp(torch.where(dead, 0.0, log_ratio), kernels)
    bound = torch.where(over, high, torch.where(beyond, dual, low))
    return Surrogate(-(torch.where(dead, bound, live) * terms.weight), ratio, clipped)


def _bounds(terms: Terms, loss: LossSection) -> tuple[Tensor, Tensor]:
    """1 − ε_low and 1 + ε_high of each token, float32 [n]. Square root and quotient are correctly rounded."""
    like = terms.anchor
    if not loss.epsilon_length:
        return torch.full_like(like, 1.0 - loss.epsilon_low), torch.full_like(like, 1.0 + loss.epsilon_high)
    if terms.sequence_length is None:
        raise ValueError("gspo with epsilon_length needs sequence_length")
    scale = torch.sqrt(torch.full_like(like, loss.epsilon_length) / terms.sequence_length)
    return 1.0 - loss.epsilon_low * scale, 1.0 + loss.epsilon_high * scale


def dual_of(loss: LossSection) -> float:
    """The ratio above which PPO clips where A < 0; GSPO has none."""
    return loss.dual_clip if loss.name == "ppo" and loss.dual_clip else float("inf")


SURROGATES: dict[str, Callable[[Terms, LossSection, Kernels], Surrogate]] = {
    "reinforce": reinforce,
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
}
