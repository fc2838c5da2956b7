"""What a trainer asks a remedy, and in which words: log-ratios in, weights, masks and decisions about whole steps out.

Three policies at a prefix: q, the sampler as it recorded; p_s, the trainer's arithmetic at the weights θ_s that
sampled; p_θ, the trainer at θ. All of them differ by

    log p_θ − log q = drift + staleness + discrepancy        (drift + staleness: the lag ratio ℓ = p_θ/p_s)

and one sign holds everywhere: the trainer's minus the sampler's. The remedies themselves are `vexact/study/remedies`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from vexact_kernels import Kernels

BeforeUpdate = Literal["use", "discard"]
AfterUpdate = Literal["none", "sync", "rollback"]
Ratio = Literal["correction", "current", "drift"]
Base = Literal["none", "lag", "sampler"]
Clip = Literal["truncate", "ppo", "none"]


@dataclass(frozen=True)
class Ratios:
    """Log-ratios of sampled tokens, float32 [tokens], whole sequences behind one another.

    With π_old the trainer at the start of the step and p_θ the policy that is about to be updated, the same in the
    first update of a step, and in all of them for remedies that do not ask for it:

        correction   log π_old − log q      r_corr of arXiv 2605.14220
        current      log p_θ − log q        its r_ppo^rollout = r_ppo^train · r_corr
        drift        log p_θ − log π_old    its r_ppo^train, both the trainer's; 0 in the first update of a step

    cuts: the rows of each sequence. lag: log p_θ − log p_s of the current policy, for remedies that ask for it.
    sampler: log q as it was recorded. The functions below take any of the log-ratios.
    """

    correction: Tensor
    current: Tensor
    cuts: Sequence[slice]
    kernels: Kernels
    lag: Tensor | None = None
    sampler: Tensor | None = None
    drift: Tensor | None = None

    def of(self, ratio: Ratio) -> Tensor:
        """The log-ratio of that name. Raises ValueError where the caller gave no drift."""
        if ratio != "drift":
            return self.correction if ratio == "correction" else self.current
        if self.drift is None:
            raise ValueError("the drift needs log-probabilities of the trainer at the start of the step (Ratios.drift)")
        return self.drift

    def token(self, log: Tensor) -> Tensor:
        """p/q of each token: float32 [tokens]; 0 and infinity where float32 ends."""
        return self.kernels.exp(log)

    def sums(self, log: Tensor, mask: Tensor) -> Tensor:
        """Of each sequence the sum S over its tokens in the mask: float32 [sequences]."""
        kept = torch.where(mask, log, 0.0)
        return torch.stack([self.kernels.sum(kept[cut]) for cut in self.cuts])

    def counts(self, mask: Tensor) -> Tensor:
        """Of each sequence how many of its tokens are in the mask: float32 [sequences]."""
        return torch.stack([mask[cut].sum() for cut in self.cuts]).to(torch.float32)

    def means(self, log: Tensor, mask: Tensor) -> Tensor:
        """Of each sequence the mean over its tokens in the mask, 0 without any: float32 [sequences]."""
        return self.sums(log, mask) / self.counts(mask).clamp(min=1.0)

    def product(self, log: Tensor, mask: Tensor) -> Tensor:
        """Of each sequence the product over its tokens in the mask, exp of the sum S: float32 [sequences]."""
        return self.kernels.exp(self.sums(log, mask))

    def geometric(self, log: Tensor, mask: Tensor) -> Tensor:
        """Of each sequence the geometric mean over its tokens in the mask, exp of the mean: float32 [sequences].

        A sequence without a token there gives 1.
        """
        return self.kernels.exp(self.means(log, mask))

    def spread(self, sequences: Tensor) -> Tensor:
        """The value of its sequence for each token."""
        return torch.cat([value.expand(cut.stop - cut.start) for value, cut in zip(sequences, self.cuts, strict=True)])


@dataclass(frozen=True)
class Weighted:
    """weights: float32 [tokens], finite where kept. kept: bool [tokens], a part of the mask that was given."""

    weights: Tensor
    kept: Tensor


@dataclass(frozen=True)
class Centring:
    """That scores are centred with the sampler's distribution: A·(w_a s_a − Σ_v q_v w_v s_v), for every v a weight w_v.

    base: the ratio w is of: `none` (w = 1), `lag` (p_θ/p_s) or `sampler` (p_θ/q). clip: `truncate` puts w into
    low … high; `ppo` sets it to 0 where it is above high and A > 0, or below low and A < 0, as PPO's gradient is 0
    there; `none` leaves it.
    """

    base: Base = "none"
    clip: Clip = "truncate"
    low: float = 0.0
    high: float = 2.0


class Remedy(Protocol):
    """What a trainer asks. A remedy keeps no tensor of a step; what numbers it keeps from step to step is `state`."""

    centre: Centring | None  # how scores are centred with the sampler's distribution, None: not
    every_update: bool  # whether it is asked anew before each update, with the current policy scored for it
    beforehand: bool  # whether it looks at a step before its first update, for which π_old is scored
    needs_lag: bool  # whether it reads the lag ratio or a measure of it
    can_undo: bool  # whether it may answer `rollback`: the trainer then keeps what a step began with

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        """Of an update's tokens. mask: bool [tokens], those in question; advantages: float32 [tokens]."""
        ...

    def before_update(self, metrics: Mapping[str, float]) -> BeforeUpdate:
        """Whether the rollout batch is used, from what was measured of it before its first update: the `remedy_*`
        measures, those of `vexact/training/lag.py` and `acceptance.py`. Asked by the trainer.
        """
        ...

    def lr_scale(self, metrics: Mapping[str, float]) -> float:
        """What this step's learning rate is multiplied by, from the same measures. Asked by the trainer."""
        ...

    def after_update(self, metrics: Mapping[str, float]) -> AfterUpdate:
        """What is to happen behind a step, from all of its measures, `lag` and the discrepancy `tim/k3` among them.
        Asked, and obeyed, by the loop, once a step.
        """
        ...

    def state(self) -> dict[str, float]:
        """The numbers that it keeps from step to step, for a state on disk."""
        ...

    def take_up(self, state: Mapping[str, float]) -> None:
        """Go on from such numbers."""
        ...


class Plain:
    """A remedy that weighs nothing, uses every batch and asks for nothing behind it: what others begin with."""

    centre: Centring | None = None
    every_update = False
    beforehand = True
    needs_lag = False
    can_undo = False

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        return Weighted(torch.ones_like(ratios.correction), mask)

    def before_update(self, metrics: Mapping[str, float]) -> BeforeUpdate:
        return "use"

    def lr_scale(self, metrics: Mapping[str, float]) -> float:
        return 1.0

    def after_update(self, metrics: Mapping[str, float]) -> AfterUpdate:
        return "none"

    def state(self) -> dict[str, float]:
        return {}

    def take_up(self, state: Mapping[str, float]) -> None:
        pass
