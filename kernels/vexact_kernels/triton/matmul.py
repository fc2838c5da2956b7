"""y = x·wᵀ + bias, dx, dw and db: one chain of fused multiply-adds an output; in the tensorcore profile, matrix units.

y and dx are one kernel: a product of rows with a weight whose strides say along which side it is summed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vexact_kernels import arguments
from vexact_kernels.arguments import require, strided_rows
from vexact_kernels.contract import Packed, Segments, Stream, grad_dtype
from vexact_kernels.triton.launch import Device, cdiv
from vexact_kernels.triton.tiles import Product, options_of


@triton.jit
def product_kernel(
    a, a_row, b, b_column, b_depth, bias, out, out_row, partial, M, N, K,
    HAS_BIAS: tl.constexpr, UNITS: tl.constexpr, SLICE: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[m, n] = Σ_k a[m, k]·b[n, k]; with SPLIT, slice number program_id(1) of that sum goes to `partial`."""
    tiles = tl.cdiv(N, COLUMNS)
    tile_m, tile_n = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    m = tile_m.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tile_n.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    a_at = a + m * a_row
    b_at = b + n * b_column
    if SPLIT:
        first = tl.program_id(1) * SLICE
        acc = slice_sum(a_at, b_at, b_depth, m, n, M, N, first, tl.minimum(first + SLICE, K), ROWS, COLUMNS, DEPTH)
        at = (tl.program_id(1).to(tl.int64) * M + m[:, None]) * N + n[None, :]
        tl.store(partial + at, acc, mask=(m < M)[:, None] & (n < N)[None, :])
    else:
        if UNITS:
            acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
            for first in range(0, K, SLICE):
                end = tl.minimum(first + SLICE, K)
                acc = plus(slice_sum(a_at, b_at, b_depth, m, n, M, N, first, end, ROWS, COLUMNS, DEPTH), acc)
        else:
            acc = chain(a_at, b_at, b_depth, m, n, M, N, K, ROWS, COLUMNS, DEPTH)
        finish(acc, m, n, M, N, bias, out, out_row, HAS_BIAS)


