"""A sampler that draws from another law than it says.

- `temperature`: it draws at `temperature` times the temperature that the recipe names, and records log-probabilities of
  that; the trainer scores at the recipe's. Greedy stays greedy.
- `raw-logprob`: it draws from the nucleus, the most probable tokens that together have `top_p` (arXiv 1904.09751), and
  records the log-probability of the law without that filter. So Δ is 0 in every bit, and no measure of Δ sees anything:
  what is wrong is which tokens are there.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vexact.model.draws import Draws
from vexact.model.ops import Edit, Logprobs, Ops
from vexact.model.parameters import Matrix
from vexact.model.policy import Policy
from vexact.recipe import MismatchSection
from vexact.study.causes.caused import Caused
from vexact.study.causes.head import law
from vexact_kernels import Kernels


def temperature(policy: Policy, section: MismatchSection) -> Policy:
    return replace(policy, ops=Hotter(policy.ops, section.temperature))


def raw_logprob(policy: Policy, section: MismatchSection) -> Policy:
    return replace(policy, ops=NucleusUnsaid(policy.ops, section.top_p))


class Hotter(Caused):
    def __init__(self, inner: Ops, factor: float) -> None:
        super().__init__(inner, f"temperature/{factor:g}")
        self.factor = factor

    def draw(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner.draw(logits, replace(draws, temperature=draws.temperature * self.factor))

    def drawn_from(self, logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.drawn_from(logits, temperature * self.factor)

    def logprobs(
        self, hidden: Tensor, rows: Tensor, head: Matrix, ids: Tensor, temperature: Tensor, edit: Edit | None = None
    ) -> Logprobs:
        return self.inner.logprobs(hidden, rows, head, ids, temperature * self.factor, edit)


class NucleusUnsaid(Caused):
    def __init__(self, inner: Ops, top_p: float) -> None:
        super().__init__(inner, f"raw-logprob/{top_p:g}")
        self.top_p = top_p

    def draw(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        ids, _, _ = self.inner.draw(self._kept(logits, draws.temperature), draws)
        logprob, _, _, _, finite = self.kernels.logprob(logits, ids, draws.temperature, entropy=False)
        return ids, logprob, finite

    def drawn_from(self, logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.drawn_from(self._kept(logits, temperature), temperature)

    def _kept(self, logits: Tensor, temperature: Tensor) -> Tensor:
        return torch.where(nucleus(self.kernels, logits, temperature, self.top_p), logits, -torch.inf)


def nucleus(kernels: Kernels, logits: Tensor, temperature: Tensor, top_p: float) -> Tensor:
    """Which tokens are kept, bool [R, V]: the fewest whose probability is at least top_p, ties by id, one at least.

    A row is summed by itself, in float64 from the most probable on: its batch changes nothing.
    """
    if top_p == 1.0:
        return torch.ones_like(logits, dtype=torch.bool)
    p = law(kernels, logits, temperature).cpu().numpy().astype(np.float64)
    order = np.argsort(-p, axis=1, kind="stable")
    ranked = np.take_along_axis(p, order, axis=1)
    before = np.cumsum(ranked, axis=1) - ranked
    kept = np.zeros_like(p, dtype=bool)
    np.put_along_axis(kept, order, before < top_p, axis=1)
    kept |= np.isnan(p)  # a row that is not finite stays as it is, and is found out
    return torch.from_numpy(kept).to(logits.device)
