"""AdamW: one written expression an element, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vexact_kernels.arguments import require
from vexact_kernels.float32 import scalar
from vexact_kernels.triton.launch import Device, cdiv

BLOCK = 1024  # values a program: eight a thread of four warps, two loads of 16 bytes from each of four tensors


@triton.jit
def adamw_kernel(
    master, grad, first, second, n, clip, beta1, beta2, rest1, rest2, eps, decay, minus_step, rsqrt_correction2,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    g = tl.load(grad + i, mask=inside, other=0.0) * same(clip)
    m = tl.fma(same(beta1), tl.load(first + i, mask=inside, other=0.0), same(rest1) * g)
    v = tl.fma(same(beta2), tl.load(second + i, mask=inside, other=0.0), (same(rest2) * g) * g)
    d = tl.fma(tl.sqrt_rn(v), same(rsqrt_correction2), same(eps))
    p = tl.fma(same(minus_step), tl.div_rn(m, d), tl.load(master + i, mask=inside, other=0.0) * same(decay))
    tl.store(first + i, m, mask=inside)
    tl.store(second + i, v, mask=inside)
    tl.store(master + i, p, mask=inside)


@triton.jit
def same(value):
    """A float argument as float32, which it is already, except that the interpreter holds a subnormal in float64."""
    return tl.full((), value, tl.float32)


class Adamw(Device):
    """adamw of `contract.Kernels`."""

    def adamw(
        self,
        master: Tensor,
        grad: Tensor,
        first: Tensor,
        second: Tensor,
        *,
        clip: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
        step: float,
        rsqrt_correction2: float,
    ) -> None:
        shape, n = tuple(master.shape), master.numel()
        require("grad", grad, torch.float32, shape)
        state = [self.buffer(name, x, shape) for name, x in (("master", master), ("first", first), ("second", second))]
        scalars = (clip, beta1, beta2, 1.0 - beta1, 1.0 - beta2, eps, decay, -step, rsqrt_correction2)
        self.start(
            adamw_kernel, (cdiv(n, BLOCK),), state[0], grad.contiguous(), state[1], state[2], n,
            *(scalar(value).item() for value in scalars), BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