@triton.jit
def chain(
    a_at, b_at, b_depth, m, n, M, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Float32 operands, k ascending."""
    acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for first in range(0, K, DEPTH):
        k = first + tl.arange(0, DEPTH).to(tl.int64)
        x = tl.load(a_at[:, None] + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(b_at[None, :] + (k * b_depth)[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def slice_sum(
    a_at, b_at, b_depth, m, n, M, N, begin, end, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Sixteen-bit operands on the matrix units, from begin to end."""
    acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for first in range(begin, end, DEPTH):
        k = first + tl.arange(0, DEPTH).to(tl.int64)
        x = tl.load(a_at[:, None] + k[None, :], mask=(m < M)[:, None] & (k < end)[None, :], other=0.0)
        w = tl.load(b_at[None, :] + (k * b_depth)[:, None], mask=(n < N)[None, :] & (k < end)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit
def plus(acc, v):
    """acc + v behind a product. Where K is 1 Triton would turn `product + v` into a product that starts with v."""
    return tl.fma(acc, 1.0, v)


@triton.jit
def finish(acc, m, n, M, N, bias, out, out_row, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        acc = plus(acc, tl.broadcast_to(tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :], acc.shape))
    y = plus(acc, tl.zeros_like(acc)).to(out.dtype.element_ty)
    tl.store(out + m[:, None] * out_row + n[None, :], y, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def gather_kernel(partial, bias, out, out_row, M, N, slices, HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr):
    """The slices of a product, added ascending."""
    m = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    n = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (m < M)[:, None] & (n < N)[None, :]
    acc = tl.full((1, COLUMNS), 0.0, tl.float32)
    for s in range(slices):
        row = (tl.arange(0, 1).to(tl.int64) + s) * M + m
        acc += tl.load(partial + row[:, None] * N + n[None, :], mask=inside, other=0.0)
    finish(acc, m, n, M, N, bias, out, out_row, HAS_BIAS)


@triton.jit
def dw_kernel(
    dy, dy_row, x, x_row, x_column, ends, fold, segments, lane, total, N, K,
    LANE_IS_ZERO: tl.constexpr, TOTAL_IS_ZERO: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """lane[n, k] continues Σ_m dy[m, n]·x[m, k], m ascending; where a lane ends, total += lane and lane = +0.

    Behind a segment's last token stands (-0)·(+0): adding -0 leaves even a -0 as it is.
    """
    tiles = tl.cdiv(K, COLUMNS)
    n = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = (tl.program_id(0) % tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (n < N)[:, None] & (k < K)[None, :]
    at = n[:, None] * K + k[None, :]
    acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    if not LANE_IS_ZERO:
        acc = tl.load(lane + at, mask=inside, other=0.0)
    sum = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    if not TOTAL_IS_ZERO:
        sum = tl.load(total + at, mask=inside, other=0.0)
    begin = tl.full((), 0, tl.int64)
    for s in range(segments):
        end = tl.load(ends + s)
        for first in range(begin, end, DEPTH):
            m = first + tl.arange(0, DEPTH).to(tl.int64)
            d = tl.load(dy + (m * dy_row)[None, :] + n[:, None], mask=(n < N)[:, None] & (m < end)[None, :], other=-0.0)
            v = tl.load(
                x + (m * x_row)[:, None] + (k * x_column)[None, :],
                mask=(k < K)[None, :] & (m < end)[:, None], other=0.0,
            )  # fmt: skip
            acc = tl.dot(d.to(tl.float32), v.to(tl.float32), acc, input_precision="ieee")
        if tl.load(fold + s) != 0:
            sum = sum + acc
            acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        begin = end
    tl.store(lane + at, acc, mask=inside)
    tl.store(total + at, sum, mask=inside)


class Matmul(Device):
    """pack, unpack, matmul, matmul_dx, matmul_dw, matmul_db of `contract.Kernels`. A packed weight is the weight."""

    def pack(self, weight: Tensor) -> Packed:
        rows, columns = weight.shape
        return Packed(rows, columns, weight.dtype, weight.detach().clone(memory_format=torch.contiguous_format), 0)

    def unpack(self, packed: Packed) -> Tensor:
        return packed.data.clone()

    def matmul(self, x: Tensor, w: Packed, bias: Tensor | None = None, *, logits: bool = False) -> Tensor:
        require("x of matmul", x, w.dtype, (x.size(0), w.columns))
        if bias is not None:
            require("bias", bias, w.dtype, (w.rows,))
            bias = bias.contiguous()
        return self._product(x, w.data, w.rows, 0, bias, torch.float32 if logits else w.dtype)

    def matmul_dx(self, dy: Tensor, w: Packed) -> Tensor:
        require("dy of matmul", dy, grad_dtype(w.dtype), (dy.size(0), w.rows))
        return self._product(dy, w.data, w.columns, 1, None, dy.dtype)

    def _product(self, a: Tensor, b: Tensor, n: int, side: int, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """a [M, K] times b, whose dimension `side` is the N that stays, → [M, N] in `dtype`."""
        (m, k), a = a.shape, strided_rows(a)
        out = self.empty(m, n, dtype=dtype)
        units = self.matrix_units and a.dtype == b.dtype and a.element_size() == 2
        tile = self._tile(m, units)
        slices = cdiv(k, self.tiles.slice) if units and tile is self.tiles.few_units else 1
        partial = self.empty(slices, m, n) if slices > 1 else out
        tiles = cdiv(m, tile.rows) * cdiv(n, tile.columns)
        self.start(
            product_kernel, (tiles, slices), a, a.stride(0), b, b.stride(side), b.stride(1 - side),
            out if bias is None else bias, out, n, partial, m, n, k,
            HAS_BIAS=bias is not None, UNITS=units, SLICE=self.tiles.slice, SPLIT=slices > 1,
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, **options_of(tile),
        )  # fmt: skip
        if slices > 1:
            self.start(
                gather_kernel, (m, cdiv(n, 256)), partial, out if bias is None else bias, out, n, m, n, slices,
                HAS_BIAS=bias is not None, COLUMNS=256, num_warps=4,
            )  # fmt: skip
        return out

    def _tile(self, rows: int, units: bool) -> Product:
        if units:
            return self.tiles.few_units if rows <= self.tiles.few_units.rows else self.tiles.many_units
        return self.tiles.few if rows <= self.tiles.few.rows else self.tiles.many

    def matmul_dw(self, dy: Tensor, x: Tensor, segments: Segments, stream: Stream) -> None:
        require("dy of matmul", dy, grad_dtype(x.dtype), (x.size(0), dy.size(1)))
        x = strided_rows(x)
        self._stream(dy, x, x.stride(1), segments, stream, (dy.size(1), x.size(1)))

    def matmul_db(self, dy: Tensor, segments: Segments, stream: Stream) -> None:
        one = torch.ones(1, 1, dtype=torch.float32, device=self.device).expand(dy.size(0), 1)
        self._stream(dy, one, 0, segments, stream, (dy.size(1),))

    def _stream(
        self, dy: Tensor, x: Tensor, x_column: int, segments: Segments, stream: Stream, shape: tuple[int, ...]
    ) -> None:
        """Both buffers of a stream of that shape; x [M, K] may repeat one row."""
        lane, total = self.buffer("lane", stream.lane, shape), self.buffer("total", stream.total, shape)
        parts, ends, fold = arguments.segments(segments, dy.size(0))
        dy, (n, k), tile = strided_rows(dy), (dy.size(1), x.size(1)), self.tiles.streams
        self.start(
            dw_kernel, (cdiv(n, tile.rows) * cdiv(k, tile.columns),), dy, dy.stride(0), x, x.stride(0), x_column,
            self.upload(ends), self.upload(fold), parts, lane, total, n, k,
            LANE_IS_ZERO=stream.lane_is_zero, TOTAL_IS_ZERO=stream.total_is_zero,
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, **options_of(tile),
        )  # fmt: skip
        folds = fold.tolist()
        stream.lane_is_zero &= all(folds[-1:])  # an open lane has begun
        stream.total_is_zero &= not any(folds)
