"""rmsnorm and its gradients: a warp a row, the tree in blocks of 1024; dw is one chain over tokens for each column."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vexact_kernels import arguments, float32
from vexact_kernels.arguments import require, strided_rows
from vexact_kernels.contract import Segments, Stream, grad_dtype
from vexact_kernels.triton.functions import tree, widened
from vexact_kernels.triton.launch import Device, cdiv, power_of_two

WIDEST = float32.BLOCK**2  # a tree of one more level is not needed: no model is that wide
# A program takes so many values of narrow rows (the heads of q and k) at once, else its fixed work outweighs them.
NARROW = 256
# Columns of a step of the pass behind the tree: 1024 spill where a row's width is odd.
PART = 256
# dw: a thread owns one column, since a column is one chain. Loads of so many rows are started before the first is used.
COLUMNS = 128
IN_FLIGHT = 16


@triton.jit
def rmsnorm_kernel(
    x, x_row, w, eps, y, rstd, rows, R, D,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """y = w·rnd(x·rstd), rstd = 1 / sqrt(S(x²) / D + eps). Row number r is row r % R of token r // R."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x_at = x + (row // R) * x_row + (row % R) * D
    sums = tl.full((ROWS, BLOCKS), 0.0, tl.float32)
    for b in range(tl.cdiv(D, WIDTH)):
        column = b * WIDTH + tl.arange(0, WIDTH)
        inside = (row < rows)[:, None] & (column < D)[None, :]
        v = widened(tl.load(x_at[:, None] + column[None, :], mask=inside, other=0.0))
        sums = with_block(sums, b, tree(v * v, ROWS, WIDTH), BLOCKS)
    mean = tl.div_rn(tree(sums, ROWS, BLOCKS), tl.full((ROWS,), D, tl.float32))
    r = tl.div_rn(1.0, tl.sqrt_rn(mean + tl.full((), eps, tl.float32)))
    tl.store(rstd + row, r, mask=row < rows)
    for first in range(0, D, PART):
        column = first + tl.arange(0, PART)
        inside = (row < rows)[:, None] & (column < D)[None, :]
        v = widened(tl.load(x_at[:, None] + column[None, :], mask=inside, other=0.0))
        n = widened((v * r[:, None]).to(y.dtype.element_ty))
        scale = widened(tl.load(w + column, mask=column < D, other=0.0))
        tl.store(y + row[:, None] * D + column[None, :], (scale[None, :] * n).to(y.dtype.element_ty), mask=inside)


@triton.jit
def with_block(sums, b, s, BLOCKS: tl.constexpr):
    """sums [ROWS, BLOCKS] with s [ROWS] at place b."""
    if BLOCKS == 1:  # noqa: SIM108 (decided when compiling: only one of them is)
        sums = s[:, None]
    else:
        sums = tl.where((tl.arange(0, BLOCKS) == b)[None, :], s[:, None], sums)
    return sums


