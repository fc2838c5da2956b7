"""Keys and values in fewer bits, quantised as they are written.

Whoever reads them, the chunk that wrote them too, reads what the cache holds. So a token's bits do not depend on the
schedule.

- `fp8-kv`: float8 e4m3 with one scale for the whole tensor, which is 1: what engines use that were given no calibrated
  one. What is beyond ±448 becomes that, and what is below 2⁻¹⁰ becomes 0.
- `int8-kv`: int8 with a scale for each head and token. The product with the scale is rounded to the compute dtype.

The cache's memory stays in the compute dtype: what is simulated is the numbers. Gradients pass the rounding as if it
had not been there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from vexact.model.ops import Ops
from vexact.model.policy import Policy
from vexact.recipe import MismatchSection
from vexact.study.causes.caused import Caused
from vexact.study.causes.quantised import INT8_LARGEST, e4m3, integers
from vexact_kernels import Chunks


def fp8_kv(policy: Policy, section: MismatchSection) -> Policy:
    return replace(policy, ops=QuantisedCache(policy.ops, "fp8-kv", e4m3))


def int8_kv(policy: Policy, section: MismatchSection) -> Policy:
    return replace(policy, ops=QuantisedCache(policy.ops, "int8-kv", lambda x: integers(x, INT8_LARGEST)))


class QuantisedCache(Caused):
    """quantise: float32 [N, G, K] → the same shape."""

    def __init__(self, inner: Ops, label: str, quantise: Callable[[Tensor], Tensor]) -> None:
        super().__init__(inner, label)
        self.quantise = quantise

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, pages: tuple[Tensor, Tensor], scale: float
    ) -> Tensor:
        return self.inner.attention(q, self._written(k), self._written(v), chunks, pages, scale)

    def _written(self, x: Tensor) -> Tensor:
        wide = self.kernels.cast(x.contiguous(), torch.float32)
        return self.inner.stand_in(x, self.kernels.cast(self.quantise(wide), x.dtype))
