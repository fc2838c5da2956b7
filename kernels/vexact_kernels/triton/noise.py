"""Standard normal numbers with addresses: (key of the row, column), and nothing else. As `cpu/noise.cpp`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vexact_kernels import float32
from vexact_kernels.arguments import require
from vexact_kernels.philox import NOISE
from vexact_kernels.triton.draw import philox, unsigned
from vexact_kernels.triton.functions import log
from vexact_kernels.triton.launch import Device, cdiv

BLOCK = 1024  # columns a program: 256 blocks of four words
TAG = tl.constexpr(NOISE)
A, B = (tl.constexpr(tuple(float.fromhex(c) for c in some)) for some in float32.NORMAL_CENTRAL)
C, D = (tl.constexpr(tuple(float.fromhex(c) for c in some)) for some in float32.NORMAL_TAIL)
EDGE = tl.constexpr(float32.CENTRAL)


@triton.jit
def normal(words):
    """Standard normal numbers of random words, as `float32.normal`; words uint64 below 2^32."""
    odd = 2 * (words >> 8).to(tl.int32) - 16777215
    q = odd.to(tl.float32) * 2.9802322387695312e-08  # 2^-25: exact
    size = tl.where(q < 0.0, -q, q)
    central = size < EDGE
    r = tl.fma(-q, q, 0.180625)
    a, b = tl.fma(r, A[0], A[1]), tl.fma(r, B[0], B[1])
    a, b = tl.fma(a, r, A[2]), tl.fma(b, r, B[2])
    a, b = q * tl.fma(a, r, A[3]), tl.fma(b, r, B[3])
    t = tl.sqrt_rn(-log(0.5 - size)) - 1.6
    c, d = tl.fma(t, C[0], C[1]), tl.fma(t, D[0], D[1])
    c, d = tl.fma(c, t, C[2]), tl.fma(d, t, D[2])
    c = tl.fma(c, t, C[3])
    return tl.div_rn(tl.where(central, a, tl.where(q < 0.0, -c, c)), tl.where(central, b, d))


@triton.jit
def noise_kernel(key, y, columns, parts, BLOCK: tl.constexpr):
    """A part of a row: lane l of a group of 64 columns has block 16·group + l, whose words are 16 columns apart."""
    row, part = (tl.program_id(0) // parts).to(tl.int64), (tl.program_id(0) % parts).to(tl.int64)
    lane = tl.arange(0, BLOCK // 4)
    block = part * (BLOCK // 4) + lane
    nothing = tl.zeros((BLOCK // 4,), tl.uint64)
    c0, c1, c2, c3 = philox(block.to(tl.uint64), nothing, nothing, nothing + TAG, unsigned(key, row))
    v = part * BLOCK + (lane // 16) * 64 + lane % 16
    at = y + row * columns + v
    tl.store(at, normal(c0), mask=v < columns)
    tl.store(at + 16, normal(c1), mask=v + 16 < columns)
    tl.store(at + 32, normal(c2), mask=v + 32 < columns)
    tl.store(at + 48, normal(c3), mask=v + 48 < columns)


class Noise(Device):
    """noise of `contract.Kernels`."""

    def noise(self, key: Tensor, columns: int) -> Tensor:
        (n,) = key.shape
        require("key", key, torch.int64, (n,))
        parts = cdiv(columns, BLOCK)
        y = self.empty(n, columns)
        self.start(noise_kernel, (n * parts,), key.contiguous(), y, columns, parts, BLOCK=BLOCK, num_warps=4)
        return y
