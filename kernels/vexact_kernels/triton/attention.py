"""Paged causal attention: write the chunks' keys and values into pages, then fold pages 0, 1, 2, … for every query.

A program folds some consecutive tokens of one sequence with the heads that share one key/value head; its rows are the
pairs (token, head). Decoding and prefilling differ in the number of tokens alone.
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
from vexact_kernels.contract import PAGE as PAGE_SIZE
from vexact_kernels.contract import Chunks
from vexact_kernels.triton.functions import exp, log, tree
from vexact_kernels.triton.launch import Device, cdiv, power_of_two
from vexact_kernels.triton.tiles import Fold, fold_of, options_of

PAGE = tl.constexpr(PAGE_SIZE)


@triton.jit
def write_kernel(
    k, k_row, v, v_row, key_pages, value_pages, runs, G, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Copy a run of tokens, which ends with its page, for one key/value head. runs [n, 4]: row, tokens, page, place."""
    run, g = runs + tl.program_id(0).to(tl.int64) * 4, tl.program_id(1)
    tokens = tl.load(run + 1)
    row, page, place = tl.load(run), tl.load(run + 2), tl.load(run + 3)
    t = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    mask = (t < tokens)[:, None] & (d < SIZE)[None, :]
    at = (page * G + g) * (SIZE * PAGE)
    keys = tl.load(k + ((row + t) * k_row + g * SIZE)[:, None] + d[None, :], mask=mask)
    values = tl.load(v + ((row + t) * v_row + g * SIZE)[:, None] + d[None, :], mask=mask)
    tl.store(key_pages + at + (place + t)[:, None] + d[None, :] * PAGE, keys, mask=mask)
    tl.store(value_pages + at + (place + t)[:, None] * SIZE + d[None, :], values, mask=mask)


