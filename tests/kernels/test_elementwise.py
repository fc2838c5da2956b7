"""add and cast: one rounding to nearest even, in every storage type."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import (
    DIGITS,
    LAYOUTS,
    LOWEST_EXPONENT,
    Layout,
    agree,
    assert_same_bits,
    flushing_denormals,
    wild,
)
from vexact_kernels.contract import DTYPES, Kernels
from vexact_kernels.reference import Reference

LARGEST = {torch.bfloat16: 2.0**128, torch.float16: 2.0**16}  # the first power of two that is not representable


def near_ties() -> Tensor:
    """Floats of every exponent with low bits at, just below and just above every tie of bf16 and of fp16."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return (high[:, None] + low).flatten().to(torch.int32).view(torch.float32)


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded by float64 arithmetic: a count of units of the last place, rounded half to even."""
    wide = x.double()
    exponent = torch.clamp(torch.frexp(wide.abs()).exponent - 1, min=LOWEST_EXPONENT[dtype])
    unit = torch.ldexp(torch.ones_like(wide), exponent - (DIGITS[dtype] - 1))
    rounded = torch.where(wide.isfinite(), torch.round(wide / unit) * unit, wide)
    rounded = torch.where(rounded.abs() >= LARGEST[dtype], torch.inf, rounded.abs())
    return torch.copysign(rounded, wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_storing_rounds_once_to_nearest_even(everyone: list[Kernels], dtype: torch.dtype) -> None:
    x = near_ties()
    x = x[~x.isnan()]
    y = agree(lambda k: k.cast(x, dtype), everyone)
    assert_same_bits(y.double(), nearest(x, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loading_widens_every_value_exactly(everyone: list[Kernels], dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    y = agree(lambda k: k.cast(x, torch.float32), everyone)
    assert_same_bits(y.double(), x.double())
    back = agree(lambda k: k.cast(y, dtype), everyone)
    assert_same_bits(back, x)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_every_cast_agrees(everyone: list[Kernels], source: torch.dtype, target: torch.dtype) -> None:
    x = wild(7, 33, dtype=source, low=-30, high=20)
    agree(lambda k: k.cast(x, target), everyone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 3, 31, 33, 127, 129, 1000])
def test_add_agrees_and_rounds_once(everyone: list[Kernels], n: int, dtype: torch.dtype) -> None:
    a, b = wild(n, dtype=dtype, seed=1), wild(n, dtype=dtype, seed=2)
    y = agree(lambda k: k.add(a, b), everyone)
    assert_same_bits(y, (a.float() + b.float()).to(dtype))
    if n:  # the exact sum of two such values fits in float64, so this is the nearest value
        assert_same_bits(y + 0.0, (a.double() + b.double()).float().to(dtype) + 0.0)


def test_add_keeps_the_sign_of_zero(everyone: list[Kernels]) -> None:
    a, b = torch.tensor([0.0, -0.0, -0.0]), torch.tensor([-0.0, -0.0, 0.0])
    assert_same_bits(agree(lambda k: k.add(a, b), everyone), torch.tensor([0.0, -0.0, 0.0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_no_bit(everyone: list[Kernels], layout: Layout, dtype: torch.dtype) -> None:
    a, b = wild(6, 35, dtype=dtype, seed=1), wild(6, 35, dtype=dtype, seed=2)
    expected = everyone[0].add(a, b), everyone[0].cast(a, torch.bfloat16)
    for kernels in everyone:
        actual = kernels.add(layout(a), layout(b)), kernels.cast(layout(a), torch.bfloat16)
        assert_same_bits(actual, expected, kernels.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_ambient_flush_of_subnormals_changes_nothing(compiled: list[Kernels], dtype: torch.dtype) -> None:
    low = -140 if dtype != torch.float16 else -24
    a, b = wild(129, dtype=dtype, low=low, high=low + 20), wild(129, dtype=dtype, low=low, high=low + 20, seed=1)
    targets = [t for t in DTYPES if t != dtype]
    expected = [Reference().add(a, b), *(Reference().cast(a, t) for t in targets)]
    for kernels in compiled:
        with flushing_denormals():
            actual = [kernels.add(a, b), *(kernels.cast(a, t) for t in targets)]
        assert_same_bits(actual, expected, kernels.name)
