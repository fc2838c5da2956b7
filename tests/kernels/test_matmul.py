"""y, dx, dw, db: the same chain in every implementation, batch, layout and environment."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from helpers import (
    LAYOUTS,
    Layout,
    agree,
    assert_same_bits,
    differing,
    flushing_denormals,
    gradient,
    normal,
    segments,
    stream,
    unaligned,
    wild,
)
from memory import far_rows
from vexact_kernels.contract import DTYPES, Kernels, Segments, Stream, grad_dtype
from vexact_kernels.reference import Reference

SMALL = [(1, 1, 1), (3, 31, 33), (33, 3, 31), (2, 129, 3), (13, 33, 127), (1, 127, 129), (25, 65, 2)]
LARGE = [(1, 576, 1536), (7, 1536, 576), (33, 1000, 129), (129, 127, 1000), (13, 1000, 1000)]


def whole_stream(kernels: Kernels, dy: Tensor, x: Tensor, cut: Segments) -> tuple[Tensor, Tensor]:
    running = stream(dy.shape[1], x.shape[1])
    kernels.matmul_dw(dy, x, cut, running)
    return running.lane, running.total


def all_four(kernels: Kernels, x: Tensor, w: Tensor, bias: Tensor | None, dy: Tensor) -> list[Tensor]:
    """y, logits, dx and the streams of dw and db."""
    packed = kernels.pack(w)
    cut = segments([len(x) // 2, len(x)], [1, 0])
    bias_stream = stream(len(w))
    kernels.matmul_db(dy, cut, bias_stream)
    return [
        kernels.matmul(x, packed, bias),
        kernels.matmul(x, packed, bias, logits=True),
        kernels.matmul_dx(dy, packed),
        *whole_stream(kernels, dy, x, cut),
        bias_stream.lane,
        bias_stream.total,
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n, k", SMALL)
def test_all_implementations_agree(everyone: list[Kernels], m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w, bias = wild(m, k, dtype=dtype, seed=1), wild(n, k, dtype=dtype, seed=2), wild(n, dtype=dtype, seed=3)
    dy = gradient(m, n, dtype=dtype, seed=4)
    agree(lambda kernels: all_four(kernels, x, w, bias, dy), everyone)
    agree(lambda kernels: all_four(kernels, x, w, None, dy), everyone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n, k", LARGE)
def test_instruction_sets_agree_on_large_sizes(
    compiled: list[Kernels], m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    x, w, dy = normal(m, k, dtype=dtype, seed=1), normal(n, k, dtype=dtype, seed=2), gradient(m, n, dtype=dtype, seed=3)
    agree(lambda kernels: all_four(kernels, x, w, None, dy), compiled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, columns", [(1, 1), (31, 3), (33, 127), (64, 32), (1000, 129)])
def test_unpacking_gives_the_weight_back(everyone: list[Kernels], rows: int, columns: int, dtype: torch.dtype) -> None:
    w = wild(rows, columns, dtype=dtype, low=-140, high=15)
    for kernels in everyone:
        packed = kernels.pack(w)
        assert (packed.rows, packed.columns, packed.dtype) == (rows, columns, dtype)
        assert_same_bits(kernels.unpack(packed), w, kernels.name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_no_bit(everyone: list[Kernels], layout: Layout, dtype: torch.dtype) -> None:
    x, w, bias = wild(7, 33, dtype=dtype, seed=1), wild(35, 33, dtype=dtype, seed=2), wild(35, dtype=dtype, seed=3)
    dy = gradient(7, 35, dtype=dtype, seed=4)
    expected = all_four(everyone[0], x, w, bias, dy)
    for kernels in everyone:
        actual = all_four(kernels, layout(x), layout(w), unaligned(bias), layout(dy))
        assert_same_bits(actual, expected, kernels.name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n, k", [(1000, 112), (2048, 2048)])
def test_a_row_does_not_know_its_batch(compiled: list[Kernels], n: int, k: int, dtype: torch.dtype) -> None:
    row, w = normal(1, k, dtype=dtype, seed=1), normal(n, k, dtype=dtype, seed=2)
    d_row = normal(1, n, dtype=dtype, seed=3)
    fast = compiled[1:] or compiled  # the baseline is the same source, and slow
    for kernels in fast if k < 2048 else fast[-1:]:
        packed = kernels.pack(w)
        alone, alone_dx = kernels.matmul(row, packed), kernels.matmul_dx(d_row, packed)
        for m in (2, 17, 33, 128, 257, 1024):
            for place in (0, m // 2, m - 1) if k < 2048 else (m - 1,):
                neighbours = normal(m, k, dtype=dtype, seed=m) * (1.0, 1e30, torch.nan)[place % 3]
                neighbours[place] = row
                assert_same_bits(kernels.matmul(neighbours, packed)[place : place + 1], alone, f"{kernels.name} {m}")
            d_neighbours = torch.full((m, n), torch.nan, dtype=dtype)
            d_neighbours[m // 2] = d_row
            assert_same_bits(kernels.matmul_dx(d_neighbours, packed)[m // 2 : m // 2 + 1], alone_dx, kernels.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_neighbour_moves_no_bit(everyone: list[Kernels], dtype: torch.dtype) -> None:
    x, w = wild(5, 33, dtype=dtype, seed=1), wild(9, 33, dtype=dtype, seed=2)
    alone = everyone[0].matmul(x, everyone[0].pack(w))
    x[2] = torch.nan
    for kernels in everyone:
        y = kernels.matmul(x, kernels.pack(w))
        assert_same_bits(y[[0, 1, 3, 4]], alone[[0, 1, 3, 4]], kernels.name)
        assert y[2].isnan().all()


# Exponents of x and w: products that stay normal, that sit on the guard's edge, that fall below it, subnormal operands.
EXPONENTS = [(-40, -40), (-56, -56), (-56, -57), (-60, -64), (-70, -70), (-133, 0), (-130, -10), (-126, 14)]


@pytest.mark.parametrize("ex, ew", EXPONENTS)
def test_small_bf16_operands_keep_their_subnormal_bits(everyone: list[Kernels], ex: int, ew: int) -> None:
    for length in (1, 2, 5, 34):
        x = torch.ldexp(1 + torch.rand(3, length, generator=torch.Generator().manual_seed(1)), torch.tensor(ex))
        w = torch.ldexp(1 + torch.rand(40, length, generator=torch.Generator().manual_seed(2)), torch.tensor(ew))
        w[::2] *= -1
        dy = torch.ldexp(normal(3, 40, seed=3).sign(), torch.tensor(ex)).bfloat16()
        results = agree(partial(all_four, x=x.bfloat16(), w=w.bfloat16(), bias=None, dy=dy), everyone)
        assert results[1].count_nonzero() or ex + ew < -148


def test_one_subnormal_among_large_values_is_not_flushed(everyone: list[Kernels]) -> None:
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    w = torch.zeros(33, 64, dtype=torch.bfloat16)
    w[7, 5] = 2.0**-133
    agree(lambda k: all_four(k, x, w, None, torch.ones(2, 33, dtype=torch.bfloat16)), everyone)
    y = everyone[0].matmul(x, everyone[0].pack(w), logits=True)
    assert y[0, 7].item() == 2.0**-133


def test_a_running_lane_that_went_the_exact_way_stays_there(everyone: list[Kernels]) -> None:
    tiny = torch.full((2, 8), 2.0**-70, dtype=torch.bfloat16)
    dead, live = torch.zeros(2, 8, dtype=torch.bfloat16), torch.ones(2, 8, dtype=torch.bfloat16)
    live[:, 4:] = 0

    def two_batches(kernels: Kernels) -> list[Tensor]:
        running = stream(8, 8)
        kernels.matmul_dw(tiny, tiny, segments([2], [0]), running)  # the lane is subnormal now
        kernels.matmul_dw(dead, live, segments([2], [0]), running)  # harmless operands must not flush it
        kernels.matmul_dw(live, live, segments([2], [0]), running)
        lane = running.lane.clone()
        kernels.matmul_dw(live, live, segments([1, 2], [1, 0]), running)
        return [lane, running.lane, running.total]

    lane, _, _ = agree(two_batches, everyone)
    assert lane[7, 7].item() == 2.0**-139


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_ambient_flush_of_subnormals_changes_nothing(compiled: list[Kernels], dtype: torch.dtype) -> None:
    low = -70 if dtype != torch.float16 else -24
    x, w = wild(9, 33, dtype=dtype, low=low, high=low + 4), wild(40, 33, dtype=dtype, low=low, high=low + 4, seed=1)
    dy = wild(9, 40, dtype=grad_dtype(dtype), low=-75, high=-66, seed=2)
    expected = all_four(Reference(), x, w, None, dy)
    for kernels in compiled:
        with flushing_denormals():
            actual = all_four(kernels, x, w, None, dy)
        assert_same_bits(actual, expected, kernels.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_micro_batches_anywhere_give_the_same_stream(everyone: list[Kernels], dtype: torch.dtype) -> None:
    tokens = 23
    x, dy = wild(tokens, 33, dtype=dtype, seed=1), gradient(tokens, 5, dtype=dtype, seed=2)
    lane_ends = [3, 4, 11, 23]

    def in_pieces(kernels: Kernels, piece: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        running, bias = stream(5, 33), stream(5)
        for begin in range(0, tokens, piece):
            end = min(begin + piece, tokens)
            inside = [e for e in lane_ends if begin < e <= end]
            ends = inside if inside and inside[-1] == end else [*inside, end]
            cut = segments([e - begin for e in ends], [int(e in lane_ends) for e in ends])
            kernels.matmul_dw(dy[begin:end], x[begin:end], cut, running)
            kernels.matmul_db(dy[begin:end], cut, bias)
        return running.lane, running.total, bias.lane, bias.total

    expected = in_pieces(everyone[0], tokens)
    assert expected[0].count_nonzero() == 0
    for kernels in everyone:
        for piece in (1, 2, 3, 5, 8, 22, 23):
            assert_same_bits(in_pieces(kernels, piece), expected, f"{kernels.name} in pieces of {piece}")


def test_lanes_are_added_one_after_the_other(everyone: list[Kernels]) -> None:
    x, dy = normal(9, 4, seed=1), normal(9, 3, seed=2)
    three_lanes = agree(lambda k: whole_stream(k, dy, x, segments([2, 5, 9])), everyone)[1]
    one_lane = agree(lambda k: whole_stream(k, dy, x, segments([9])), everyone)[1]
    assert (three_lanes != one_lane).any(), "the order of the sum must be visible"


@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_that_count_as_zero_are_never_read(everyone: list[Kernels], dtype: torch.dtype) -> None:
    """Two micro-batches: one lane ends and one goes on in the first, which ends in the second; memory begins as NaN."""
    dy, x = normal(12, 35, seed=5).to(grad_dtype(dtype)), normal(12, 33, seed=6).to(dtype)
    cuts = ((slice(0, 7), segments([4, 7], [1, 0])), (slice(7, 12), segments([3, 5])))
    for kernels in everyone:
        clean, lazy = stream(35, 33), stream(35, 33)
        lazy.lane.fill_(torch.nan)
        lazy.total.fill_(torch.nan)
        lazy.lane_is_zero = lazy.total_is_zero = True
        for part, cut in cuts:
            kernels.matmul_dw(dy[part], x[part], cut, clean)
            kernels.matmul_dw(dy[part], x[part], cut, lazy)
            assert not lazy.total_is_zero
            if not lazy.lane_is_zero:
                assert differing(lazy.lane, clean.lane) == 0
            assert differing(lazy.total, clean.total) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 3])
def test_a_lane_of_minus_zero_keeps_its_sign(everyone: list[Kernels], tokens: int, dtype: torch.dtype) -> None:
    x, dy = torch.full((tokens, 5), 0.0, dtype=dtype), torch.full((tokens, 37), -0.0, dtype=grad_dtype(dtype))
    minus = torch.full((37, 5), -0.0)

    def lane(kernels: Kernels) -> Tensor:
        running = Stream(minus.clone(), torch.zeros(37, 5))
        kernels.matmul_dw(dy, x, segments([tokens], [0]), running)
        return running.lane

    assert_same_bits(agree(lane, everyone), minus)


@pytest.mark.parametrize("fold", [[], [0], [1], [1, 0], [1, 1], [0, 1, 0]], ids=str)
@pytest.mark.parametrize("lane_is_zero", [False, True])
@pytest.mark.parametrize("total_is_zero", [False, True])
def test_all_implementations_keep_the_flags_of_a_stream_alike(
    everyone: list[Kernels], fold: list[int], lane_is_zero: bool, total_is_zero: bool
) -> None:
    n = len(fold)
    dy, x = normal(2 * n, 5, seed=1), normal(2 * n, 3, seed=2)

    def flags(kernels: Kernels) -> Tensor:
        running = Stream(torch.zeros(5, 3), torch.zeros(5, 3), False, lane_is_zero, total_is_zero)
        kernels.matmul_dw(dy, x, segments(range(2, 2 * n + 1, 2), fold), running)
        return torch.tensor([running.lane_is_zero, running.total_is_zero])

    lane, total = agree(flags, everyone).tolist()
    assert lane == (lane_is_zero and fold[-1:] != [0])
    assert total == (total_is_zero and 1 not in fold)


def test_memory_around_a_stream_is_untouched(compiled: list[Kernels]) -> None:
    x, dy = normal(7, 33, seed=1), normal(7, 31, seed=2)
    for kernels in compiled:
        lane, total = torch.full((33, 33), 7.0), torch.full((33, 33), 7.0)
        lane[1:-1], total[1:-1] = 0.0, 0.0
        kernels.matmul_dw(dy, x, segments([4, 7], [1, 0]), Stream(lane[1:-1], total[1:-1]))
        for buffer in (lane, total):
            assert (buffer[0] == 7).all()
            assert (buffer[-1] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_further_apart_than_two_to_the_31_elements(compiled: list[Kernels], dtype: torch.dtype) -> None:
    x, w, dy = wild(2, 33, dtype=dtype, seed=1), wild(31, 33, dtype=dtype, seed=2), gradient(2, 31, dtype=dtype, seed=3)
    expected = all_four(Reference(), x, w, None, dy)
    for kernels in compiled[-1:]:
        actual = all_four(kernels, far_rows(x), w, None, far_rows(dy))
        assert_same_bits(actual, expected, kernels.name)


def test_a_sum_that_underflows_is_a_positive_zero(everyone: list[Kernels]) -> None:
    x, w = torch.full((1, 3), 2.0**-100), torch.full((2, 3), -(2.0**-100))
    bias = torch.full((2,), -0.0)
    for kernels in everyone:
        y = kernels.matmul(x, kernels.pack(w)), kernels.matmul(x, kernels.pack(w), bias, logits=True)
        assert_same_bits(y, [torch.zeros(1, 2)] * 2, kernels.name)
        assert_same_bits(kernels.matmul_dx(x[:, :2], kernels.pack(w)), torch.zeros(1, 3), kernels.name)


def test_integers_are_exact(everyone: list[Kernels]) -> None:
    numbers = torch.arange(8192.0)[:, None]
    y = agree(lambda k: k.matmul(torch.ones(1, 1), k.pack(numbers)), everyone)
    assert_same_bits(y, numbers.T.contiguous())
    x, w = torch.randint(-100, 100, (5, 127)).float(), torch.randint(-100, 100, (33, 127)).float()
    y = agree(lambda k: k.matmul(x, k.pack(w)), everyone)
    assert_same_bits(y, (x.long()[:, None] * w.long()[None]).sum(-1).float())


def test_a_large_bf16_result_is_finite(everyone: list[Kernels]) -> None:
    x = torch.full((1, 100), 100.0, dtype=torch.bfloat16)
    y = agree(lambda k: k.matmul(x, k.pack(torch.full((1, 100), 10.0, dtype=torch.bfloat16))), everyone)
    assert_same_bits(y, torch.tensor([[1e5]]).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [33, 1000])
def test_the_error_is_that_of_a_chain(compiled: list[Kernels], k: int, dtype: torch.dtype) -> None:
    # each of K fused steps rounds once, relative to a partial sum that is at most the sum of the sizes
    x, w, dy = normal(17, k, dtype=dtype, seed=1), normal(35, k, dtype=dtype, seed=2), normal(17, 35, seed=3)
    kernels = compiled[-1]
    exact, size = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    y = kernels.matmul(x, kernels.pack(w), logits=True)
    assert ((y - exact).abs() <= k * 2.0**-24 * size).all()
    dy = dy.to(grad_dtype(dtype))
    running = stream(35, k)
    kernels.matmul_dw(dy, x, segments([17]), running)
    exact, size = dy.double().T @ x.double(), dy.double().abs().T @ x.double().abs()
    assert ((running.total - exact).abs() <= 17 * 2.0**-24 * size).all()
    dx = kernels.matmul_dx(dy, kernels.pack(w)).double()
    exact, size = dy.double() @ w.double(), dy.double().abs() @ w.double().abs()
    storing = 2.0**-8 if dy.dtype == torch.bfloat16 else 2.0**-24
    assert ((dx - exact).abs() <= 35 * 2.0**-24 * size + storing * exact.abs() * 1.01).all()


def test_no_tokens_give_no_rows(everyone: list[Kernels]) -> None:
    x, w, dy = torch.zeros(0, 5), normal(3, 5), torch.zeros(0, 3)
    y, _, dx, *_ = agree(lambda k: all_four(k, x, w, None, dy), everyone)
    assert y.shape == (0, 3)
    assert dx.shape == (0, 5)
