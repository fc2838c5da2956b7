"""The replaced parts of Triton's interpreter compute what the hardware would; as they came, they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from helpers import assert_same_bits, normal, wild
from interpreter import SHIPPED
from vexact_kernels import float32

HALVES = (torch.bfloat16, torch.float16)
PATTERNS = torch.arange(2**16, dtype=torch.int32).to(torch.int16)


@triton.jit
def cast_kernel(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


@triton.jit
def truncating_kernel(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty, fp_downcast_rounding="rtz"))


@triton.jit
def dot_kernel(a, b, c, y, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    at = m[:, None] * N + n[None, :]
    x, w = tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :])
    tl.store(y + at, tl.dot(x, w, tl.load(c + at), input_precision="ieee"))


@triton.jit
def fma_kernel(a, b, c, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.fma(tl.load(a + at), tl.load(b + at), tl.load(c + at)))


def cast(x: Tensor, dtype: torch.dtype, kernel: Any = cast_kernel) -> Tensor:
    """x converted inside a kernel."""
    y = torch.empty(x.shape, dtype=dtype)
    kernel[(1,)](x, y, N=x.numel())
    return y


def near_ties(dtype: torch.dtype) -> Tensor:
    """float32 patterns halfway between neighbours of `dtype`, and one and two steps beside that, all over the range."""
    values = PATTERNS.view(dtype).float()
    values = values[values.isfinite()].sort().values.unique()
    half = ((values[:-1].double() + values[1:].double()) / 2).float().view(torch.int32)
    patterns = torch.cat([half + step for step in range(-2, 3)]).view(torch.float32)
    size = 1 << (patterns.numel() - 1).bit_length()
    return torch.nn.functional.pad(patterns, (0, size - patterns.numel()))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_sixteen_bit_value_widens_exactly(dtype: torch.dtype) -> None:
    x = PATTERNS.view(dtype)
    exact = torch.tensor([float(v) for v in x.tolist()], dtype=torch.float32)
    assert_same_bits(cast(x, torch.float32), exact)


@pytest.mark.parametrize("dtype", HALVES)
def test_near_ties_are_rounded_once_to_the_nearest_even(dtype: torch.dtype) -> None:
    x = near_ties(dtype)
    nearest = cast(x, dtype)
    assert_same_bits(nearest, x.to(dtype))
    # torch's own rounding against the definition: no value of the dtype is nearer, and a tie goes to the even pattern
    finite = nearest.isfinite()
    bits = nearest.view(torch.int16)
    error = (nearest.double() - x.double()).abs()
    for step in (-1, 1):
        neighbour = (bits + step).view(dtype).double()
        other = (neighbour - x.double()).abs()
        closer = finite & neighbour.isfinite() & ((other < error) | ((other == error) & (bits & 1 == 1)))
        assert not closer.any(), f"{int(closer.sum())} values have a better neighbour"


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_a_dot_is_the_chain(dtype: torch.dtype) -> None:
    a, b = wild(16, 32, dtype=dtype, seed=1, low=-80, high=20), wild(32, 8, dtype=dtype, seed=2, low=-80, high=20)
    if dtype == torch.float16:
        a, b = wild(16, 32, dtype=dtype, seed=1), wild(32, 8, dtype=dtype, seed=2)
    start = wild(16, 8, seed=3, low=-140, high=10)
    y = torch.empty(16, 8)
    dot_kernel[(1,)](a, b, start, y, M=16, N=8, K=32)
    expected = start
    for k in range(32):
        expected = float32.fma(a[:, k, None].float(), b[None, k].float(), expected)
    assert_same_bits(y, expected)


def test_a_fused_multiply_add_rounds_once() -> None:
    a, b, c = (wild(4096, seed=seed, low=-70, high=40) for seed in range(3))
    a[0], b[0], c[0] = 1 + 2**-23, (1 - 2**-23) * 2**-24, 1 + 2**-23  # two roundings go wrong here
    y = torch.empty(4096)
    fma_kernel[(1,)](a, b, c, y, N=4096)
    assert_same_bits(y, float32.fma(a, b, c))


CHECKS = [
    ("cast_impl", lambda: test_every_sixteen_bit_value_widens_exactly(torch.bfloat16)),
    ("cast_impl", lambda: test_near_ties_are_rounded_once_to_the_nearest_even(torch.bfloat16)),
    ("create_dot", lambda: test_a_dot_is_the_chain(torch.bfloat16)),
]


@pytest.mark.parametrize("name, check", CHECKS)
def test_what_triton_ships_is_caught(name: str, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, name, SHIPPED[name])
    with pytest.raises(AssertionError):
        check()


def test_another_rounding_is_refused() -> None:
    with pytest.raises(interpreter.InterpreterError, match="nearest even"):
        cast(normal(64), torch.bfloat16, truncating_kernel)