@triton.jit
def fold_kernel(
    q, q_row, key_pages, value_pages, table, blocks, y, lse, G, scale,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    UNITS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """blocks [n, 4]: first row, tokens, position of the first, where its sequence's pages begin in `table`.

    Pages that lie whole before the first token need no mask. Rows that are not there are folded as zeros.
    """
    block = blocks + tl.program_id(0).to(tl.int64) * 4
    g = tl.program_id(1) // ((GROUP + HEADS - 1) // HEADS)
    row, tokens = tl.load(block), tl.load(block + 1).to(tl.int32)
    position, pages = tl.load(block + 2).to(tl.int32), table + tl.load(block + 3)

    token, head, inside = pairs(tl.program_id(1), tokens, GROUP, HEADS, ROWS)
    x = q + (row + token) * q_row + head * SIZE
    if UNITS:
        x = whole_rows(x, inside, SIZE, WIDTH)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.full((ROWS,), 0.0, tl.float32)  # noqa: E741 (the contract's letter)
    acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    whole = (position + 1) // PAGE
    for b in range(whole):
        at = (tl.load(pages + b) * G + g) * (SIZE * PAGE)
        m, l, acc = fold(  # noqa: E741
            x, inside, key_pages + at, value_pages + at, scale, m, l, acc, d, position, tokens, b, token,
            SIZE, WIDTH, UNITS, ROWS, DEPTH, KEYS, False,
        )  # fmt: skip
    for b in range(whole, (position + tokens - 1) // PAGE + 1):
        at = (tl.load(pages + b) * G + g) * (SIZE * PAGE)
        m, l, acc = fold(  # noqa: E741
            x, inside, key_pages + at, value_pages + at, scale, m, l, acc, d, position, tokens, b, token,
            SIZE, WIDTH, UNITS, ROWS, DEPTH, KEYS, True,
        )  # fmt: skip
    # Asked for again, so that the loops need not keep it in registers.
    token, head, inside = pairs(tl.program_id(1), tl.load(block + 1).to(tl.int32), GROUP, HEADS, ROWS)
    out = (tl.load(block) + token) * (G * GROUP) + head
    result = tl.div_rn(acc + 0.0, tl.broadcast_to(l[:, None], (ROWS, COLUMNS)))
    tl.store(
        y + (out * SIZE)[:, None] + d[None, :], result.to(y.dtype.element_ty),
        mask=inside[:, None] & (d < SIZE)[None, :],
    )  # fmt: skip
    if tl.program_id(2) == 0:
        tl.store(lse + out, m + log(l) + 0.0, mask=inside)


@triton.jit
def pairs(part, tokens, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Token and query head of the rows of part number `part`, HEADS heads of one group, and whether they exist."""
    parts: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    token = tl.arange(0, ROWS) // HEADS
    head = part % parts * HEADS + tl.arange(0, ROWS) % HEADS
    inside = (token < tokens) & (head < GROUP)
    return token, part // parts * GROUP + head, inside


@triton.jit
def fold(
    x, inside, keys, values, scale, m, l, acc, d, position, tokens, b, token,  # noqa: E741
    SIZE: tl.constexpr, WIDTH: tl.constexpr, UNITS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, KEYS: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """The state after page b. In a PARTIAL page some place is absent for some row."""
    s = scores(x, inside, keys, SIZE, WIDTH, UNITS, ROWS, DEPTH) * scale
    # How many places of the page a row sees, at most that of the last token; below 1 where the row ends before it.
    seen = position + token + 1 - b * PAGE
    present = tl.arange(0, PAGE)[None, :] < seen[:, None]
    if PARTIAL:
        s = tl.where(present, s, float("-inf"))
    raised = tl.maximum(m, tl.max(s, 1))
    alpha = tl.where(m == float("-inf"), 0.0, exp(m - raised))
    p = exp(s - raised[:, None])
    if PARTIAL:
        p = tl.where(present, p, 0.0)
    l = tl.fma(l, alpha, tree(p, ROWS, PAGE))  # noqa: E741
    acc = acc * alpha[:, None]
    acc = weigh(p, values, acc, d, seen, position + tokens - b * PAGE, SIZE, UNITS, ROWS, KEYS, PARTIAL)
    return raised, l, acc


@triton.jit
def whole_rows(at, inside, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Rows at pointers [R] → [R, WIDTH], +0 where there is none."""
    d = tl.arange(0, WIDTH)
    return tl.load(at[:, None] + d[None, :], mask=inside[:, None] & (d < SIZE)[None, :], other=0.0)


@triton.jit
def scores(
    x, inside, keys, SIZE: tl.constexpr, WIDTH: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """x (rows with UNITS, else pointers to them) times a page of keys. Memory not written stays in its own column."""
    j = tl.arange(0, PAGE)
    s = tl.full((ROWS, PAGE), 0.0, tl.float32)
    if UNITS:
        d = tl.arange(0, WIDTH)
        key = tl.load(keys + d[:, None] * PAGE + j[None, :], mask=(d < SIZE)[:, None], other=0.0)
        s = tl.dot(x, key, s, input_precision="ieee")
    else:
        for first in range(0, SIZE, DEPTH):
            d = first + tl.arange(0, DEPTH)
            query = tl.load(x[:, None] + d[None, :], mask=inside[:, None], other=0.0)
            key = tl.load(keys + d[:, None] * PAGE + j[None, :])
            s = tl.dot(query.to(tl.float32), key.to(tl.float32), s, input_precision="ieee")
    return s


@triton.jit
def weigh(
    p, values, acc, d, seen, held, SIZE: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """acc + p·v for the columns d, j ascending, over the first `held` places.

    Values that are not finite reach the rows that see them.
    """
    if UNITS:
        acc, wrong = weigh_part(p.to(values.dtype.element_ty), values, acc, d, 0, held, SIZE, PAGE, PARTIAL)
    else:
        low, high = halves(p, ROWS, PAGE)
        if KEYS == 32:
            acc, wrong = weigh_part(low, values, acc, d, 0, held, SIZE, 32, PARTIAL)
            acc, more = weigh_part(high, values, acc, d, 32, held, SIZE, 32, PARTIAL)
            wrong |= more
        else:
            p0, p1 = halves(low, ROWS, 32)
            acc, wrong = weigh_part(p0, values, acc, d, 0, held, SIZE, 16, PARTIAL)
            acc, more = weigh_part(p1, values, acc, d, 16, held, SIZE, 16, PARTIAL)
            wrong |= more
            p2, p3 = halves(high, ROWS, 32)
            acc, more = weigh_part(p2, values, acc, d, 32, held, SIZE, 16, PARTIAL)
            wrong |= more
            acc, more = weigh_part(p3, values, acc, d, 48, held, SIZE, 16, PARTIAL)
            wrong |= more
    if PARTIAL:  # noqa: SIM102 (this is decided when compiling, the next on the device)
        if wrong != 0:
            for j in range(tl.minimum(held, PAGE)):
                v = tl.load(values + j * SIZE + d, mask=d < SIZE, other=0.0)
                acc = tl.where(not_finite(v)[None, :] & (j < seen)[:, None], acc + v.to(tl.float32)[None, :], acc)
    return acc


@triton.jit
def weigh_part(
    p, values, acc, d, first, held, SIZE: tl.constexpr, KEYS: tl.constexpr, PARTIAL: tl.constexpr
):  # fmt: skip
    """A row's +0 times another row's infinity is NaN: in a PARTIAL page values that are not finite are left out.

    → acc, whether there were such values.
    """
    j = first + tl.arange(0, KEYS)
    at = values + j[:, None] * SIZE + d[None, :]
    wrong = 0
    if PARTIAL:
        v = tl.load(at, mask=(j < held)[:, None] & (d < SIZE)[None, :], other=0.0)
        bad = not_finite(v)
        v = tl.where(bad, 0.0, v)
        wrong = tl.max(tl.max(bad.to(tl.int32), 1), 0)
    else:
        v = tl.load(at, mask=(d < SIZE)[None, :], other=0.0)
    return tl.dot(p, v.to(p.dtype), acc, input_precision="ieee"), wrong


@triton.jit
def not_finite(x):
    """NaN or infinite, told by the bits of the exponent: values of sixteen bits stay so."""
    if x.dtype == tl.float32:
        bad = (x.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
    else:
        exponent: tl.constexpr = 0x7F80 if x.dtype == tl.bfloat16 else 0x7C00
        bad = (x.to(tl.int16, bitcast=True) & exponent) == exponent
    return bad


@triton.jit
def halves(x, ROWS: tl.constexpr, N: tl.constexpr):
    """The first and the second N / 2 columns of x [ROWS, N]."""
    half: tl.constexpr = N // 2
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, half)), (0, 2, 1)))


@dataclass(frozen=True)
class Work:
    """What the kernels of one batch are given, on the device: the runs to write, and the blocks to fold by their tile.

    It belongs to these chunks, and these numbers of tokens, pages and heads of a group, head size and kind of sum.
    """

    of: tuple[Chunks, int, int, int, int, bool]
    table: Tensor
    runs: Tensor
    longest_run: int
    folds: tuple[tuple[Fold, Tensor], ...]


class Attention(Device):
    """attention of `contract.Kernels`."""

    _work: Work | None = None

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, key_pages: Tensor, value_pages: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        (n, heads, size), groups, dtype = q.shape, k.size(1), q.dtype
        limit, width = key_pages.size(0), power_of_two(size)
        arguments.heads(heads, groups, size)
        require("k of attention", k, dtype, (n, groups, size))
        require("v of attention", v, dtype, (n, groups, size))
        keys = self.buffer("key_pages", key_pages, (limit, groups, size, PAGE_SIZE), dtype)
        values = self.buffer("value_pages", value_pages, (limit, groups, PAGE_SIZE, size), dtype)
        units = self.matrix_units and q.element_size() == 2
        work = self._work_of(chunks, n, limit, heads // groups, width, units)
        q, k, v = strided_rows(q), strided_rows(k), strided_rows(v)
        self.start(
            write_kernel, (len(work.runs), groups), k, k.stride(0), v, v.stride(0), keys, values, work.runs, groups,
            SIZE=size, WIDTH=width, ROWS=16 if work.longest_run <= 16 else PAGE_SIZE, num_warps=4,
        )  # fmt: skip
        y = self.empty(n, heads, size, dtype=dtype)
        lse = self.empty(n, heads)
        group = heads // groups
        for tile, blocks in work.folds:
            together, columns = heads_together(group, tile.rows), min(width, tile.columns)
            grid = (len(blocks), groups * cdiv(group, together), width // columns)
            self.start(
                fold_kernel, grid, q, q.stride(0), keys, values, work.table, blocks, y, lse, groups, scale,
                SIZE=size, WIDTH=width, COLUMNS=columns, GROUP=group, HEADS=together, UNITS=units, ROWS=tile.rows,
                DEPTH=depth_of(size, tile), KEYS=tile.keys, **options_of(tile),
            )  # fmt: skip
        return y, lse

    def _work_of(self, chunks: Chunks, n: int, limit: int, group: int, width: int, units: bool) -> Work:
        """Checked and uploaded once per batch: every layer but the first finds it done."""
        work = self._work
        if work is not None and work.of[0] is chunks and work.of[1:] == (n, limit, group, width, units):
            return work
        arguments.pages(chunks, n, limit)
        if units:
            tiles = [fold_of(self.tiles.fold_units, width)]
        else:
            tiles = [fold_of(self.tiles.fold_few, width), fold_of(self.tiles.fold_many, width)]
        runs = runs_of(chunks)
        self._work = work = Work(
            of=(chunks, n, limit, group, width, units),
            table=self.upload(chunks.table),
            runs=self._list(runs),
            longest_run=max((run[1] for run in runs), default=0),
            folds=tuple((tile, self._list(blocks)) for tile, blocks in blocks_of(chunks, group, tiles)),
        )
        return work

    def _list(self, rows: list[tuple[int, int, int, int]]) -> Tensor:
        return self.upload(torch.tensor(rows, dtype=torch.int64).view(-1, 4))


def heads_together(group: int, rows: int) -> int:
    """How many heads of a group a program of so many rows takes: all, padded to a power of two, wherever they fit."""
    return min(power_of_two(group), rows)


def depth_of(size: int, tile: Fold) -> int:
    """The step over a head: 16 divides every head size."""
    return tile.depth if size % tile.depth == 0 else 16


def runs_of(chunks: Chunks) -> list[tuple[int, int, int, int]]:
    """First row, tokens, page and place in it of every part of a chunk that lies in one page."""
    runs = []
    table, first = chunks.table.tolist(), chunks.table_start.tolist()
    for s, ((begin, end), prefix) in enumerate(
        zip(pairwise(chunks.start.tolist()), chunks.prefix.tolist(), strict=True)
    ):
        row = begin
        while row < end:
            page, place = divmod(prefix + row - begin, PAGE_SIZE)
            tokens = min(PAGE_SIZE - place, end - row)
            runs.append((row, tokens, table[first[s] + page], place))
            row += tokens
    return runs


def blocks_of(chunks: Chunks, group: int, tiles: list[Fold]) -> list[tuple[Fold, list[tuple[int, int, int, int]]]]:
    """Every chunk cut into programs of the smallest tile that holds it, or of the last: `fold_kernel` says of what.

    Those with the most pages first, so that none is left over at the end.
    """
    blocks: dict[Fold, list[tuple[int, int, int, int]]] = {tile: [] for tile in tiles}
    spans = zip(
        pairwise(chunks.start.tolist()), chunks.prefix.tolist(), chunks.table_start.tolist(), strict=False
    )  # fmt: skip
    for (begin, end), prefix, table in spans:
        fitting = (t for t in tiles if (end - begin) * heads_together(group, t.rows) <= t.rows)
        tile = next(fitting, tiles[-1])
        step = tile.rows // heads_together(group, tile.rows)
        for row in range(begin, end, step):
            blocks[tile].append((row, min(step, end - row), prefix + row - begin, table))
    for listed in blocks.values():
        listed.sort(key=lambda block: -(block[1] + block[2]))
    return list(blocks.items())
