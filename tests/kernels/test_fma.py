"""The fused multiply-add, with and without hardware: one rounding of the exact value."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from helpers import agree, assert_same_bits, segments, stream, wild
from vexact_kernels import float32
from vexact_kernels.contract import Kernels

HARD = (1 + 2**-23, (1 - 2**-23) * 2**-24, 1 + 2**-23)  # two roundings, to float64 and to float32, go wrong here


def nearest_float32(exact: Fraction) -> float:
    """Round to nearest even, by integers alone."""
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(size / unit) * unit  # Python rounds a tie to the even integer
    if rounded >= Fraction(2) ** 128:
        return float("inf") if exact > 0 else float("-inf")
    return float(rounded) if exact > 0 else -float(rounded)


def outer_fma(kernels: Kernels, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """fma(a[n], b[k], c[n, k]): a running lane that meets one token."""
    running = stream(*c.shape)
    running.lane.copy_(c)
    kernels.matmul_dw(a[None, :], b[None, :], segments([1], [0]), running)
    return running.lane


def test_every_implementation_rounds_once(everyone: list[Kernels]) -> None:
    a, b = wild(37, low=-70, high=70, seed=1), wild(41, low=-70, high=70, seed=2)
    c = wild(37, 41, low=-140, high=100, seed=3)
    y = agree(lambda k: outer_fma(k, a, b, c), everyone)
    exact = [[nearest_float32(Fraction(p) * Fraction(q) + Fraction(r)) for q, r in zip(b.tolist(), row, strict=True)]
             for p, row in zip(a.tolist(), c.tolist(), strict=True)]  # fmt: skip
    assert_same_bits(y + 0.0, torch.tensor(exact))  # a sum of exactly zero may carry either sign


def test_near_ties_are_rounded_once(everyone: list[Kernels]) -> None:
    # products just beside half a unit of the sum's last place
    a = 1 + torch.arange(64) * 2.0**-23
    b = torch.cat([(1 + torch.arange(-32, 32) * 2.0**-23) * 2.0**-24, (1 + torch.arange(-8, 8) * 2.0**-23) * 2.0**-25])
    c = (1 + torch.arange(64)[:, None] * 2.0**-23).expand(64, len(b)) * 1.0
    y = agree(lambda k: outer_fma(k, a, b, c), everyone)
    exact = [[nearest_float32(Fraction(p) * Fraction(q) + Fraction(r)) for q in b.tolist()]
             for p, r in zip(a.tolist(), c[:, 0].tolist(), strict=True)]  # fmt: skip
    assert_same_bits(y, torch.tensor(exact))


def test_the_hard_case_is_right_and_double_rounding_is_not(everyone: list[Kernels]) -> None:
    a, b, c = (torch.tensor([value], dtype=torch.float32) for value in HARD)
    expected = torch.tensor([[nearest_float32(Fraction(HARD[0]) * Fraction(HARD[1]) + Fraction(HARD[2]))]])
    assert_same_bits(agree(lambda k: outer_fma(k, a, b, c[None]), everyone), expected)
    twice = (a.double() * b.double() + c.double()).float()
    assert twice.item() != expected.item()


def test_subnormals_signs_and_infinities(everyone: list[Kernels]) -> None:
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**-75, 2.0**127, -(2.0**127), torch.inf])
    for c in special.tolist():
        grid = torch.full((len(special), len(special)), c)
        agree(partial(outer_fma, a=special, b=special, c=grid), everyone)


def test_the_square_root_is_the_nearest() -> None:
    x = wild(4096, low=-100, high=100, seed=5).abs()
    root = float32.sqrt(x).tolist()
    for value, r in zip(x.tolist()[:512], root, strict=False):
        low, high = (Fraction(float(torch.nextafter(torch.tensor(r), torch.tensor(to)))) for to in (-1.0, torch.inf))
        middle = Fraction(r)
        assert ((low + middle) / 2) ** 2 <= Fraction(value) or r == 0
        assert Fraction(value) <= ((high + middle) / 2) ** 2
