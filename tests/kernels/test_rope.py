"""rope: one rotation of two halves, its inverse, and nothing that knows the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import LAYOUTS, Layout, agree, assert_same_bits, assert_within, flushing_denormals, normal, wild
from memory import far_rows
from vexact_kernels.contract import DTYPES, Kernels
from vexact_kernels.reference import Reference

POSITIONS = torch.tensor([0, 5, 5, 63, 64, 1, 199])


def tables(size: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(200.0)[:, None] * (10000.0 ** -(torch.arange(size // 2) / (size // 2)))
    return angle.cos(), angle.sin()


def both_ways(kernels: Kernels, x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    return [kernels.rope(x, POSITIONS, cos, sin), kernels.rope(x, POSITIONS, cos, sin, inverse=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("size", [2, 6, 16, 32, 64, 80, 96, 128, 256])
def test_all_implementations_agree(everyone: list[Kernels], size: int, heads: int, dtype: torch.dtype) -> None:
    x = wild(len(POSITIONS), heads, size, dtype=dtype)
    agree(lambda k: both_ways(k, x, *tables(size)), everyone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_no_bit(everyone: list[Kernels], layout: Layout, dtype: torch.dtype) -> None:
    x = wild(len(POSITIONS), 3, 32, dtype=dtype)
    expected = both_ways(everyone[0], x, *tables(32))
    for kernels in everyone:
        assert_same_bits(both_ways(kernels, layout(x), *tables(32)), expected, kernels.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_know_its_batch(everyone: list[Kernels], dtype: torch.dtype) -> None:
    cos, sin = tables(32)
    x = wild(len(POSITIONS), 3, 32, dtype=dtype)
    expected = everyone[0].rope(x, POSITIONS, cos, sin)
    x[0] = torch.nan
    for kernels in everyone:
        assert_same_bits(kernels.rope(x, POSITIONS, cos, sin)[1:], expected[1:], kernels.name)
        assert_same_bits(kernels.rope(x[3:4], POSITIONS[3:4], cos, sin), expected[3:4], kernels.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_ambient_flush_of_subnormals_changes_nothing(compiled: list[Kernels], dtype: torch.dtype) -> None:
    x = wild(len(POSITIONS), 3, 32, dtype=dtype, low=-140, high=-120)
    expected = both_ways(Reference(), x, *tables(32))
    for kernels in compiled:
        with flushing_denormals():
            actual = both_ways(kernels, x, *tables(32))
        assert_same_bits(actual, expected, kernels.name)


def test_rows_may_lie_further_apart_than_two_to_the_31_elements(compiled: list[Kernels]) -> None:
    x, positions, (cos, sin) = wild(2, 3, 32, dtype=torch.bfloat16), torch.tensor([5, 63]), tables(32)
    expected = Reference().rope(x, positions, cos, sin)
    assert_same_bits(compiled[-1].rope(far_rows(x), positions, cos, sin), expected)


def test_position_zero_is_the_identity(everyone: list[Kernels]) -> None:
    x = normal(3, 2, 16)
    for kernels in everyone:
        assert_same_bits(kernels.rope(x, torch.zeros(3, dtype=torch.int64), *tables(16)), x, kernels.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rotation_against_float64(compiled: list[Kernels], dtype: torch.dtype) -> None:
    # Two products and a sum round once each, relative to the pair's length; then the result is stored once.
    cos, sin = tables(64)
    x = normal(len(POSITIONS), 3, 64, dtype=dtype)
    x1, x2 = x.double().chunk(2, -1)
    c, s = cos[POSITIONS].double()[:, None], sin[POSITIONS].double()[:, None]
    exact = torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1)
    length = torch.sqrt(x1 * x1 + x2 * x2).repeat(1, 1, 2)
    y = compiled[-1].rope(x, POSITIONS, cos, sin)
    stored = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert ((y.double() - exact).abs() <= 3 * 2.0**-24 * length + stored * exact.abs() + 2.0**-25).all()
    if dtype == torch.bfloat16:
        assert_within(y, exact, bound=0.51, nearest=0.99)


def test_the_inverse_is_the_gradient(compiled: list[Kernels]) -> None:
    cos, sin = tables(32)
    x64 = normal(len(POSITIONS), 3, 32, seed=1).double().requires_grad_()
    dy = normal(len(POSITIONS), 3, 32, seed=2)
    x1, x2 = x64.chunk(2, -1)
    c, s = cos[POSITIONS].double()[:, None], sin[POSITIONS].double()[:, None]
    torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1).backward(dy.double())
    assert x64.grad is not None
    dx = compiled[-1].rope(dy, POSITIONS, cos, sin, inverse=True)
    assert (dx.double() - x64.grad).abs().max() <= 3 * 2.0**-24 * dy.abs().max() * 2


def test_a_position_behind_the_tables_is_refused(everyone: list[Kernels]) -> None:
    for kernels in everyone:
        with pytest.raises(IndexError):
            kernels.rope(normal(1, 1, 16), torch.tensor([200]), *tables(16))
