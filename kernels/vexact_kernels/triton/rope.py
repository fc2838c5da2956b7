"""rope: a head's two halves turned by the angles of the token's position, or back."""

from __future__ import annotations

from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from vexact_kernels.arguments import require, strided_rows
from vexact_kernels.triton.functions import widened
from vexact_kernels.triton.indices import Indices
from vexact_kernels.triton.launch import Device, cdiv, power_of_two

PAIRS = 1024  # a program: eight a thread of four warps, 16 bytes of bfloat16; its heads share one load of the angles


@triton.jit
def rope_kernel(
    x, x_row, positions, cos, sin, y, H, K,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token. K is the size of half a head, HALF the power of two that holds it."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    k = tl.arange(0, HALF).to(tl.int64)
    inside = (head < H)[:, None] & (k < K)[None, :]
    angle = tl.load(positions + token) * K + k
    c = tl.load(cos + angle, mask=k < K, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=k < K, other=0.0)[None, :]
    at = head[:, None] * (2 * K) + k[None, :]
    x1 = widened(tl.load(x + token * x_row + at, mask=inside, other=0.0))
    x2 = widened(tl.load(x + token * x_row + at + K, mask=inside, other=0.0))
    if INVERSE:
        y1 = x1 * c + x2 * s
        y2 = x2 * c - x1 * s
    else:
        y1 = x1 * c - x2 * s
        y2 = x2 * c + x1 * s
    out = y + token * H * (2 * K) + at
    tl.store(out, y1.to(y.dtype.element_ty), mask=inside)
    tl.store(out + K, y2.to(y.dtype.element_ty), mask=inside)


class Rope(Device):
    """rope of `contract.Kernels`."""

    @cached_property
    def _positions(self) -> Indices:
        return Indices()

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        n, heads, size = x.shape
        if size % 2:
            raise ValueError(f"a head is {size} wide and has no halves")
        limit, half = cos.size(0), size // 2
        require("cos", cos, torch.float32, (limit, half))
        require("sin", sin, torch.float32, (limit, half))
        positions, x = self._positions.inside("position", positions, n, limit), strided_rows(x)
        y, width = self.empty(n, heads, size, dtype=x.dtype), power_of_two(half)
        tile = min(power_of_two(heads), max(1, PAIRS // width))
        self.start(
            rope_kernel, (n, cdiv(heads, tile)), x, x.stride(0), positions, cos.contiguous(), sin.contiguous(), y,
            heads, half, INVERSE=inverse, HEADS=tile, HALF=width, num_warps=4,
        )  # fmt: skip
        return y
