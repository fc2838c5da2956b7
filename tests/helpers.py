"""What the tests share: equality of bits, ulps against float64, awkward layouts, small streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vexact_kernels.contract import Kernels, Segments, Stream, grad_dtype

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DIGITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}  # of the significand
LOWEST_EXPONENT = {torch.float32: -126, torch.bfloat16: -126, torch.float16: -14}  # of a normal number


def differing(actual: Tensor, expected: Tensor) -> int:
    """How many values differ in their bits. NaN equals NaN: payloads are no part of the contract."""
    assert actual.dtype == expected.dtype, f"{actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    integers = INTEGERS[actual.element_size()]
    differ = actual.contiguous().view(integers) != expected.contiguous().view(integers)
    if actual.dtype.is_floating_point:
        differ &= ~(actual.isnan() & expected.isnan())
    return int(differ.count_nonzero())


def assert_same_bits(actual: Any, expected: Any, who: str = "") -> None:
    """Equal in every bit, dtype and shape; tuples and lists of tensors are compared one by one."""
    if isinstance(expected, tuple | list):
        assert len(actual) == len(expected)
        for position, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(a, e, f"{who}[{position}]")
    elif expected is None:
        assert actual is None, f"{who}: expected nothing"
    else:
        count = differing(actual, expected)
        if count:
            first = tuple(((actual != expected) | actual.isnan()).nonzero()[:1].flatten().tolist())
            raise AssertionError(
                f"{who}: {count} of {actual.numel()} values differ, the first near {first}:\n{actual}\n{expected}"
            )


def agree(call: Callable[[Kernels], Any], implementations: Sequence[Kernels]) -> Any:
    """Run `call` on each implementation, compare every bit with the first one's, and return the first one's result."""
    expected = call(implementations[0])
    for other in implementations[1:]:
        assert_same_bits(call(other), expected, f"{other.name} against {implementations[0].name}")
    return expected


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers of their own seed, rounded to dtype."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def wild(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, low: int = -12, high: int = 6) -> Tensor:
    """Both signs, exponents low … high, and a tenth of zeros of either sign."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(low, high + 1, shape, generator=generator)
    x = torch.ldexp(torch.randn(shape, generator=generator), exponents)
    zero = torch.rand(shape, generator=generator) < 0.1
    return torch.where(zero, 0.0 * x, x).to(dtype)


def gradient(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A gradient in the storage type that `dtype` has between ops."""
    return wild(*shape, dtype=grad_dtype(dtype), seed=seed)


def segments(ends: Sequence[int], fold: Sequence[int] | None = None) -> Segments:
    """Segments that end at `ends`; without `fold`, each ends its lane."""
    flags = [1] * len(ends) if fold is None else fold
    return Segments(torch.tensor(ends, dtype=torch.int64), torch.tensor(flags, dtype=torch.uint8))


def stream(*shape: int, touched: bool = False) -> Stream:
    """An empty stream; `touched` for an embedding's."""
    flags = torch.zeros(shape[0], dtype=torch.uint8) if touched else None
    return Stream(torch.zeros(shape), torch.zeros(shape), touched=flags)


def row_strided(x: Tensor) -> Tensor:
    """The same values with five NaN behind each row."""
    wide = torch.full((len(x), x[0].numel() + 5), torch.nan, dtype=x.dtype)
    wide[:, :-5] = x.flatten(1)
    return wide[:, :-5].unflatten(1, x.shape[1:])


def every_second_row(x: Tensor) -> Tensor:
    """The same values with a NaN row behind each row."""
    tall = torch.full((2 * len(x), *x.shape[1:]), torch.nan, dtype=x.dtype)
    tall[::2] = x
    return tall[::2]


def unaligned(x: Tensor) -> Tensor:
    """The same values, contiguous, one element behind the start of their memory."""
    memory = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype)
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)


def transposed(x: Tensor) -> Tensor:
    """The same values with the first dimension innermost."""
    return x.flatten(1).T.contiguous().T.unflatten(1, x.shape[1:])


Layout = Callable[[Tensor], Tensor]
LAYOUTS: tuple[Layout, ...] = (row_strided, every_second_row, unaligned, transposed)


@contextmanager
def flushing_denormals() -> Iterator[None]:
    """An ambient flush-to-zero, as some libraries leave it behind."""
    assert torch.set_flush_denormal(True), "this processor cannot flush subnormals"
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def ulps(actual: Tensor, exact: Tensor) -> Tensor:
    """Distance of each value from the exact one (float64), in units of the exact one's last place in actual's dtype."""
    exponent = torch.frexp(exact.abs()).exponent - 1
    exponent = torch.clamp(exponent, min=LOWEST_EXPONENT[actual.dtype])
    unit = torch.ldexp(torch.ones_like(exact), exponent - (DIGITS[actual.dtype] - 1))
    return (actual.double() - exact).abs() / unit


def assert_within(actual: Tensor, exact: Tensor, *, bound: float, nearest: float = 0.0) -> None:
    """No value further than `bound` ulps from the exact one, and a share of at least `nearest` within half an ulp.

    The message holds the histogram.
    """
    distance = ulps(actual, exact)
    edges = (0.0, 0.5, 1.0, 2.0, 4.0, 16.0, math.inf)
    counts = [int(((distance > a) & (distance <= b)).count_nonzero()) for a, b in pairwise(edges)]
    counts[0] += int((distance == 0).count_nonzero())
    histogram = ", ".join(f"≤ {edge}: {count}" for edge, count in zip(edges[1:], counts, strict=True))
    worst = float(distance.max())
    assert worst <= bound, f"{worst:.3g} ulps from the exact value, at most {bound} are allowed ({histogram})"
    share = counts[0] / distance.numel()
    assert share >= nearest, f"{share:.3f} of the values are the nearest, {nearest} are expected ({histogram})"
