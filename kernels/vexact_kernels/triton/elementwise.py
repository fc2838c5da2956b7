"""add, cast, exp, log: one value from its counterparts, one rounding when it is stored."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vexact_kernels.arguments import CODES, require
from vexact_kernels.triton.functions import exp, log, widened
from vexact_kernels.triton.launch import Device, cdiv

BLOCK = 1024  # values a program: eight a thread of four warps, 16 bytes of bfloat16


@triton.jit
def add_kernel(a, b, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    p = widened(tl.load(a + i, mask=i < n, other=0.0))
    q = widened(tl.load(b + i, mask=i < n, other=0.0))
    tl.store(y + i, (p + q).to(y.dtype.element_ty), mask=i < n)


@triton.jit
def cast_kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = widened(tl.load(x + i, mask=i < n, other=0.0))
    tl.store(y + i, v.to(y.dtype.element_ty), mask=i < n)


@triton.jit
def exp_kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, exp(tl.load(x + i, mask=i < n, other=0.0)), mask=i < n)


@triton.jit
def log_kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, log(tl.load(x + i, mask=i < n, other=1.0)), mask=i < n)


class Elementwise(Device):
    """add, cast, exp, log of `contract.Kernels`."""

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        require("the second addend", b, a.dtype, a.shape)
        return self._each(add_kernel, a.dtype, a, b)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        _ = CODES[x.dtype], CODES[dtype]  # raises ValueError on what is no storage type
        return self._each(cast_kernel, dtype, x)

    def exp(self, x: Tensor) -> Tensor:
        require("x of exp", x, torch.float32, x.shape)
        return self._each(exp_kernel, torch.float32, x)

    def log(self, x: Tensor) -> Tensor:
        require("x of log", x, torch.float32, x.shape)
        return self._each(log_kernel, torch.float32, x)

    def _each(self, kernel: Any, dtype: torch.dtype, *operands: Tensor) -> Tensor:
        """The kernel's value of every element of operands of one shape."""
        y = self.empty(*operands[0].shape, dtype=dtype)
        n = y.numel()
        self.start(kernel, (cdiv(n, BLOCK),), *(x.contiguous() for x in operands), y, n, BLOCK=BLOCK, num_warps=4)
        return y
