"""The loss of single tokens: policy loss, plus KL to the reference policy, minus the entropy bonus.

    l = (policy loss of `surrogate.py` with w = A·v/n) + β·k·ρ/n − η·H/n

v: the remedy's weight; n: the divisor of `aggregation.py`; β, k: coefficient and estimate of `kl.py`, ρ its importance
weight; η, H: coefficient and entropy in nats of the tempered distribution. An update's loss is the sum over its tokens.

Everything is elementwise, so neither loss nor gradient of a token knows its micro-batch; the log-ratio of a whole
sequence is one sum in the kernels' order over its own tokens. What a mask leaves out is replaced by 0 before anything
is computed from it, and gives exactly 0 in loss and gradient. Run it, and its backward, inside `keeping_subnormals`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from vexact.recipe import LossSection
from vexact.training.kl import kl_term
from vexact.training.subnormals import ALONE
from vexact.training.surrogate import SURROGATES, Terms
from vexact_kernels import Kernels


@dataclass(frozen=True)
class Tokens:
    """What the loss of tokens is made of: float32 [n] each, whole sequences behind one another.

    current: logprobs under the current policy, with gradient; entropy: likewise, needed with an entropy bonus. anchor:
    logprobs under π_old. divisor: of the aggregation. reference: logprobs under the reference policy, needed with a KL
    in the loss. sequence_log_ratio: `sequence_log_ratios`, needed by GSPO. sequence_length: `sequence_lengths`, needed
    by GSPO where `epsilon_length` scales its bounds. weight: of a remedy, by default 1. mask: bool, which tokens are
    trained, by default all.
    """

    current: Tensor
    anchor: Tensor
    advantage: Tensor
    divisor: Tensor
    entropy: Tensor | None = None
    reference: Tensor | None = None
    sequence_log_ratio: Tensor | None = None
    sequence_length: Tensor | None = None
    weight: Tensor | None = None
    mask: Tensor | None = None

    def split(self, size: int) -> Iterator[Tokens]:
        """Parts of at most that many tokens."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        parts = {name: column.split(size) for name, column in columns.items() if column is not None}
        for index in range(len(parts["current"])):
            yield Tokens(**{name: part[index] for name, part in parts.items()})

    def masked(self) -> Tokens:
        """The same with harmless values where the mask leaves out; their gradient is exactly 0."""
        if self.mask is None:
            return self
        columns = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "mask"}
        neutral = {"divisor": 1.0, "sequence_length": 1.0}
        kept = {
            name: torch.where(self.mask, column, neutral.get(name, 0.0))
            for name, column in columns.items()
            if column is not None
        }
        return Tokens(**kept)


@dataclass(frozen=True)
class TokenLosses:
    """Of one token each: loss (float32, with gradient); without: the ratio that may be clipped, whether it was (bool),
    and the estimate of KL to the reference policy (0 without one)."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    kl: Tensor


def token_losses(tokens: Tokens, loss: LossSection, kernels: Kernels) -> TokenLosses:
    """Losses of tokens, [n] each. Needs at least one token."""
    parts = [_losses(part.masked(), loss, kernels) for part in tokens.split(ALONE)]
    columns = (torch.cat([getattr(part, field.name) for part in parts]) for field in fields(TokenLosses))
    return TokenLosses(*columns)


def _losses(tokens: Tokens, loss: LossSection, kernels: Kernels) -> TokenLosses:
    weight = tokens.advantage if tokens.weight is None else tokens.advantage * tokens.weight
    terms = Terms(
        tokens.current, tokens.anchor, tokens.advantage, weight / tokens.divisor, tokens.sequence_log_ratio,
        tokens.sequence_length,
    )  # fmt: skip
    policy = SURROGATES[loss.name](terms, loss, kernels)
    total, kl = policy.loss, torch.zeros_like(policy.ratio)
    if tokens.reference is not None:
        estimate = kl_term(tokens.current, tokens.reference, loss.kl, kernels)
        scale = torch.full_like(tokens.divisor, loss.kl.coef) / tokens.divisor
        if loss.kl.importance:
            scale = scale * kernels.exp(tokens.current.detach() - tokens.anchor)
        total, kl = total + estimate * scale, estimate.detach()
    if loss.entropy_coef and tokens.entropy is not None:
        total = total - tokens.entropy * (torch.full_like(tokens.divisor, loss.entropy_coef) / tokens.divisor)
    return TokenLosses(total, policy.ratio, policy.clipped, kl)


def sequence_columns(
    current: Tensor, anchor: Tensor, cuts: Sequence[slice], mask: Tensor | None, kernels: Kernels
) -> dict[str, Tensor]:
    """The columns of `Tokens` that know a whole sequence: arguments as of `sequence_log_ratios`."""
    return {
        "sequence_log_ratio": sequence_log_ratios(current, anchor, cuts, mask, kernels),
        "sequence_length": sequence_lengths(cuts, mask).to(current.device),
    }


def sequence_log_ratios(
    current: Tensor, anchor: Tensor, cuts: Sequence[slice], mask: Tensor | None, kernels: Kernels
) -> Tensor:
    """Of each token its sequence's mean over trained tokens of log π − log π_old: float32 [n], without gradient.

    cuts: the rows of each sequence, in order and without gaps. One sum S a sequence, divided by the number of its
    trained tokens: a sequence is never cut over micro-batches, so the mean does not know them.
    """
    difference = current.detach() - anchor
    if mask is not None:
        difference = torch.where(mask, difference, 0.0)
    totals = torch.cat([kernels.sum(difference[cut]).expand(cut.stop - cut.start) for cut in cuts])
    return totals / sequence_lengths(cuts, mask).to(totals.device)


def sequence_lengths(cuts: Sequence[slice], mask: Tensor | None) -> Tensor:
    """Of each token the number of trained tokens of its sequence: float32 [n], where the mask is."""
    sizes = [cut.stop - cut.start for cut in cuts]
    if mask is None:
        return torch.cat([torch.full((size,), float(size)) for size in sizes])
    counts = (mask[cut].sum().to(torch.float32) for cut in cuts)  # never read back: a device goes on meanwhile
    return torch.cat([count.expand(size) for count, size in zip(counts, sizes, strict=True)])
