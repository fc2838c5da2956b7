"""Score centering: the backward pass of log-probabilities with what the sampler would have drawn taken off.

Instead of the score s_a of the sampled token, the gradient of a row is w_a s_a − Σ_v q_v w_v s_v over the whole
vocabulary, q the sampler's distribution at that prefix and w a weight held constant (`Centring`); the sampler's mean of
it is 0. It takes logits of two more policies at the weights that sampled, which are not stored anywhere: their hidden
states are computed beside the recorded forward, on the same batch and by the same forward without a gradient, and
logits follow from them a part of the rows at a time.

That of the sampler is what its ops say that they draw from. Where their logits follow from the schedule, no forward
finds it again: then rollouts keep the law that they were drawn from, and it is read from there (`vexact.model.law`).

Source: Score Centering (arXiv 2609.20807); with the lag ratio as weight it is our reading of DLC (Li, Zhou and Lan,
abstract of 29 October 2026).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vexact.model.batch import Batch
from vexact.model.law import Kept, Law, Laws
from vexact.model.ops import Ops
from vexact.model.pages import Pages
from vexact.model.parameters import Matrix
from vexact.model.remedy import Centring
from vexact_kernels import Kernels, Softmax

if TYPE_CHECKING:
    from vexact.model.policy import Policy


class States:
    """Hidden states of a policy at some rows of a batch, and its way from them to logits."""

    def __init__(self, policy: Policy, batch: Batch, rows: Tensor) -> None:
        """rows: int64 [R] on the host."""
        count = int(batch.chunks.table.max()) + 1
        pages = Pages(policy.config, count, policy.dtype, policy.device, layers=1)
        self.ops: Ops = policy.ops.over(batch)
        self.head: Matrix = policy.transformer.head
        hidden = policy.transformer.forward(batch, pages, self.ops)
        self.rows, self.hidden = rows, hidden[rows.to(hidden.device, non_blocking=True)]

    def softmax(self, part: slice, ids: Tensor, temperature: Tensor) -> Softmax:
        """What the policy draws from at some of the rows, which is what it scores with but for causes of the sampler's
        side. ids, temperature: of those."""
        logits = self.ops.logits(self.hidden[part], self.head, self.rows[part])
        logits, own = self.ops.drawn_from(logits, temperature)
        _, _, largest, total, _ = self.ops.kernels.logprob(logits, ids, own, entropy=False)
        if own is temperature:
            return Softmax(logits, largest, total)
        return Law(logits.shape[1], logits, largest, total, own).softmax(self.ops.kernels, temperature)


class Centre:
    """One micro-batch's way back from log-probabilities.

    weights, totals: what the backward pass finds, float32 [R]: w_a, and W = Σ_v q_v w_v.
    """

    def __init__(self, centring: Centring, sampler: States | Kept, exact: States | None) -> None:
        self.centring, self.sampler, self.exact = centring, sampler, exact
        self._weights: dict[int, Tensor] = {}
        self._totals: dict[int, Tensor] = {}

    def back(
        self, kernels: Kernels, part: slice, policy: Softmax, ids: Tensor, temperature: Tensor, d_logprob: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """The gradient of logits in place of `logprob_backward`'s. d_logprob: float32 [rows of the part], of the loss,
        so that it is above 0 where the advantage is below."""
        sampler = self.sampler.softmax(part, ids, temperature)
        base = self._base(part, sampler, ids, temperature)
        low, high = (None, None) if base is None else self.bounds(d_logprob)
        outside = "zero" if self.centring.clip == "ppo" else "clamp"
        gradient, weights, totals = kernels.centre(
            policy, sampler, base, ids, temperature, d_logprob, low, high, outside, dtype
        )
        self._weights[part.start], self._totals[part.start] = weights, totals
        return gradient

    def _base(self, part: slice, sampler: Softmax, ids: Tensor, temperature: Tensor) -> Softmax | None:
        if self.centring.base == "none":
            return None
        if self.centring.base == "sampler":
            return sampler
        if self.exact is None:
            raise RuntimeError("centring by the lag ratio needs the exact policy at the sampler's weights")
        return self.exact.softmax(part, ids, temperature)

    def bounds(self, d_logprob: Tensor) -> tuple[Tensor, Tensor]:
        """Of the ratio in each row, float32 [rows]. PPO's bind on one side: above where A > 0, below where A < 0."""
        low, high = (torch.full_like(d_logprob, x) for x in (self.centring.low, self.centring.high))
        nothing, everything = torch.zeros_like(low), torch.full_like(high, torch.inf)
        if self.centring.clip == "none":
            return nothing, everything
        if self.centring.clip == "truncate":
            return low, high
        return torch.where(d_logprob > 0, low, nothing), torch.where(d_logprob < 0, high, everything)

    @property
    def weights(self) -> Tensor:
        """w_a of every row: float32 [R]. Only behind the backward pass."""
        return torch.cat([self._weights[start] for start in sorted(self._weights)])

    @property
    def totals(self) -> Tensor:
        """W = Σ_v q_v w_v of every row: float32 [R]. Only behind the backward pass."""
        return torch.cat([self._totals[start] for start in sorted(self._totals)])


class Centres:
    """What a step's micro-batches are centred with. sampler: the policy that sampled, as it computes; exact: the
    trainer's arithmetic at the same weights, needed for the lag ratio. laws: what the step's sequences were drawn from,
    in the place of what the sampler would compute again; of all of them or of none.
    """

    def __init__(
        self, centring: Centring, sampler: Policy, exact: Policy | None = None, laws: Laws | None = None
    ) -> None:
        self.centring, self.sampler, self.laws = centring, sampler, laws
        self.exact = exact if centring.base == "lag" else None
        self.last: Centre | None = None

    def over(self, batch: Batch, rows: Tensor) -> Centre:
        """Of one micro-batch, which is then the last one."""
        exact = None if self.exact is None else States(self.exact, batch, rows)
        sampler: States | Kept
        if self.laws:
            sampler = Kept(self.laws, batch, rows, self.sampler.ops.kernels)
        else:
            same = exact is not None and self.exact is self.sampler
            sampler = exact if exact is not None and same else States(self.sampler, batch, rows)
        self.last = Centre(self.centring, sampler, exact)
        return self.last
