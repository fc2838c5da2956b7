"""noise: standard normal numbers that are addressed by (key, column), so that batch mates, order and width cannot move
them.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from helpers import agree, assert_same_bits, assert_within, flushing_denormals
from vexact_kernels import float32
from vexact_kernels.contract import Kernels
from vexact_kernels.philox import NOISE, draw_bits, noise_words, philox
from vexact_kernels.reference import Reference

KEYS = torch.tensor([0, 1, -1, -(2**63), 2**63 - 1, 2**32, -(2**32), 1234567890123456789])
WIDTHS = [0, 1, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 1000, 1023, 1024, 1025, 4099]
LARGEST = 5.42  # the inverse at half a step from the end, 2^-25


def words_of(numbers: Tensor) -> Tensor:
    """The random words whose high 24 bits are these numbers."""
    return numbers << 8


def every_few_numbers() -> Tensor:
    """A seventh of the 2^24, and all near the ends, the middle and the edge between the two forms."""
    half, edge = 2**23, round((0.5 + float32.CENTRAL) * 2**24)
    near = [torch.arange(max(0, at - 2000), min(2**24, at + 2000)) for at in (0, edge, 2**24 - edge, half, 2**24)]
    return torch.cat([torch.arange(0, 2**24, 7), *near])


def exact(numbers: Tensor) -> Tensor:
    """float64: the inverse of the normal distribution at u = (n + 1/2)·2^-24."""
    return torch.special.ndtri((numbers.double() + 0.5) * 2.0**-24)


@pytest.mark.parametrize("columns", WIDTHS)
def test_all_implementations_agree(everyone: list[Kernels], columns: int) -> None:
    y = agree(lambda k: k.noise(KEYS, columns), everyone)
    assert y.dtype == torch.float32 and y.shape == (len(KEYS), columns)
    assert (y.abs() <= LARGEST + 1e-4).all()


def test_a_vocabulary_of_151936_agrees(everyone: list[Kernels]) -> None:
    agree(lambda k: k.noise(KEYS[2:3], 151_936), everyone)


def test_no_rows_have_no_numbers(everyone: list[Kernels]) -> None:
    assert agree(lambda k: k.noise(KEYS[:0], 33), everyone).shape == (0, 33)


def test_a_number_depends_on_its_key_and_column_alone(everyone: list[Kernels]) -> None:
    order = torch.tensor([5, 2, 7, 0, 1, 6, 4, 3])
    for kernels in everyone:
        together = kernels.noise(KEYS, 1100)
        assert_same_bits(kernels.noise(KEYS[order], 1100), together[order], kernels.name)
        assert_same_bits(torch.cat([kernels.noise(one[None], 1100) for one in KEYS]), together, kernels.name)
        for columns in (1, 17, 64, 1025):
            assert_same_bits(kernels.noise(KEYS, columns), together[:, :columns].contiguous(), kernels.name)


def test_strided_keys_change_no_bit(everyone: list[Kernels]) -> None:
    expected = everyone[0].noise(KEYS, 129)
    for kernels in everyone:
        assert_same_bits(kernels.noise(torch.stack([KEYS, KEYS + 1], dim=1)[:, 0], 129), expected, kernels.name)


def test_every_bit_of_the_key_counts(compiled: list[Kernels]) -> None:
    base = 0x0123456789ABCDEF
    keys = [base, *(base ^ (1 << bit) for bit in range(64))]
    keys = [key - 2**64 if key >= 2**63 else key for key in keys]
    y = agree(lambda k: k.noise(torch.tensor(keys), 64), compiled)
    same = (y[:, None] == y[None, :]).sum(-1)  # 24 bits: two of 64 numbers are equal by chance now and then
    assert (same - 64 * torch.eye(len(keys), dtype=torch.int64)).max() <= 1


def test_a_column_has_the_word_that_is_written(everyone: list[Kernels]) -> None:
    """With plain integers: sixteen blocks side by side, one word of each behind another."""
    key = -81985529216486896
    columns = [0, 1, 15, 16, 47, 48, 63, 64, 80, 1023, 1024, 4098]
    expected = []
    for v in columns:
        group, rest = divmod(v, 64)
        word, lane = divmod(rest, 16)
        counter = (16 * group + lane, 0, 0, 0x6E6F6973)
        expected.append(philox(counter, (key & (2**32 - 1), (key >> 32) & (2**32 - 1)))[word])
    y = agree(lambda k: k.noise(torch.tensor([key]), 4099), everyone)
    assert_same_bits(y[0, columns], float32.normal(torch.tensor(expected)))


def test_a_draw_meets_a_noise_in_its_own_corner_alone() -> None:
    """The counter's last word is NOISE: a draw's is the high half of its request, which requests do not reach."""
    first, second = noise_words(torch.tensor([77]), torch.tensor([5, 21]))[0].tolist()  # words 0 and 1 of block 5
    assert draw_bits(77, NOISE << 32, 0, 5) == first | second << 32
    assert draw_bits(77, 0, 0, 5) != first | second << 32
    assert NOISE << 32 > 2**62  # sequence numbers do not get there


def test_values_are_within_five_ulps_of_the_exact_inverse() -> None:
    # the coefficients have ten digits and are rounded to 24 bits; the two polynomials and the quotient round last
    numbers = every_few_numbers()
    y = float32.normal(words_of(numbers))
    assert_within(y, exact(numbers), bound=5.0, nearest=0.4)
    assert (y.double() - exact(numbers)).abs().max() <= 1.2e-6


@pytest.mark.parametrize("which, power", [("NORMAL_CENTRAL", 2), ("NORMAL_TAIL", 1)])
def test_a_coefficient_that_is_a_hundred_thousandth_off_is_seen(
    monkeypatch: pytest.MonkeyPatch, which: str, power: int
) -> None:
    numerator, denominator = getattr(float32, which)
    wrong = list(numerator)
    wrong[power] = (float.fromhex(wrong[power]) * (1 + 1e-5)).hex()
    monkeypatch.setattr(float32, which, (tuple(wrong), denominator))
    numbers = every_few_numbers()
    with pytest.raises(AssertionError, match="ulps"):
        assert_within(float32.normal(words_of(numbers)), exact(numbers), bound=5.0)


def test_both_sides_are_mirror_images_and_no_number_is_zero_or_infinite() -> None:
    numbers = every_few_numbers()
    y, mirrored = float32.normal(words_of(numbers)), float32.normal(words_of(2**24 - 1 - numbers))
    assert_same_bits(y, -mirrored)
    assert y.isfinite().all() and (y != 0).all()


def test_the_low_eight_bits_of_a_word_do_not_count() -> None:
    words = torch.tensor([0, 255, 256, 2**32 - 1, 2**32 - 256])
    y = float32.normal(words).tolist()
    assert y[0] == y[1] != y[2] and y[3] == y[4] == -y[0]
    assert abs(y[3] - LARGEST) < 1e-4


def test_many_numbers_are_normally_distributed(compiled: list[Kernels]) -> None:
    """Moments and neighbours within five standard errors. The numbers are fixed, so this passes always or never."""
    keys, columns = 40, 49_152
    y = compiled[-1].noise(torch.arange(keys), columns).double()
    n = y.numel()
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((y**power).mean()) - mean) <= 5 * math.sqrt(variance / n), power
    ranked = torch.special.ndtr(y.flatten().sort().values)
    distance = (ranked - (torch.arange(n) + 0.5) / n).abs().max()
    assert distance <= 2.0 / math.sqrt(n)
    for shift in (1, 4, 16, 64):  # neighbours, words of a block, groups
        assert abs(float((y[:, shift:] * y[:, :-shift]).mean())) <= 5 / math.sqrt(n), shift
    assert abs(float((y[1:] * y[:-1]).mean())) <= 5 / math.sqrt(n)  # keys that are neighbours


def test_an_ambient_flush_of_subnormals_changes_nothing(compiled: list[Kernels]) -> None:
    expected = Reference().noise(KEYS, 129)
    for kernels in compiled:
        with flushing_denormals():
            actual = kernels.noise(KEYS, 129)
        assert_same_bits(actual, expected, kernels.name)


def test_keys_of_another_type_are_refused(everyone: list[Kernels]) -> None:
    for kernels in everyone[1:]:
        with pytest.raises(ValueError, match=r"key is torch.int32 \[8\], needed is torch.int64 \[8\]"):
            kernels.noise(KEYS.to(torch.int32), 5)
