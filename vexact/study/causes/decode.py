"""Attention at decode in parts of the keys, joined by their log-sum-exp (flash decoding).

A chunk of one token whose sequence has at least two pages is folded as `degree` runs of consecutive pages, or as many
as there are pages; each run goes through the attention kernel in float32 on widened copies (widening is exact), which
gives a part y and its log-sum-exp. y = Σ e^(lse − max)·y / Σ e^(lse − max) in float32, runs in order, then one rounding
to the compute dtype. Chunks of more tokens are folded whole, as a prefill is. So the bits of a token depend on whether
it was computed alone: they are those of a schedule, and scoring whole sequences does not find them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vexact.model.ops import Ops
from vexact.model.policy import Policy
from vexact.recipe import MismatchSection
from vexact.study.causes.caused import Caused
from vexact_kernels import PAGE, Chunks, Kernels


def split_kv(policy: Policy, section: MismatchSection) -> Policy:
    return replace(policy, ops=SplitKV(policy.ops, section.degree))


@dataclass(frozen=True)
class Run:
    """Consecutive pages that one query is folded over. row: of the query; end: positions that they hold of it."""

    row: int
    pages: list[int]
    end: int


class SplitKV(Caused):
    def __init__(self, inner: Ops, degree: int) -> None:
        super().__init__(inner, f"split-kv/{degree}")
        self.degree = degree

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, pages: tuple[Tensor, Tensor], scale: float
    ) -> Tensor:
        y = self.inner.attention(q, k, v, chunks, pages, scale)
        groups = list(decoded(chunks, self.degree))
        if not groups:
            return y
        runs = [run for group in groups for run in group]
        parts, lse = folded(self.kernels, q, runs, pages, scale)
        other, first = y.clone(), 0
        for group in groups:
            span = slice(first, first + len(group))
            joined = self._joined(parts[span], lse[span])
            other[group[0].row] = self.kernels.cast(joined.flatten(), y.dtype)
            first = span.stop
        return self.inner.stand_in(y, other)

    def _joined(self, parts: Tensor, lse: Tensor) -> Tensor:
        """parts float32 [runs, H, K], lse [runs, H] → [H, K]."""
        weights = self.kernels.exp(lse - lse.amax(dim=0))
        total, y = weights[0], weights[0, :, None] * parts[0]
        for weight, part in zip(weights[1:], parts[1:], strict=True):
            total, y = total + weight, y + weight[:, None] * part
        return y / total[:, None]


def decoded(chunks: Chunks, degree: int) -> Iterator[list[Run]]:
    """Of each chunk of one token, its runs, where there are at least two."""
    start, prefix, bounds, table = (x.tolist() for x in (chunks.start, chunks.prefix, chunks.table_start, chunks.table))
    for index, before in enumerate(prefix):
        count = before // PAGE + 1
        parts = min(degree, count)
        if start[index + 1] - start[index] != 1 or parts < 2:
            continue
        pages = table[bounds[index] : bounds[index] + count]
        ends = [part * count // parts for part in range(parts + 1)]
        yield [
            Run(start[index], pages[ends[i] : ends[i + 1]], min(before + 1, ends[i + 1] * PAGE) - ends[i] * PAGE)
            for i in range(parts)
        ]


def folded(
    kernels: Kernels, q: Tensor, runs: list[Run], pages: tuple[Tensor, Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Each run as a sequence of its own: y float32 [runs, H, K], lse float32 [runs, H].

    The kernel writes the last position's key and value before it folds: they are those that are there already.
    """
    table = torch.tensor([page for run in runs for page in run.pages])
    keys, values = (kernels.cast(memory[table].contiguous(), torch.float32) for memory in pages)
    widths = torch.tensor([len(run.pages) for run in runs])
    ends = torch.tensor([run.end for run in runs])
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), widths.cumsum(0)])
    chunks = Chunks(torch.arange(len(runs) + 1), ends - 1, bounds, torch.arange(len(table)))
    last, place = bounds[1:] - 1, (ends - 1) % PAGE
    rows = torch.tensor([run.row for run in runs])
    query = kernels.cast(q[rows].contiguous(), torch.float32)
    key, value = keys[last, :, :, place].contiguous(), values[last, :, place].contiguous()
    return kernels.attention(query, key, value, chunks, keys, values, scale)
