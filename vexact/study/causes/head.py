"""The last part in bfloat16: logits, the head's product, or the probabilities.

- `bf16-logits`: logits rounded to bfloat16, and widened again.
- `bf16-head`: hidden states and the head's weight rounded to bfloat16, multiplied by the same kernel, the logits
  rounded to bfloat16. With compute dtype bfloat16 the first two are that already, and this is `bf16-logits`.
- `bf16-softmax`: probabilities at the temperature rounded to bfloat16; drawn from is what they are when they are
  divided by their sum, and the log-probability of that law is what is recorded. A probability that is rounded to 0 is a
  token that cannot be drawn.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vexact.model.draws import Draws
from vexact.model.law import divisor
from vexact.model.ops import Edit, Logprobs, Ops, then
from vexact.model.parameters import Matrix
from vexact.model.policy import Policy
from vexact.recipe import MismatchSection
from vexact.study.causes.caused import Caused, OtherHead
from vexact_kernels import Kernels


def bf16_logits(policy: Policy, section: MismatchSection) -> Policy:
    return replace(policy, ops=RoundedLogits(policy.ops, "bf16-logits"))


def bf16_head(policy: Policy, section: MismatchSection) -> Policy:
    return replace(policy, ops=RoundedHead(policy.ops, policy.transformer.head))


def bf16_softmax(policy: Policy, section: MismatchSection) -> Policy:
    return replace(policy, ops=RoundedSoftmax(policy.ops, "bf16-softmax"))


def rounded(kernels: Kernels, x: Tensor) -> Tensor:
    """float32 with the digits of bfloat16."""
    return kernels.cast(kernels.cast(x, torch.bfloat16), torch.float32)


class RoundedLogits(Caused):
    def logits(self, hidden: Tensor, head: Matrix, rows: Tensor | None = None) -> Tensor:
        return rounded(self.kernels, self.inner.logits(hidden, head, rows))

    def logprobs(
        self, hidden: Tensor, rows: Tensor, head: Matrix, ids: Tensor, temperature: Tensor, edit: Edit | None = None
    ) -> Logprobs:
        mine: Edit = lambda logits, _: rounded(self.kernels, logits)  # noqa: E731
        return self.inner.logprobs(hidden, rows, head, ids, temperature, then(mine, edit))


class RoundedHead(OtherHead):
    def __init__(self, inner: Ops, head: Matrix) -> None:
        super().__init__(inner, "bf16-head")
        kernels = inner.kernels
        self.packed = kernels.pack(kernels.cast(kernels.unpack(head.packed), torch.bfloat16))

    def product(self, hidden: Tensor, head: Matrix) -> Tensor:
        narrow = self.kernels.cast(hidden, torch.bfloat16)
        return self.kernels.cast(self.kernels.matmul(narrow, self.packed), torch.float32)


class RoundedSoftmax(Caused):
    """Works on logits T·log p, whose law at the temperature T is p once more."""

    def draw(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner.draw(self._rounded(logits, draws.temperature), draws)

    def drawn_from(self, logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.drawn_from(self._rounded(logits, temperature), temperature)

    def logprobs(
        self, hidden: Tensor, rows: Tensor, head: Matrix, ids: Tensor, temperature: Tensor, edit: Edit | None = None
    ) -> Logprobs:
        def mine(logits: Tensor, part: Tensor) -> Tensor:
            places = torch.searchsorted(rows, part).to(temperature.device)
            return self._rounded(logits, temperature[places])

        return self.inner.logprobs(hidden, rows, head, ids, temperature, then(mine, edit))

    def _rounded(self, logits: Tensor, temperature: Tensor) -> Tensor:
        p = rounded(self.kernels, law(self.kernels, logits, temperature))
        # a row that is not finite stays as it is, so that it is found out
        log = torch.where(p == 0, -torch.inf, self.kernels.log(torch.where(p == 0, 1.0, p)))
        return torch.where(p.isfinite().all(dim=1, keepdim=True), log * divisor(temperature)[:, None], logits)


def law(kernels: Kernels, logits: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities float32 [R, V] of logits [R, V] at temperatures [R], where 0 means 1."""
    first = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    _, _, greatest, total, _ = kernels.logprob(logits, first, temperature, entropy=False)
    scaled = logits / divisor(temperature)[:, None]
    return kernels.exp((scaled - greatest[:, None]).contiguous()) / total[:, None]
