"""Split-KV: decode alone, in parts that together are attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from caused import caused, exact, recorded, sampled, scored
from helpers import assert_same_bits, differing
from vexact.model.ops import Ops
from vexact.study.causes.decode import SplitKV, decoded
from vexact_kernels import PAGE, Chunks, Kernels, load

H, G, K = 4, 2, 32
SCALE = 0.25
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


class Decode:
    """Sequences whose last tokens are computed: prefixes, and how many tokens come behind each."""

    def __init__(self, dtype: torch.dtype, prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(3)
        counts = [(p + n - 1) // PAGE + 1 for p, n in zip(prefixes, lengths, strict=True)]
        table = torch.randperm(sum(counts), generator=generator)
        bounds = lambda sizes: torch.tensor([0, *torch.tensor(list(sizes)).cumsum(0).tolist()])  # noqa: E731
        self.chunks = Chunks(bounds(lengths), torch.tensor(list(prefixes)), bounds(counts), table)
        n, pages = sum(lengths), sum(counts)
        normal = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
        self.q, self.k, self.v = normal(n, H, K), normal(n, G, K), normal(n, G, K)
        self.pages = normal(pages, G, K, PAGE), normal(pages, G, PAGE, K)

    def by(self, ops: Ops) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        pages = self.pages[0].clone(), self.pages[1].clone()
        return ops.attention(self.q, self.k, self.v, self.chunks, pages, SCALE), pages

    def in_float64(self) -> Tensor:
        """[N, H K]."""
        _, (keys, values) = self.by(Ops(load()))
        rows = []
        for s in range(len(self.chunks.prefix)):
            begin, end = self.chunks.start[s : s + 2].tolist()
            table = self.chunks.table[self.chunks.table_start[s] : self.chunks.table_start[s + 1]]
            key = keys[table].permute(1, 0, 3, 2).flatten(1, 2).double().repeat_interleave(H // G, dim=0)
            value = values[table].permute(1, 0, 2, 3).flatten(1, 2).double().repeat_interleave(H // G, dim=0)
            for row in range(begin, end):
                until = int(self.chunks.prefix[s]) + row - begin + 1
                scores = torch.einsum("hk,hjk->hj", self.q[row].double(), key[:, :until]) * SCALE
                rows.append(torch.einsum("hj,hjk->hk", scores.softmax(-1), value[:, :until]).flatten())
        return torch.stack(rows)


def split(degree: int) -> SplitKV:
    return SplitKV(Ops(load()), degree)


@dtypes
def test_parts_together_are_attention(dtype: torch.dtype) -> None:
    some = Decode(dtype, prefixes=(64, 300, 127, 700, 5), lengths=(1, 1, 1, 1, 1))
    expected = some.in_float64()
    bound = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for degree in (2, 3, 100):
        y, _ = some.by(split(degree))
        assert (y.double() - expected).abs().max() < bound * expected.abs().max()
    unweighted = split(2)
    unweighted.kernels = cast(Kernels, Flat(load()))  # a mutant: parts are averaged without their sums of exponentials
    assert (some.by(unweighted)[0].double() - expected).abs().max() > 20 * bound * expected.abs().max()


class Flat:
    """Kernels whose exp is 1."""

    def __init__(self, kernels: object) -> None:
        self.inner = kernels

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def exp(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_parts_of_long_sequences_are_rounded_otherwise(dtype: torch.dtype) -> None:
    """In bfloat16 one value in some ten thousand is, which a real model's layers have and this has not."""
    some = Decode(dtype, prefixes=(1000, 2000, 3000), lengths=(1, 1, 1))
    assert differing(some.by(split(4))[0], some.by(Ops(load()))[0]) > 0


@dtypes
def test_one_page_one_part_and_longer_chunks_are_exact(dtype: torch.dtype) -> None:
    some = Decode(dtype, prefixes=(0, 63, 64, 300), lengths=(1, 1, 2, 40))
    assert list(decoded(some.chunks, 4)) == []
    assert_same_bits(some.by(split(4))[0], some.by(Ops(load()))[0])
    decode = Decode(dtype, prefixes=(1000,), lengths=(1,))
    assert_same_bits(decode.by(split(1))[0], decode.by(Ops(load()))[0])


@dtypes
def test_pages_hold_what_they_would(dtype: torch.dtype) -> None:
    some = Decode(dtype, prefixes=(64, 300, 128), lengths=(1, 1, 1))
    assert_same_bits(some.by(split(3))[1], some.by(Ops(load()))[1])


def test_a_row_does_not_know_its_batch() -> None:
    together = Decode(torch.float32, prefixes=(300, 200), lengths=(1, 1))
    y, _ = together.by(split(3))
    alone = Decode(torch.float32, prefixes=(300,), lengths=(1,))
    alone.q, alone.k, alone.v = together.q[:1], together.k[:1], together.v[:1]
    alone.pages = together.pages
    alone.chunks = Chunks(
        torch.tensor([0, 1]), torch.tensor([300]), torch.tensor([0, 5]), together.chunks.table[:5].clone()
    )
    assert_same_bits(alone.by(split(3))[0][0], y[0])


def test_runs_cover_all_positions_once() -> None:
    some = Decode(torch.float32, prefixes=(300, 63, 64), lengths=(1, 1, 1))
    groups = list(decoded(some.chunks, 3))
    assert [group[0].row for group in groups] == [0, 2]
    assert [sum(run.end for run in group) for group in groups] == [301, 65]
    assert [page for run in groups[0] for page in run.pages] == some.chunks.table[:5].tolist()


def test_scoring_whole_sequences_is_exact() -> None:
    """So the trainer's side has nothing of it, and what a sampler gave is not found again."""
    policy = caused("split-kv", exact(), degree=2)
    rollouts = sampled(policy)
    assert_same_bits(scored(policy, rollouts), scored(exact(), rollouts))
    assert differing(scored(policy, rollouts), recorded(rollouts)) > 0
