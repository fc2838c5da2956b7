"""Remedies: weights and masks computed from how far the trainer's policy is from what the sampler drew from.

A remedy looks at the log-ratios log p − log q of an update's tokens before any gradient is taken: q is the sampler as
it recorded, p the trainer: π_old at the start of the step (the *correction*), or the current policy, scored anew before
each update where a remedy asks for it (`every_update`). It answers with a weight for each token, held constant, and
with which tokens are trained. What it rejects leaves the loss, the gradient and every divisor. Its two other answers
are about whole steps.

"IS" alone is never written: these are token TIS and sequence rejection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from vexact.recipe import RemedySection
from vexact_kernels import Kernels

BeforeUpdate = Literal["use", "discard"]
AfterUpdate = Literal["none", "sync", "rollback", "scale_lr"]
Level = Literal["product", "geometric"]


@dataclass(frozen=True)
class Ratios:
    """Log-ratios log p − log q of sampled tokens to the sampler, float32 [tokens], whole sequences behind one another.

    correction: p is π_old, the trainer at the start of the step; current: p is the policy that is about to be updated,
    the same in the first update of a step, and in all of them for remedies that do not ask for it. cuts: the rows of
    each sequence. The functions below take either.
    """

    correction: Tensor
    current: Tensor
    cuts: Sequence[slice]
    kernels: Kernels

    def token(self, log: Tensor) -> Tensor:
        """p/q of each token: float32 [tokens]; 0 and infinity where float32 ends."""
        return self.kernels.exp(log)

    def product(self, log: Tensor, mask: Tensor) -> Tensor:
        """Of each sequence the product over its tokens in the mask, exp of the sum S: float32 [sequences]."""
        return self.kernels.exp(self._sums(log, mask))

    def geometric(self, log: Tensor, mask: Tensor) -> Tensor:
        """Of each sequence the geometric mean over its tokens in the mask, exp of the mean: float32 [sequences].

        A sequence without a token there gives 1.
        """
        counts = torch.stack([mask[cut].sum() for cut in self.cuts]).clamp(min=1)
        return self.kernels.exp(self._sums(log, mask) / counts.to(torch.float32))

    def _sums(self, log: Tensor, mask: Tensor) -> Tensor:
        kept = torch.where(mask, log, 0.0)
        return torch.stack([self.kernels.sum(kept[cut]) for cut in self.cuts])

    def spread(self, sequences: Tensor) -> Tensor:
        """The value of its sequence for each token."""
        return torch.cat([value.expand(cut.stop - cut.start) for value, cut in zip(sequences, self.cuts, strict=True)])


@dataclass(frozen=True)
class Weighted:
    """weights: float32 [tokens], finite where kept. kept: bool [tokens], a part of the mask that was given."""

    weights: Tensor
    kept: Tensor


class Remedy(Protocol):
    """What a trainer asks. A remedy keeps no tensor of a step."""

    centre: bool  # whether scores are to be centred with the sampler's distribution
    every_update: bool  # whether it is asked anew before each update, with the current policy scored for it

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        """Of an update's tokens. mask: bool [tokens], those in question; advantages: float32 [tokens]."""
        ...

    def before_update(self, metrics: Mapping[str, float]) -> BeforeUpdate:
        """Whether the rollout batch is used, from the `remedy_*` measures of its first ratios. Asked by the trainer."""
        ...

    def after_update(self, metrics: Mapping[str, float]) -> AfterUpdate:
        """What is to happen behind a step, from all of its measures. Asked, and obeyed, by the loop."""
        ...


class _Plain:
    """Uses every batch and asks for nothing behind it."""

    centre = False
    every_update = False

    def before_update(self, metrics: Mapping[str, float]) -> BeforeUpdate:
        return "use"

    def after_update(self, metrics: Mapping[str, float]) -> AfterUpdate:
        return "none"


class TokenTIS(_Plain):
    """Token truncated importance sampling: weight max(floor, min(π_old/q, cap)) of each token (TRL's `token_truncate`,
    verl's `rollout_is: token`; the cap of 2 is theirs). With floor 0 biased downwards only where the cap binds.
    """

    def __init__(self, cap: float = 2.0, floor: float = 0.0) -> None:
        if not 0.0 <= floor <= cap or cap <= 0.0:
            raise ValueError(f"token TIS needs 0 ≤ floor ≤ cap, cap above 0, not floor {floor} and cap {cap}")
        self.cap, self.floor = cap, floor

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        return Weighted(torch.clamp(ratios.token(ratios.correction), self.floor, self.cap), mask)


class SequenceRejection(_Plain):
    """Keeps a sequence where low ≤ value ≤ high and rejects it whole elsewhere; weights are 1.

    value: of π_old/q, or of π/q with `every_update`, the `product` over its tokens, whose spread grows with length T
    like √T, or their `geometric` mean, whose spread shrinks like 1/√T: no bound carries over to another length. verl's
    `seq_sum_k1` and `seq_mean_k1` are these with bounds on the inverse; TRL's `sequence_mask` rejects by the product
    and also weighs by it. A value that is not a number is kept, so that it is seen.
    """

    def __init__(self, low: float, high: float, level: Level = "product", every_update: bool = False) -> None:
        if not 0.0 <= low <= high:
            raise ValueError(f"sequence rejection needs 0 ≤ low ≤ high, not {low} and {high}")
        self.low, self.high, self.level, self.every_update = low, high, level, every_update

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        log = ratios.current if self.every_update else ratios.correction
        value = ratios.product(log, mask) if self.level == "product" else ratios.geometric(log, mask)
        kept = ~((value < self.low) | (value > self.high))
        return Weighted(torch.ones_like(ratios.correction), mask & ratios.spread(kept))


class Together:
    """Several remedies, one behind the other: each sees what those before it kept; weights are multiplied."""

    def __init__(self, *remedies: Remedy) -> None:
        self.remedies = remedies
        self.centre = any(remedy.centre for remedy in remedies)
        self.every_update = any(remedy.every_update for remedy in remedies)

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        weights = torch.ones_like(ratios.correction)
        for remedy in self.remedies:
            found = remedy.weights(ratios, mask, advantages)
            weights, mask = weights * found.weights, found.kept
        return Weighted(weights, mask)

    def before_update(self, metrics: Mapping[str, float]) -> BeforeUpdate:
        answers = [remedy.before_update(metrics) for remedy in self.remedies]
        return "discard" if "discard" in answers else "use"

    def after_update(self, metrics: Mapping[str, float]) -> AfterUpdate:
        """The only answer that is not `none`. Raises RuntimeError where remedies want different things."""
        wanted = {remedy.after_update(metrics) for remedy in self.remedies} - {"none"}
        if len(wanted) > 1:
            raise RuntimeError(f"remedies disagree about what follows a step: {', '.join(sorted(wanted))}")
        return wanted.pop() if wanted else "none"


def remedy_of(section: RemedySection) -> Remedy | None:
    """The remedy that a recipe names, None where it names none. Rejection comes first, then token weights."""
    chosen: list[Remedy] = []
    if section.sequence != "off":
        level: Level = "product" if section.sequence == "product" else "geometric"
        every_update = section.sequence_ratio == "current"
        chosen.append(SequenceRejection(section.sequence_low, section.sequence_high, level, every_update))
    if section.token_cap:
        chosen.append(TokenTIS(section.token_cap, section.token_floor))
    if len(chosen) > 1:
        return Together(*chosen)
    return chosen[0] if chosen else None
