"""Bits are compared as integers: no tolerance, no excuse for a sign, and the first difference is shown."""

from __future__ import annotations

import pytest
import torch

from vexact.testing import Comparison, assert_same_bits, bits, compare_bits, hexadecimal

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_is_not_minus_zero(dtype: torch.dtype) -> None:
    zero = torch.zeros(3, dtype=dtype)
    assert torch.equal(zero, -zero)
    assert compare_bits(zero, -zero).differ == 3


def test_a_nan_equals_itself() -> None:
    x = torch.tensor([1.0, float("nan")])
    assert compare_bits(x, x.clone()) == Comparison(compared=2)


def test_the_first_difference_is_shown_with_index_decimals_and_bits() -> None:
    left = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    right = left.clone()
    right.view(torch.int32)[1, 0] += 1
    right[1, 1] = -4.0
    found = compare_bits(left, right, "logits")
    assert (found.compared, found.differ, found.where) == (4, 2, "logits")
    assert str(found.first) == "at [1, 0]: 3 (0x40400000) and 3.00000024 (0x40400001)"


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_integers_are_compared_as_they_are(dtype: torch.dtype) -> None:
    left = torch.tensor([1, 0, 1]).to(dtype)
    right = torch.tensor([1, 1, 1]).to(dtype)
    found = compare_bits(left, right)
    assert found.differ == 1
    assert found.first is not None
    assert found.first.index == (1,)


@pytest.mark.parametrize(
    "other", [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(1, 3), torch.zeros(2)], ids=["dtype", "rank", "length"]
)
def test_another_dtype_or_shape_is_refused(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        compare_bits(torch.zeros(3), other)


def test_strided_tensors_are_compared_by_place() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert compare_bits(x.T, x.T.contiguous()).differ == 0
    assert bits(x.T).shape == (4, 3)


def test_nothing_compared_is_nothing_that_differs() -> None:
    assert compare_bits(torch.empty(0), torch.empty(0)) == Comparison()


def test_a_scalar_has_an_empty_index() -> None:
    found = compare_bits(torch.tensor(1.0), torch.tensor(2.0))
    assert found.first is not None
    assert found.first.index == ()


def test_comparisons_add_up_and_keep_the_first_difference() -> None:
    same = compare_bits(torch.ones(2), torch.ones(2), "a")
    first = compare_bits(torch.ones(2), torch.zeros(2), "b")
    second = compare_bits(torch.ones(3), -torch.ones(3), "c")
    total = same + first + second
    assert (total.compared, total.differ, total.where, total.first) == (7, 5, "b", first.first)


def test_the_assertion_names_what_differs() -> None:
    assert_same_bits(torch.ones(2), torch.ones(2))
    with pytest.raises(AssertionError, match=r"gradient: 1 of 2 values differ, first at \[1\]: 1 \(0x3f800000\)"):
        assert_same_bits(torch.ones(2), torch.tensor([1.0, 2.0]), "gradient")


@pytest.mark.parametrize(
    ("dtype", "digits"), [(torch.float32, "0xbf800000"), (torch.bfloat16, "0xbf80"), (torch.float16, "0xbc00")]
)
def test_bits_are_written_in_full_width(dtype: torch.dtype, digits: str) -> None:
    assert hexadecimal(torch.tensor(-1.0, dtype=dtype)) == digits
