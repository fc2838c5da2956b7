"""embed: rows of the weight; its gradient, for each id one sum over tokens in order, cut into lanes."""

from __future__ import annotations

from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from vexact_kernels import arguments
from vexact_kernels.arguments import require, strided_rows
from vexact_kernels.contract import Packed, Segments, Stream, grad_dtype
from vexact_kernels.triton.functions import widened
from vexact_kernels.triton.indices import Indices
from vexact_kernels.triton.launch import Device, cdiv, power_of_two

WIDEST = 1024  # columns a program: eight a thread of four warps, 16 bytes of bfloat16
IN_FLIGHT = 8  # tokens of one id whose gradients are loaded before the first is added


@triton.jit
def embed_kernel(ids, w, y, D, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < D
    tl.store(y + token * D + column, tl.load(w + tl.load(ids + token) * D + column, mask=inside), mask=inside)


@triton.jit
def embed_add_kernel(
    ids, order, ends, dy, dy_row, lane, touched, D, COLUMNS: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """lane[id] continues Σ dy over the id's tokens. ids are sorted; place p of them is token order[p], ascending inside
    an id, and the run of equal ids ends before ends[p]. The program of a run's first place sums it.

    Behind the last token stands -0, which leaves even a -0 as it is.
    """
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < D
    id = tl.load(ids + place)
    if id != tl.load(ids + place - 1, mask=place > 0, other=-1):
        at = lane + id * D + column
        acc = tl.load(at, mask=inside, other=0.0)
        end = tl.load(ends + place)
        for first in range(place, end, TOKENS):
            tokens, gradients = (), ()  # grown with +: Triton knows no starred tuple
            for i in tl.static_range(TOKENS):
                p = tl.full((), i, tl.int64) + first
                tokens = tokens + (tl.load(order + p, mask=p < end, other=0),)  # type: ignore[assignment]  # noqa: RUF005
            for i in tl.static_range(TOKENS):
                width = tl.where(tl.full((), i, tl.int64) + first < end, D, 0)
                d = tl.load(dy + tokens[i] * dy_row + column, mask=column < width, other=-0.0)
                gradients = gradients + (d,)  # type: ignore[assignment]  # noqa: RUF005
            for i in tl.static_range(TOKENS):
                acc = acc + widened(gradients[i])
        tl.store(at, acc, mask=inside)
        tl.store(touched + id, 1)


@triton.jit
def embed_fold_kernel(lane, total, touched, D, COLUMNS: tl.constexpr):
    """total += lane and lane = +0 in the rows that the lane has met."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(touched + row) != 0:
        for first in range(0, D, COLUMNS):
            column = tl.arange(0, COLUMNS).to(tl.int64) + first
            at, inside = row * D + column, column < D
            sum = tl.load(total + at, mask=inside, other=0.0) + tl.load(lane + at, mask=inside, other=0.0)
            tl.store(total + at, sum, mask=inside)
            tl.store(lane + at, tl.full((COLUMNS,), 0.0, tl.float32), mask=inside)


class Embed(Device):
    """embed, embed_dw of `contract.Kernels`."""

    @cached_property
    def _ids(self) -> Indices:
        return Indices()

    def embed(self, ids: Tensor, w: Packed) -> Tensor:
        n, d = ids.size(0), w.columns
        ids = self._ids.inside("token id", ids, n, w.rows)
        y, columns = self.empty(n, d, dtype=w.dtype), min(power_of_two(d), WIDEST)
        self.start(embed_kernel, (n, cdiv(d, columns)), ids, w.data, y, d, COLUMNS=columns, num_warps=4)
        return y

    def embed_dw(self, ids: Tensor, dy: Tensor, segments: Segments, stream: Stream) -> None:
        n, (vocabulary, d) = ids.size(0), stream.lane.shape
        if stream.touched is None:
            raise ValueError("the stream of an embedding needs its touched rows")
        ids = self._ids.inside("token id", ids, n, vocabulary)
        require("dy of embed", dy, grad_dtype(dy.dtype), (n, d))
        lane = self.buffer("lane", stream.lane, (vocabulary, d))
        total = self.buffer("total", stream.total, (vocabulary, d))
        touched = self.buffer("touched", stream.touched, (vocabulary,), torch.uint8)
        _, ends, fold = arguments.segments(segments, n)
        dy, columns, begin = strided_rows(dy), min(power_of_two(d), WIDEST), 0
        for end, folds in zip(ends.tolist(), fold.tolist(), strict=True):
            self._add(ids[begin:end], dy[begin:end], lane, touched, columns)
            if folds:
                self.start(embed_fold_kernel, (vocabulary,), lane, total, touched, d, COLUMNS=columns, num_warps=4)
                touched.zero_()  # not by the kernel: one warp of a program would clear what another has yet to read
            begin = end

    def _add(self, ids: Tensor, dy: Tensor, lane: Tensor, touched: Tensor, columns: int) -> None:
        """One segment's gradients into the lanes of its ids. Integers are sorted: exact, and ties stay in order."""
        ordered, order = torch.sort(ids, stable=True)
        ends = torch.searchsorted(ordered, ordered, right=True)
        self.start(
            embed_add_kernel, (len(ids), cdiv(dy.size(1), columns)), ordered, order, ends, dy, dy.stride(0), lane,
            touched, dy.size(1), COLUMNS=columns, TOKENS=IN_FLIGHT, num_warps=4,
        )  # fmt: skip