@triton.jit
def rmsnorm_dx_kernel(
    x, x_row, w, rstd, dy, dy_row, residual, residual_row, dx, rows, R, D,
    MEETS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """g = dy·w, h = x·rstd, c = S(g·h) / D; dx = rstd·(g − h·c), with MEETS added to the residual before rounding."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, offset = row // R, (row % R) * D
    x_at, dy_at = x + token * x_row + offset, dy + token * dy_row + offset
    r = tl.load(rstd + row, mask=row < rows, other=0.0)
    sums = tl.full((ROWS, BLOCKS), 0.0, tl.float32)
    for b in range(tl.cdiv(D, WIDTH)):
        # The tree's first two halvings, a quarter of the block at a time: all of it at once spills.
        column = b * WIDTH + tl.arange(0, WIDTH // 4)
        even = products(x_at, dy_at, w, r, column, row < rows, D)
        even += products(x_at, dy_at, w, r, column + WIDTH // 2, row < rows, D)
        odd = products(x_at, dy_at, w, r, column + WIDTH // 4, row < rows, D)
        odd += products(x_at, dy_at, w, r, column + (WIDTH // 4 + WIDTH // 2), row < rows, D)
        sums = with_block(sums, b, tree(even + odd, ROWS, WIDTH // 4), BLOCKS)
    c = tl.div_rn(tree(sums, ROWS, BLOCKS), tl.full((ROWS,), D, tl.float32))
    for first in range(0, D, PART):
        column = first + tl.arange(0, PART)
        inside = (row < rows)[:, None] & (column < D)[None, :]
        g, h = factors(x_at, dy_at, w, r, column, inside, D)
        d = r[:, None] * (g - h * c[:, None])
        if MEETS:
            met = residual + token * residual_row + offset
            d = widened(tl.load(met[:, None] + column[None, :], mask=inside, other=0.0)) + d
        tl.store(dx + row[:, None] * D + column[None, :], d.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def products(x_at, dy_at, w, r, column, present, D):
    """g·h of some columns, +0 where there is nothing. An infinite rstd would make NaN of a pad."""
    inside = present[:, None] & (column < D)[None, :]
    g, h = factors(x_at, dy_at, w, r, column, inside, D)
    return tl.where(inside, g * h, 0.0)


@triton.jit
def factors(x_at, dy_at, w, r, column, inside, D):
    """g and h of some columns [ROWS, WIDTH]."""
    scale = widened(tl.load(w + column, mask=column < D, other=0.0))
    g = widened(tl.load(dy_at[:, None] + column[None, :], mask=inside, other=0.0)) * scale[None, :]
    h = widened(tl.load(x_at[:, None] + column[None, :], mask=inside, other=0.0)) * r[:, None]
    return g, h


@triton.jit
def rmsnorm_dw_kernel(
    x, x_row, rstd, dy, dy_row, ends, fold, segments, lane, total, R, D,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """lane continues Σ dy·rnd(x·rstd) over tokens and the R rows inside; where a lane ends, total += lane, lane = +0.

    A step takes ROWS rows of TOKENS tokens. What is not there is (-0)·(+0), which leaves even a -0 as it is.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < D
    acc = tl.load(lane + column, mask=inside, other=0.0)
    sum = tl.load(total + column, mask=inside, other=0.0)
    begin = tl.full((), 0, tl.int64)
    for s in range(segments):
        end = tl.load(ends + s)
        for first in range(begin, end, TOKENS):
            for first_row in range(0, R, ROWS):
                token, row = tl.full((), 0, tl.int64) + first, tl.full((), 0, tl.int64) + first_row
                rstd_at = rstd + token * R + row
                x_at, dy_at = x + token * x_row + row * D, dy + token * dy_row + row * D
                scales, values, gradients = (), (), ()  # grown with +: Triton knows no starred tuple
                for _ in tl.static_range(TOKENS):
                    for j in tl.static_range(ROWS):
                        present = (token < end) & (row + j < R)
                        there = column < tl.where(present, D, 0)
                        scales = scales + (tl.load(rstd_at + j, mask=present, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
                        values = values + (tl.load(x_at + j * D + column, mask=there, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
                        gradients = gradients + (tl.load(dy_at + j * D + column, mask=there, other=-0.0),)  # type: ignore[assignment]  # noqa: RUF005
                    token += 1
                    rstd_at += R
                    x_at += x_row
                    dy_at += dy_row
                for i in tl.static_range(TOKENS * ROWS):
                    n = widened((widened(values[i]) * scales[i]).to(x.dtype.element_ty))
                    acc = tl.fma(widened(gradients[i]), n, acc)
        if tl.load(fold + s) != 0:
            sum = sum + acc
            acc = tl.full((COLUMNS,), 0.0, tl.float32)
        begin = end
    tl.store(lane + column, acc, mask=inside)
    tl.store(total + column, sum, mask=inside)


def _three(x: Tensor) -> tuple[int, int, int]:
    """N, R, D of x [N, D] or [N, R, D]."""
    if x.dim() not in (2, 3):
        raise ValueError(f"x of rmsnorm is {list(x.shape)}, needed is [N, D] or [N, R, D]")
    return x.size(0), x.size(1) if x.dim() == 3 else 1, x.size(-1)


def _tile(width: int) -> dict[str, int]:
    """Rows of that width as the kernels cut them: ROWS rows a program, in BLOCKS blocks of WIDTH."""
    if width > WIDEST:
        raise ValueError(f"a row of rmsnorm is {width} wide, at most {WIDEST} are possible")
    block = max(4, min(power_of_two(width), float32.BLOCK))  # dx cuts it in quarters
    blocks = power_of_two(cdiv(width, block))
    return {
        "ROWS": max(1, NARROW // block), "WIDTH": block, "BLOCKS": blocks, "PART": min(block, PART), "num_warps": 1,
    }  # fmt: skip


class Rmsnorm(Device):
    """rmsnorm, rmsnorm_dx, rmsnorm_dw of `contract.Kernels`."""

    def rmsnorm(self, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        (n, r, d), x = _three(x), strided_rows(x)
        require("weight of rmsnorm", w, x.dtype, (d,))
        y, rstd = self.empty(*x.shape, dtype=x.dtype), self.empty(*x.shape[:-1])
        tile = _tile(d)
        self.start(
            rmsnorm_kernel, (cdiv(n * r, tile["ROWS"]),), x, x.stride(0), w.contiguous(),
            float32.scalar(eps).item(), y, rstd, n * r, r, d, **tile,
        )  # fmt: skip
        return y, rstd

    def rmsnorm_dx(self, x: Tensor, w: Tensor, rstd: Tensor, dy: Tensor, residual: Tensor | None) -> Tensor:
        (n, r, d), x, grad = _three(x), strided_rows(x), grad_dtype(x.dtype)
        require("dy of rmsnorm", dy, grad, x.shape)
        require("weight of rmsnorm", w, x.dtype, (d,))
        require("rstd", rstd, torch.float32, x.shape[:-1])
        if residual is not None:
            require("residual of rmsnorm", residual, grad, x.shape)
        dy, met = strided_rows(dy), strided_rows(dy if residual is None else residual)
        dx, tile = self.empty(*x.shape, dtype=grad), _tile(d)
        # Without a number of registers ptxas spills some for occupancy.
        self.start(
            rmsnorm_dx_kernel, (cdiv(n * r, tile["ROWS"]),), x, x.stride(0), w.contiguous(), rstd.contiguous(),
            dy, dy.stride(0), met, met.stride(0), dx, n * r, r, d, MEETS=residual is not None, maxnreg=255, **tile,
        )  # fmt: skip
        return dx

    def rmsnorm_dw(self, x: Tensor, rstd: Tensor, dy: Tensor, segments: Segments, stream: Stream) -> None:
        (n, r, d), x = _three(x), strided_rows(x)
        require("dy of rmsnorm", dy, grad_dtype(x.dtype), x.shape)
        require("rstd", rstd, torch.float32, x.shape[:-1])
        lane, total = self.buffer("lane", stream.lane, (d,)), self.buffer("total", stream.total, (d,))
        parts, ends, fold = arguments.segments(segments, n)
        dy, rows = strided_rows(dy), min(max(r, 1), IN_FLIGHT)
        self.start(
            rmsnorm_dw_kernel, (cdiv(d, COLUMNS),), x, x.stride(0), rstd.contiguous(), dy, dy.stride(0),
            self.upload(ends), self.upload(fold), parts, lane, total, r, d,
            TOKENS=max(1, IN_FLIGHT // rows), ROWS=rows, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
