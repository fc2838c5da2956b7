"""Where a norm rounds: `norm-cast`.

The exact engine rounds x·rstd to the compute dtype before the weight multiplies it, as Hugging Face's Llama does, and
rounds again behind it. This cause leaves the first rounding out: x·rstd·weight in float32, rounded once, as fused norms
do (torch's own among them). In float32 both are the same two operations, and nothing changes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vexact.model.parameters import Vector
from vexact.model.policy import Policy
from vexact.recipe import MismatchSection
from vexact.study.causes.caused import Caused


def norm_cast(policy: Policy, section: MismatchSection) -> Policy:
    return replace(policy, ops=RoundedOnce(policy.ops, "norm-cast"))


class RoundedOnce(Caused):
    def rmsnorm(self, x: Tensor, weight: Vector, eps: float) -> Tensor:
        kernels = self.kernels
        rstd = kernels.rmsnorm(x, weight.value, eps)[1]
        wide = kernels.cast(x.contiguous(), torch.float32) * rstd[..., None]
        y = kernels.cast(wide * kernels.cast(weight.value, torch.float32), x.dtype)
        return self.inner.stand_in(self.inner.rmsnorm(x, weight, eps), y)
