"""swiglu: y = rnd(rnd(silu(g))·u) of the halves g, u of a row, and its gradient."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vexact_kernels.arguments import require, strided_rows
from vexact_kernels.contract import grad_dtype
from vexact_kernels.triton.functions import exp, silu, widened
from vexact_kernels.triton.launch import Device, cdiv, power_of_two

WIDEST = 1024  # columns a program: eight a thread of four warps, 16 bytes of bfloat16


@triton.jit
def swiglu_kernel(x, x_row, y, F, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < F
    g = widened(tl.load(x + row * x_row + column, mask=inside, other=0.0))
    u = widened(tl.load(x + row * x_row + column + F, mask=inside, other=0.0))
    s = widened(silu(g).to(y.dtype.element_ty))
    tl.store(y + row * F + column, (s * u).to(y.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(x, x_row, dy, dy_row, dx, F, COLUMNS: tl.constexpr):
    """du = dy·s; dg = (dy·u)·(σ·fma(g, 1 − σ, 1))."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < F
    g = widened(tl.load(x + row * x_row + column, mask=inside, other=0.0))
    u = widened(tl.load(x + row * x_row + column + F, mask=inside, other=0.0))
    d = widened(tl.load(dy + row * dy_row + column, mask=inside, other=0.0))
    denominator = 1.0 + exp(-g)
    s = widened(tl.div_rn(g, denominator).to(x.dtype.element_ty))
    sigma = tl.div_rn(1.0, denominator)
    dg = (d * u) * (sigma * tl.fma(g, 1.0 - sigma, 1.0))
    at = dx + row * (2 * F) + column
    tl.store(at, dg.to(dx.dtype.element_ty), mask=inside)
    tl.store(at + F, (d * s).to(dx.dtype.element_ty), mask=inside)


def _half(width: int) -> int:
    if width % 2:
        raise ValueError(f"gate_up is {width} wide and has no halves")
    return width // 2


class Swiglu(Device):
    """swiglu, swiglu_backward of `contract.Kernels`."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        n, f, x = gate_up.size(0), _half(gate_up.size(1)), strided_rows(gate_up)
        y, columns = self.empty(n, f, dtype=x.dtype), min(power_of_two(f), WIDEST)
        self.start(swiglu_kernel, (n, cdiv(f, columns)), x, x.stride(0), y, f, COLUMNS=columns, num_warps=4)
        return y

    def swiglu_backward(self, gate_up: Tensor, dy: Tensor) -> Tensor:
        n, f, grad = gate_up.size(0), _half(gate_up.size(1)), grad_dtype(gate_up.dtype)
        require("dy of swiglu", dy, grad, (n, f))
        x, dy = strided_rows(gate_up), strided_rows(dy)
        dx, columns = self.empty(n, 2 * f, dtype=grad), min(power_of_two(f), WIDEST)
        self.start(
            swiglu_backward_kernel, (n, cdiv(f, columns)), x, x.stride(0), dy, dy.stride(0), dx, f,
            COLUMNS=columns, num_warps=4,
        )  # fmt: skip
        return dx
