"""The gradient of causal attention over whole sequences: one kernel for δ, one for dQ, one for dK and dV.

p and dS are computed again from the stored lse, in the kernel of dQ block by block of keys, in that of dK and dV block
by block of queries. Nothing is added by two programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from vexact_kernels import arguments
from vexact_kernels.arguments import require, strided_rows
from vexact_kernels.contract import Chunks, grad_dtype
from vexact_kernels.triton.attention import depth_of, heads_together
from vexact_kernels.triton.functions import exp, tree
from vexact_kernels.triton.launch import Device, cdiv, power_of_two
from vexact_kernels.triton.tiles import fold_of, options_of

DELTA_VALUES = 1024  # values a program of δ takes: 32 a lane, in one warp as every tree; 64 spill on sm_80


@triton.jit
def delta_kernel(dy, dy_row, y, y_row, delta, N, H, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """delta[n, h] = S over a head of dy·y."""
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n, h = pair // H, pair % H
    d = tl.arange(0, WIDTH)
    mask = (n < N)[:, None] & (d < SIZE)[None, :]
    a = tl.load(dy + (n * dy_row + h * SIZE)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(y + (n * y_row + h * SIZE)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(delta + pair, tree(a * b, ROWS, WIDTH), mask=n < N)


@triton.jit
def dq_kernel(
    q, q_row, k, k_row, v, v_row, dy, dy_row, lse, delta, blocks, dq, G, scale,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    UNITS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Rows are pairs (token, head of a group), blocks [n, 3]: first token, its sequence's first, behind its last."""
    parts: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    block = blocks + tl.program_id(0).to(tl.int64) * 3
    row, start, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    g = tl.program_id(1) // parts
    i = row + tl.arange(0, ROWS) // HEADS
    head = tl.program_id(1) % parts * HEADS + tl.arange(0, ROWS) % HEADS
    inside = (i < end) & (head < GROUP)
    head += g * GROUP
    out = i * (G * GROUP) + head
    x = held_rows(q + i * q_row + head * SIZE, inside, SIZE, WIDTH, UNITS)
    dx = held_rows(dy + i * dy_row + head * SIZE, inside, SIZE, WIDTH, UNITS)
    lse_i = tl.load(lse + out, mask=inside, other=0.0)[:, None]
    delta_i = tl.load(delta + out, mask=inside, other=0.0)[:, None]
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    behind = tl.minimum(row + ROWS // HEADS, end)  # the last row sees the keys before it
    acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for first in range(start, behind, KEYS):
        j = first + tl.arange(0, KEYS).to(tl.int64)
        there = j < behind
        present = (j[None, :] <= i[:, None]) & inside[:, None]
        keys = k + j * k_row + g * SIZE
        s = products(x, inside, keys, there, SIZE, WIDTH, UNITS, ROWS, DEPTH, KEYS)
        p = tl.where(present, exp(s * scale - lse_i), 0.0)
        dp = products(dx, inside, v + j * v_row + g * SIZE, there, SIZE, WIDTH, UNITS, ROWS, DEPTH, KEYS)
        ds = tl.where(present, p * (dp - delta_i), 0.0)
        acc = weigh_rows(ds, keys, there, d, acc, SIZE, UNITS)
    tl.store(
        dq + (out * SIZE)[:, None] + d[None, :], ((acc + 0.0) * scale).to(dq.dtype.element_ty),
        mask=inside[:, None] & (d < SIZE)[None, :],
    )  # fmt: skip


@triton.jit
def dk_dv_kernel(
    q, q_row, k, k_row, v, v_row, dy, dy_row, lse, delta, blocks, dk, dv, G, scale,
    DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """dk, dv or both. Rows are keys of one key/value head, blocks [n, 3] as in `dq_kernel`.

    The heads of the group run outside and the queries inside, in one loop: unrolled heads spill.
    """
    block = blocks + tl.program_id(0).to(tl.int64) * 3
    row, end = tl.load(block), tl.load(block + 2)
    g = tl.program_id(1)
    j = row + tl.arange(0, ROWS)
    inside = j < end
    x = held_rows(k + j * k_row + g * SIZE, inside, SIZE, WIDTH, UNITS)
    z = held_rows(v + j * v_row + g * SIZE, inside, SIZE, WIDTH, UNITS)
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    dk_acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    dv_acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    turns = ((end - row + QUERIES - 1) // QUERIES).to(tl.int32)
    for turn in range(GROUP * turns):
        head = g * GROUP + turn // turns
        i = row + turn % turns * QUERIES + tl.arange(0, QUERIES)
        there = i < end
        present = (j[:, None] <= i[None, :]) & there[None, :]
        out = i * (G * GROUP) + head
        lse_i = tl.load(lse + out, mask=there, other=0.0)[None, :]
        delta_i = tl.load(delta + out, mask=there, other=0.0)[None, :]
        queries = q + i * q_row + head * SIZE
        gradients = dy + i * dy_row + head * SIZE
        s = products(x, inside, queries, there, SIZE, WIDTH, UNITS, ROWS, DEPTH, QUERIES)
        p = tl.where(present, exp(s * scale - lse_i), 0.0)
        if DV:
            dv_acc = weigh_rows(p, gradients, there, d, dv_acc, SIZE, UNITS)
        if DK:
            dp = products(z, inside, gradients, there, SIZE, WIDTH, UNITS, ROWS, DEPTH, QUERIES)
            ds = tl.where(present, p * (dp - delta_i), 0.0)
            dk_acc = weigh_rows(ds, queries, there, d, dk_acc, SIZE, UNITS)
    at = ((j * G + g) * SIZE)[:, None] + d[None, :]
    mask = inside[:, None] & (d < SIZE)[None, :]
    if DK:
        tl.store(dk + at, ((dk_acc + 0.0) * scale).to(dk.dtype.element_ty), mask=mask)
    if DV:
        tl.store(dv + at, (dv_acc + 0.0).to(dv.dtype.element_ty), mask=mask)


@triton.jit
def held_rows(at, inside, SIZE: tl.constexpr, WIDTH: tl.constexpr, UNITS: tl.constexpr):
    """With UNITS the rows at pointers [R], loaded once → [R, WIDTH]; else the pointers."""
    if UNITS:
        d = tl.arange(0, WIDTH)
        at = tl.load(at[:, None] + d[None, :], mask=inside[:, None] & (d < SIZE)[None, :], other=0.0)
    return at


@triton.jit
def products(
    x, x_there, w, w_there, SIZE: tl.constexpr, WIDTH: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Every `held_rows` x with every row at the pointers w, d ascending → [ROWS, COLUMNS]."""
    s = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    if UNITS:
        d = tl.arange(0, WIDTH)
        b = tl.load(w[None, :] + d[:, None], mask=w_there[None, :] & (d < SIZE)[:, None], other=0.0)
        s = tl.dot(x, b, s, input_precision="ieee")
    else:
        for first in range(0, SIZE, DEPTH):
            d = first + tl.arange(0, DEPTH)
            a = tl.load(x[:, None] + d[None, :], mask=x_there[:, None], other=0.0)
            b = tl.load(w[None, :] + d[:, None], mask=w_there[None, :], other=0.0)
            s = tl.dot(a.to(tl.float32), b.to(tl.float32), s, input_precision="ieee")
    return s


@triton.jit
def weigh_rows(p, at, there, d, acc, SIZE: tl.constexpr, UNITS: tl.constexpr):
    """acc + p times the rows at pointers, those in order, for the columns d."""
    rows = tl.load(at[:, None] + d[None, :], mask=there[:, None] & (d < SIZE)[None, :], other=0.0)
    if UNITS:
        return tl.dot(p.to(rows.dtype), rows, acc, input_precision="ieee")
    return tl.dot(p, rows.to(tl.float32), acc, input_precision="ieee")


@dataclass(frozen=True)
class Sequences:
    """A checked batch of whole sequences and, by their size, the blocks it has been cut into."""

    chunks: Chunks
    tokens: int
    blocks: dict[int, Tensor]


class AttentionBackward(Device):
    """attention_backward of `contract.Kernels`."""

    _sequences: Sequences | None = None

    def attention_backward(
        self, q: Tensor, k: Tensor, v: Tensor, y: Tensor, dy: Tensor, lse: Tensor, chunks: Chunks, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        (n, heads, size), groups, dtype = q.shape, k.size(1), q.dtype
        sequences = self._sequences_of(chunks, n)
        arguments.heads(heads, groups, size)
        grad = grad_dtype(dtype)
        for name, x, kind, count in (("k", k, dtype, groups), ("v", v, dtype, groups), ("y", y, dtype, heads)):
            require(f"{name} of attention", x, kind, (n, count, size))
        require("dy of attention", dy, grad, (n, heads, size))
        require("lse", lse, torch.float32, (n, heads))
        q, k, v, y, dy, lse = *(strided_rows(x) for x in (q, k, v, y, dy)), lse.contiguous()
        group, width = heads // groups, power_of_two(size)
        # float16 keeps its gradients in float32, which no matrix unit takes
        units = self.matrix_units and q.element_size() == dy.element_size() == 2
        delta, rows = self.empty(n, heads), max(1, DELTA_VALUES // width)
        self.start(
            delta_kernel, (cdiv(n * heads, rows),), dy, dy.stride(0), y, y.stride(0), delta, n, heads,
            SIZE=size, WIDTH=width, ROWS=rows, num_warps=1,
        )  # fmt: skip
        common = (q, q.stride(0), k, k.stride(0), v, v.stride(0), dy, dy.stride(0), lse, delta)
        dq = self.empty(n, heads, size, dtype=grad)
        tile = fold_of(self.tiles.dq_units if units else self.tiles.dq, width)
        together, columns = heads_together(group, tile.rows), min(width, tile.columns)
        blocks = self._blocks(sequences, tile.rows // together)
        self.start(
            dq_kernel, (len(blocks), groups * cdiv(group, together), width // columns), *common, blocks, dq, groups,
            scale, SIZE=size, WIDTH=width, COLUMNS=columns, GROUP=group, HEADS=together, UNITS=units, ROWS=tile.rows,
            DEPTH=depth_of(size, tile), KEYS=tile.keys, **options_of(tile),
        )  # fmt: skip
        # Chains of both at once keep too much in registers: computing p twice is cheaper than spilling.
        dk, dv = self.empty(2, n, groups, size, dtype=grad)
        tile = fold_of(self.tiles.dk_dv_units if units else self.tiles.dk_dv, width)
        columns, blocks = min(width, tile.columns), self._blocks(sequences, tile.rows)
        for with_dk, with_dv in ((True, True),) if units else ((True, False), (False, True)):
            self.start(
                dk_dv_kernel, (len(blocks), groups, width // columns), *common, blocks, dk, dv, groups, scale,
                DK=with_dk, DV=with_dv, SIZE=size, WIDTH=width, COLUMNS=columns, GROUP=group, UNITS=units,
                ROWS=tile.rows, DEPTH=depth_of(size, tile), QUERIES=tile.keys, **options_of(tile),
            )  # fmt: skip
        return dq, dk, dv

    def _sequences_of(self, chunks: Chunks, n: int) -> Sequences:
        """Checked once per batch."""
        sequences = self._sequences
        if sequences is not None and sequences.chunks is chunks and sequences.tokens == n:
            return sequences
        if chunks.prefix.any():
            raise ValueError("attention_backward needs whole sequences: a prefix is not empty")
        arguments.starts(chunks, n)
        self._sequences = sequences = Sequences(chunks, n, {})
        return sequences

    def _blocks(self, sequences: Sequences, step: int) -> Tensor:
        """The sequences in blocks of `step` tokens as the kernels read them, the longest first; uploaded once."""
        if step not in sequences.blocks:
            spans = sorted(pairwise(sequences.chunks.start.tolist()), key=lambda span: span[0] - span[1])
            blocks = [(row, begin, end) for begin, end in spans for row in range(begin, end, step)]
            sequences.blocks[step] = self.upload(torch.tensor(blocks, dtype=torch.int64).view(-1, 3))
        return sequences.blocks[step]
