"""S: a halving tree in blocks of 1024."""

from __future__ import annotations

import math

import pytest
import torch

from helpers import agree, assert_same_bits, flushing_denormals, unaligned, wild
from vexact_kernels.contract import Kernels
from vexact_kernels.reference import Reference

SIZES = [1, 2, 3, 15, 16, 17, 31, 33, 127, 129, 1000, 1023, 1024, 1025, 1536, 2048, 2049, 100_003, 2**20 + 1025]


@pytest.mark.parametrize("n", [0, *SIZES])
def test_all_implementations_agree(everyone: list[Kernels], n: int) -> None:
    x = wild(n)
    agree(lambda k: (k.sum(x), k.sum_squares(x)), everyone)


def test_the_tree_is_the_written_one(everyone: list[Kernels]) -> None:
    x = wild(5, seed=3)
    a, b, c, d, e = x
    expected = (((a + e) + c) + (b + d)) + 0.0  # padded to eight: first the upper half onto the lower
    assert_same_bits(agree(lambda k: k.sum(x), everyone), expected)


def test_blocks_are_summed_first(everyone: list[Kernels]) -> None:
    x = wild(2500, seed=4)
    reference = everyone[0]
    blocks = torch.stack([reference.sum(part) for part in x.split(1024)])
    assert_same_bits(agree(lambda k: k.sum(x), everyone), reference.sum(blocks))


@pytest.mark.parametrize("n", [1, 3, 129, 1025])
def test_a_sum_of_negative_zeros_is_positive(everyone: list[Kernels], n: int) -> None:
    assert_same_bits(agree(lambda k: k.sum(torch.full((n,), -0.0)), everyone), torch.tensor(0.0))


@pytest.mark.parametrize("n", [33, 1000, 100_003])
def test_the_error_is_that_of_a_tree(compiled: list[Kernels], n: int) -> None:
    # one rounding a level, relative to the sum of the sizes
    x = wild(n, seed=5)
    levels = math.ceil(math.log2(n)) + 1
    error = abs(compiled[-1].sum(x).item() - math.fsum(x.tolist()))
    assert error <= levels * 2.0**-24 * math.fsum(x.abs().tolist())
    squares = [v * v for v in x.tolist()]
    error = abs(compiled[-1].sum_squares(x).item() - math.fsum(squares))
    assert error <= (levels + 1) * 2.0**-24 * math.fsum(squares)


def test_logical_order_counts_and_not_the_layout(everyone: list[Kernels]) -> None:
    x = wild(37, 41, seed=6)
    expected = everyone[0].sum(x)
    for kernels in everyone:
        assert_same_bits(kernels.sum(x.T.contiguous().T), expected, kernels.name)
        assert_same_bits(kernels.sum(unaligned(x)), expected, kernels.name)


def test_an_ambient_flush_of_subnormals_changes_nothing(compiled: list[Kernels]) -> None:
    x = wild(1000, low=-140, high=-127)
    roots = wild(1000, low=-72, high=-64)
    expected = Reference().sum(x), Reference().sum_squares(roots)
    for kernels in compiled:
        with flushing_denormals():
            actual = kernels.sum(x), kernels.sum_squares(roots)
        assert_same_bits(actual, expected, kernels.name)
