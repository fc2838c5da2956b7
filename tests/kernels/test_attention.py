"""Attention: write the chunk into pages, fold pages 0, 1, 2, …; cuts and the places of pages change no bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from helpers import LAYOUTS, Layout, agree, assert_same_bits, flushing_denormals, normal
from vexact_kernels.contract import DTYPES, PAGE, Chunks, Kernels, grad_dtype
from vexact_kernels.reference import Reference

HEAD_SIZES = [16, 32, 64, 80, 96, 128, 256]


@dataclass(frozen=True)
class Case:
    """Whole sequences behind each other: q [N, H, K], k and v [N, G, K]."""

    lengths: tuple[int, ...]
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def starts(self) -> list[int]:
        return [sum(self.lengths[:s]) for s in range(len(self.lengths) + 1)]


def make(
    lengths: tuple[int, ...], heads: int = 4, groups: int = 2, size: int = 16, dtype: torch.dtype = torch.float32
) -> Case:
    n = sum(lengths)
    shapes = ((n, heads, size), (n, groups, size), (n, groups, size))
    return Case(lengths, *(normal(*shape, dtype=dtype, seed=i, scale=1.5) for i, shape in enumerate(shapes)))


class Pool:
    """Pages for every sequence of a case, in an order of their own, filled with `fill` beforehand."""

    def __init__(self, case: Case, fill: float = torch.nan, seed: int = 0) -> None:
        counts = [max(1, -(-n // PAGE)) for n in case.lengths]
        groups, size = case.k.shape[1:]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed))[: sum(counts)]
        self.tables = list(order.split(counts))
        self.unused = [p for p in range(sum(counts) + 2) if p not in order.tolist()]
        self.keys = torch.full((sum(counts) + 2, groups, size, PAGE), fill, dtype=case.k.dtype)
        self.values = torch.full((sum(counts) + 2, groups, PAGE, size), fill, dtype=case.v.dtype)

    def run(self, kernels: Kernels, case: Case, parts: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
        """One call over parts (sequence, begin, end) of the case, in the order given."""
        starts = case.starts()
        rows = torch.cat([torch.arange(starts[s] + begin, starts[s] + end) for s, begin, end in parts])
        tables = [self.tables[s] for s, _, _ in parts]
        chunks = Chunks(
            start=torch.tensor([0, *(end - begin for _, begin, end in parts)]).cumsum(0),
            prefix=torch.tensor([begin for _, begin, _ in parts]),
            table_start=torch.tensor([0, *(len(t) for t in tables)]).cumsum(0),
            table=torch.cat(tables),
        )
        q, k, v = case.q[rows], case.k[rows], case.v[rows]
        return kernels.attention(q, k, v, chunks, self.keys, self.values, case.scale)


def whole(kernels: Kernels, case: Case, fill: float = torch.nan, seed: int = 0) -> tuple[Tensor, Tensor]:
    return Pool(case, fill, seed).run(kernels, case, [(s, 0, n) for s, n in enumerate(case.lengths)])


def in_chunks(kernels: Kernels, case: Case, size: int) -> tuple[Tensor, Tensor]:
    """All sequences step by step, `size` tokens a step; sequence s joins at step s."""
    pool, starts = Pool(case), case.starts()
    y, lse = torch.zeros_like(case.q), torch.zeros(case.q.shape[:2])
    done, step = [0] * len(case.lengths), 0
    while any(d < n for d, n in zip(done, case.lengths, strict=True)):
        parts = [(s, done[s], min(done[s] + size, n)) for s, n in enumerate(case.lengths) if done[s] < n and step >= s]
        step += 1
        if not parts:
            continue
        rows = torch.cat([torch.arange(starts[s] + begin, starts[s] + end) for s, begin, end in parts])
        y[rows], lse[rows] = pool.run(kernels, case, parts)
        for s, _, end in parts:
            done[s] = end
    return y, lse


def whole_chunks(case: Case) -> Chunks:
    """The batch of the backward pass: it has no pages."""
    empty = torch.zeros(len(case.lengths) + 1, dtype=torch.int64)
    return Chunks(torch.tensor(case.starts()), empty[1:].clone(), empty, torch.zeros(0, dtype=torch.int64))


def backward(kernels: Kernels, case: Case, y: Tensor, dy: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.attention_backward(case.q, case.k, case.v, y, dy, lse, whole_chunks(case), case.scale)


def gradient_of(case: Case) -> Tensor:
    return normal(*case.q.shape, dtype=grad_dtype(case.q.dtype), seed=7)


def forward_and_backward(kernels: Kernels, case: Case) -> list[Tensor]:
    y, lse = whole(kernels, case)
    return [y, lse, *backward(kernels, case, y, gradient_of(case), lse)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_all_implementations_agree_for_every_head_size(everyone: list[Kernels], size: int, dtype: torch.dtype) -> None:
    lengths = (1, 67, 3) if size <= 64 else (1, 31)
    case = make(lengths, heads=2, groups=1, size=size, dtype=dtype)
    agree(lambda k: forward_and_backward(k, case), everyone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_all_implementations_agree_for_every_group(everyone: list[Kernels], group: int, dtype: torch.dtype) -> None:
    groups = 2 if group < 4 else 1
    case = make((31, 2), heads=group * groups, groups=groups, dtype=dtype)
    agree(lambda k: forward_and_backward(k, case), everyone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group, size", [(1, 80), (1, 96), (2, 128), (1, 256), (7, 16), (8, 16)])
def test_wide_heads_and_large_groups_agree_over_pages(
    compiled: list[Kernels], group: int, size: int, dtype: torch.dtype
) -> None:
    case = make((131, 66), heads=group, groups=1, size=size, dtype=dtype)
    results = agree(lambda k: forward_and_backward(k, case), compiled)
    if dtype == torch.bfloat16:  # the specification is slow: the shorter sequence, in one storage type
        alone = Case((66,), *(t[131:] for t in (case.q, case.k, case.v)))
        y, lse = whole(Reference(), alone)
        expected = [y, lse, *backward(Reference(), alone, y, gradient_of(case)[131:], lse)]
        assert_same_bits([t[131:] for t in results], expected)


@pytest.mark.parametrize("length", [1, 31, 63, 64, 65, 127, 128, 129])
def test_all_implementations_agree_around_page_edges(everyone: list[Kernels], length: int) -> None:
    case = make((length,), heads=1, groups=1, dtype=torch.bfloat16)
    agree(lambda k: forward_and_backward(k, case), everyone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_agree_on_large_sizes(compiled: list[Kernels], dtype: torch.dtype) -> None:
    case = make((300, 1, 129, 64), heads=9, groups=3, size=64, dtype=dtype)
    agree(lambda k: forward_and_backward(k, case), compiled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 7, 16, 63, 64, 65, 100])
def test_where_a_sequence_is_cut_changes_no_bit(compiled: list[Kernels], chunk: int, dtype: torch.dtype) -> None:
    case = make((130, 5, 64, 67), dtype=dtype)
    for kernels in compiled:
        assert_same_bits(in_chunks(kernels, case, chunk), whole(kernels, case), kernels.name)


def test_the_reference_keeps_its_bits_over_chunks() -> None:
    case = make((67, 3), dtype=torch.bfloat16)
    for chunk in (16, 65):
        assert_same_bits(in_chunks(Reference(), case, chunk), whole(Reference(), case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_does_not_know_its_batch(everyone: list[Kernels], dtype: torch.dtype) -> None:
    case = make((17, 66, 5), dtype=dtype)
    starts = case.starts()
    for kernels in everyone:
        results = forward_and_backward(kernels, case)
        spoiled = replace(case, v=case.v.clone(), k=case.k.clone(), q=case.q.clone())
        for t in (spoiled.q, spoiled.k, spoiled.v):
            t[: starts[1]] = torch.nan
            t[starts[2] :] = 1e30 if dtype != torch.float16 else 6e4
        middle = slice(starts[1], starts[2])
        beside = forward_and_backward(kernels, spoiled)
        assert_same_bits([t[middle] for t in beside], [t[middle] for t in results], kernels.name)
        alone = whole(kernels, Case((66,), case.q[middle], case.k[middle], case.v[middle]))
        assert_same_bits(alone, [t[middle] for t in results[:2]], kernels.name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 65])
def test_what_lies_in_unused_memory_changes_no_bit(everyone: list[Kernels], length: int, dtype: torch.dtype) -> None:
    case = make((length, 3), dtype=dtype)
    for kernels in everyone:
        clean = whole(kernels, case, fill=0.0)
        for fill in (torch.nan, torch.inf, 1e30 if dtype != torch.float16 else 6e4):
            assert_same_bits(whole(kernels, case, fill=fill), clean, f"{kernels.name} over {fill}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_later_token_moves_no_earlier_row(everyone: list[Kernels], dtype: torch.dtype) -> None:
    case = make((70,), dtype=dtype)
    spoiled = replace(case, k=case.k.clone(), v=case.v.clone())
    spoiled.k[66:] = torch.nan
    spoiled.v[66:] = torch.inf
    for kernels in everyone:
        clean, other = whole(kernels, case), whole(kernels, spoiled)
        assert_same_bits([t[:66] for t in other], [t[:66] for t in clean], kernels.name)


def test_the_order_of_pages_in_memory_changes_no_bit(everyone: list[Kernels]) -> None:
    case = make((130, 66), heads=2, groups=1)
    expected = whole(everyone[0], case)
    for kernels in everyone:
        for seed in (1, 2):
            assert_same_bits(whole(kernels, case, seed=seed), expected, kernels.name)


def test_only_the_chunk_is_written(everyone: list[Kernels]) -> None:
    case = make((70,), dtype=torch.bfloat16)
    pools = [Pool(case, fill=7.0) for _ in everyone]
    for kernels, pool in zip(everyone, pools, strict=True):
        pool.run(kernels, case, [(0, 0, 66)])
        pool.run(kernels, case, [(0, 66, 68)])
        second = pool.tables[0][1]
        assert (pool.keys[second][:, :, 4:] == 7).all(), kernels.name
        assert (pool.values[second][:, 4:] == 7).all(), kernels.name
        assert (pool.keys[pool.unused] == 7).all(), kernels.name
        assert (pool.values[pool.unused] == 7).all(), kernels.name
        assert_same_bits(pool.keys[second][:, :, :4], case.k[64:68].permute(1, 2, 0), kernels.name)
        assert_same_bits(pool.values[second][:, :4], case.v[64:68].transpose(0, 1), kernels.name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_no_bit(everyone: list[Kernels], layout: Layout, dtype: torch.dtype) -> None:
    case = make((5, 9), dtype=dtype)
    dy = gradient_of(case)
    y, lse = whole(everyone[0], case)
    expected = [y, lse, *backward(everyone[0], case, y, dy, lse)]
    pool = Pool(case)
    tables = torch.cat(pool.tables)
    chunks = Chunks(torch.tensor([0, 5, 14]), torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 2]), tables)
    q, k, v = layout(case.q), layout(case.k), layout(case.v)
    for kernels in everyone:
        forward = kernels.attention(q, k, v, chunks, pool.keys, pool.values, case.scale)
        gradients = kernels.attention_backward(q, k, v, layout(y), layout(dy), lse, chunks, case.scale)
        assert_same_bits([*forward, *gradients], expected, kernels.name)


def test_slices_of_one_product_may_be_passed(everyone: list[Kernels]) -> None:
    case = make((9,), dtype=torch.bfloat16)
    stacked = torch.cat([t.flatten(1) for t in (case.q, case.k, case.v)], dim=1)
    q, k, v = stacked.split([64, 32, 32], dim=1)
    views = Case(case.lengths, q.unflatten(1, (4, 16)), k.unflatten(1, (2, 16)), v.unflatten(1, (2, 16)))
    pool = Pool(case)
    chunks = replace(whole_chunks(case), table_start=torch.tensor([0, 1]), table=pool.tables[0])
    expected = whole(everyone[0], case)
    for kernels in everyone:
        actual = kernels.attention(views.q, views.k, views.v, chunks, pool.keys, pool.values, case.scale)
        assert_same_bits(actual, expected, kernels.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_ambient_flush_of_subnormals_changes_nothing(compiled: list[Kernels], dtype: torch.dtype) -> None:
    case = make((70,), dtype=dtype)
    tiny = 2.0**-130 if dtype != torch.float16 else 2.0**-22
    case = replace(case, v=(case.v.double() * tiny).to(dtype), q=case.q * 8)
    expected = forward_and_backward(Reference(), case)
    for kernels in compiled:
        with flushing_denormals():
            actual = forward_and_backward(kernels, case)
        assert_same_bits(actual, expected, kernels.name)


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """y, lse and scores of one sequence in float64."""
    n, group = len(q), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v), scores.logsumexp(-1).T, scores


def test_forward_against_float64(compiled: list[Kernels]) -> None:
    # A score rounds K + 1 times relative to Σ|q·k|·scale, twice that enters p with exp's ulps; then n fused steps.
    case = make((200,), heads=4, groups=2, size=64)
    y, lse, _ = exact_attention(case.q.double(), case.k.double(), case.v.double(), case.scale)
    actual_y, actual_lse = whole(compiled[-1], case)
    size = (case.q.abs().amax(dim=(0, 1)).double() @ case.k.abs().amax(dim=(0, 1)).double()) * case.scale
    relative = 2.0**-24 * (2 * 65 * size + 200 + 8)
    assert (actual_y.double() - y).abs().max() <= relative * case.v.abs().max()
    assert (actual_lse.double() - lse).abs().max() <= relative
    assert (actual_y.double() - y).abs().max() <= 1e-5, "in truth far below the bound"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forward_in_half_precision_is_the_nearest_value(compiled: list[Kernels], dtype: torch.dtype) -> None:
    # Everything inside is float32, so only a value beside a tie may be stored one place off.
    case = make((100,), size=64, dtype=dtype)
    y, _, _ = exact_attention(case.q.double(), case.k.double(), case.v.double(), case.scale)
    actual, _ = whole(compiled[-1], case)
    differ = (actual != y.to(dtype)).float().mean()
    assert differ <= 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_against_float64(compiled: list[Kernels], dtype: torch.dtype) -> None:
    # float32: chains of a few hundred steps; half precision: O enters δ stored, and bf16 stores the results
    case = make((67, 3), heads=4, groups=2, size=32, dtype=dtype)
    dy = gradient_of(case)
    y, lse = whole(compiled[-1], case)
    actual = backward(compiled[-1], case, y, dy, lse)
    leaves = [t.double().requires_grad_() for t in (case.q, case.k, case.v)]
    for begin, end in pairwise(case.starts()):
        q, k, v = (t[begin:end] for t in leaves)
        exact, _, _ = exact_attention(q, k, v, case.scale)
        exact.backward(dy[begin:end].double())
    relative = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}[dtype]
    for a, leaf in zip(actual, leaves, strict=True):
        assert leaf.grad is not None
        assert (a.double() - leaf.grad).abs().max() <= relative * leaf.grad.abs().max()


def test_gradients_with_a_prefix_are_refused(everyone: list[Kernels]) -> None:
    case = make((5,))
    y, lse = whole(everyone[0], case)
    chunks = replace(whole_chunks(case), prefix=torch.tensor([1]))
    for kernels in everyone:
        with pytest.raises(ValueError, match="prefix"):
            kernels.attention_backward(case.q, case.k, case.v, y, gradient_of(case), lse, chunks, case.scale)


@pytest.mark.parametrize("heads, groups, size, message", [(4, 2, 24, "24"), (4, 3, 16, "3 key"), (2, 2, 8, "8")])
def test_heads_that_do_not_fit_are_refused(
    compiled: list[Kernels], heads: int, groups: int, size: int, message: str
) -> None:
    case = make((5,), heads, groups, size)
    for kernels in compiled:
        with pytest.raises(ValueError, match=message):
            whole(kernels, case)
        with pytest.raises(ValueError, match=message):
            backward(kernels, case, case.q, gradient_of(case), torch.zeros(5, heads))
