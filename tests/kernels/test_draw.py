"""draw: integers decide, addressed by (seed, request, sample, position), so that batch mates and order cannot."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from helpers import LAYOUTS, Layout, agree, assert_same_bits, flushing_denormals, normal
from vexact_kernels.contract import Kernels
from vexact_kernels.philox import draw_bits, philox, pick
from vexact_kernels.reference import Reference

ALL_ONES = 2**32 - 1
KNOWN = [  # Random123's known answers: counter, key, words
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def addresses(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """seed, request (64 bits), sample, position (32 bits), with extremes among them."""
    generator = torch.Generator().manual_seed(seed)
    wide = [torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator) for _ in range(2)]
    narrow = [torch.randint(0, 2**32, (n,), generator=generator) for _ in range(2)]
    for t, extreme in zip((*wide, *narrow), (-1, -(2**63), 2**32 - 1, 2**32 - 1), strict=True):
        t[0] = extreme
    return wide[0], wide[1], narrow[0], narrow[1]


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_philox_gives_the_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert philox(counter, key) == words


@pytest.mark.parametrize("vocabulary", [1, 3, 31, 33, 127, 129, 1000, 4099])
def test_all_implementations_agree(everyone: list[Kernels], vocabulary: int) -> None:
    n = 129
    logits = normal(n, vocabulary, scale=3.0)
    temperature = torch.tensor([0.0, 0.6, 1.0, 1.7, 1e-7])[torch.arange(n) % 5]
    ids = agree(lambda k: k.draw(logits, temperature, *addresses(n)), everyone)
    assert (ids >= 0).all()
    assert (ids < vocabulary).all()


def test_a_vocabulary_of_151936_agrees(everyone: list[Kernels]) -> None:
    logits = normal(2, 151_936)
    agree(lambda k: k.draw(logits, torch.ones(2), *addresses(2)), everyone)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_no_bit(everyone: list[Kernels], layout: Layout) -> None:
    logits, temperature = normal(17, 129, scale=3.0), torch.ones(17)
    expected = everyone[0].draw(logits, temperature, *addresses(17))
    for kernels in everyone:
        strided = [torch.stack([t, t + 1], dim=1)[:, 0] for t in addresses(17)]
        assert_same_bits(kernels.draw(layout(logits), temperature, *strided), expected, kernels.name)


def test_a_draw_depends_on_its_address_alone(compiled: list[Kernels]) -> None:
    logits, temperature, where = normal(65, 129, scale=2.0), torch.ones(65), addresses(65)
    order = torch.randperm(65, generator=torch.Generator().manual_seed(5))
    for kernels in compiled:
        together = kernels.draw(logits, temperature, *where)
        shuffled = kernels.draw(logits[order], temperature[order], *(t[order] for t in where))
        alone = torch.cat([kernels.draw(logits[i : i + 1], temperature[:1], *(t[i : i + 1] for t in where))
                           for i in range(65)])  # fmt: skip
        assert_same_bits(shuffled, together[order], kernels.name)
        assert_same_bits(alone, together, kernels.name)


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_every_part_of_the_address_counts(compiled: list[Kernels], which: int) -> None:
    n = 256
    where = [torch.full((n,), 3), torch.full((n,), 5), torch.full((n,), 7), torch.full((n,), 11)]
    where[which] = torch.arange(n)
    ids = agree(lambda k: k.draw(torch.zeros(1, 64).expand(n, 64), torch.ones(n), *where), compiled)
    assert len(ids.unique()) > 40
    if which < 2:  # the high halves of seed and request count too
        where[which] = torch.arange(n) << 32
        high = agree(lambda k: k.draw(torch.zeros(1, 64).expand(n, 64), torch.ones(n), *where), compiled)
        assert len(high.unique()) > 40
        assert (high != ids).any()


PROBABILITIES = [[0.5, 0.3, 0.15, 0.05], [1 / 3] * 3, [0.9, 0.1], [0.97, 0.01, 0.01, 0.005, 0.005]]


@pytest.mark.parametrize("probabilities", PROBABILITIES)
@pytest.mark.parametrize("vary", ["position", "request"])
def test_frequencies_are_those_of_the_distribution(
    compiled: list[Kernels], probabilities: list[float], vary: str
) -> None:
    draws, options = 200_000, len(probabilities)
    logits = torch.tensor(probabilities).log()[None].expand(draws, options)
    running, fixed = torch.arange(draws), torch.full((draws,), 1234)
    position, request = (running, fixed) if vary == "position" else (fixed, running)
    ids = compiled[-1].draw(logits, torch.ones(draws), fixed, request, fixed, position)
    counts = torch.bincount(ids, minlength=options).double()
    expected = torch.tensor(probabilities).double() * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = options - 1
    # mean and five standard deviations of chi-square; the draws are fixed, so this passes always or never
    assert chi_square <= freedom + 5 * (2 * freedom) ** 0.5, counts.tolist()


def test_greedy_takes_the_lowest_id_among_the_maxima(everyone: list[Kernels]) -> None:
    logits = torch.zeros(4, 129)
    logits[0, [17, 100]] = 3.0
    logits[1, 128] = 1.0
    logits[2, 5] = -1.0
    logits[3, 0] = -0.0  # equal to the zeros behind it
    ids = agree(lambda k: k.draw(logits, torch.zeros(4), *addresses(4)), everyone)
    assert ids.tolist() == [17, 128, 0, 0]


def test_a_tiny_temperature_draws_a_maximum(everyone: list[Kernels]) -> None:
    logits = normal(33, 129)
    temperature = torch.full((33,), 1e-7)
    ids = agree(lambda k: k.draw(logits, temperature, *addresses(33)), everyone)
    assert_same_bits(ids, logits.argmax(-1))


@pytest.mark.parametrize("bits", [0, 1, 2**32 - 1, 2**63, 2**64 - 1])
def test_no_bits_ever_pick_a_token_of_weight_zero(bits: int) -> None:
    weights = torch.tensor([0, 0, 5, 0, 2**40, 0, 1, 0, 0])
    assert pick(weights, bits) in (2, 4, 6)
    assert pick(weights, 0) == 2
    assert pick(weights, 2**64 - 1) == 6


def address_of(bits: int, seed: int, rest: int) -> tuple[int, int, int, int]:
    """seed, request, sample, position whose draw has those 64 bits: Philox backwards, one address for each `rest`."""
    inverse_0, inverse_1 = pow(0xD2511F53, -1, 2**32), pow(0xCD9E8D57, -1, 2**32)
    c0, c1, c2, c3 = (word & ALL_ONES for word in (bits, bits >> 32, rest, rest >> 32))
    for turn in reversed(range(10)):
        k0, k1 = ((seed >> 32 * i) + turn * step & ALL_ONES for i, step in enumerate((0x9E3779B9, 0xBB67AE85)))
        before_0, before_2 = c3 * inverse_0 & ALL_ONES, c1 * inverse_1 & ALL_ONES
        high_0, high_1 = 0xD2511F53 * before_0 >> 32, 0xCD9E8D57 * before_2 >> 32
        c0, c1, c2, c3 = before_0, c0 ^ high_1 ^ k0, before_2, c2 ^ high_0 ^ k1
    return seed, c2 | c3 << 32, c1, c0


def signed(numbers: Sequence[int]) -> Tensor:
    return torch.tensor([n - 2**64 if n >= 2**63 else n for n in numbers])


@pytest.mark.parametrize("vocabulary", [3, 129, 3001])
def test_the_smallest_and_the_largest_bits_draw_the_first_and_the_last_live_token(
    everyone: list[Kernels], vocabulary: int
) -> None:
    words = [0, 2**64 - 1, 1, 2**64 - 2, 2**63, 2**32 - 1]
    where = [address_of(word, seed=word ^ 0x0123456789ABCDEF, rest=17 * i) for i, word in enumerate(words)]
    assert [draw_bits(*address) for address in where] == words
    logits = normal(1, vocabulary, scale=3.0)
    logits[:, : vocabulary // 3], logits[:, -(vocabulary // 3) :] = -200.0, -torch.inf  # whole blocks without weight
    columns = [signed(column) for column in zip(*where, strict=True)]
    rows, ones = logits.expand(len(words), vocabulary), torch.ones(len(words))
    ids = agree(lambda k: k.draw(rows, ones, *columns), everyone).tolist()
    assert ids[:2] == [vocabulary // 3, vocabulary - vocabulary // 3 - 1]


@pytest.mark.parametrize("dead", [-torch.inf, -200.0])
def test_a_dead_token_is_never_drawn(compiled: list[Kernels], dead: float) -> None:
    n = 20_000
    fixed = torch.zeros(n, dtype=torch.int64)
    logits = torch.tensor([dead, 0.0, dead, 0.0, dead])[None].expand(n, 5)
    ids = agree(lambda k: k.draw(logits, torch.ones(n), fixed, fixed, fixed, torch.arange(n)), compiled)
    assert ids.unique().tolist() == [1, 3]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_draws_minus_one(everyone: list[Kernels], bad: float, temperature: float) -> None:
    logits, temperatures = normal(5, 129), torch.full((5,), temperature)
    expected = everyone[0].draw(logits, temperatures, *addresses(5))
    expected[2] = -1
    for place in (0, 77, 128):
        spoiled = logits.clone()
        spoiled[2, place] = bad
        for kernels in everyone:
            assert_same_bits(kernels.draw(spoiled, temperatures, *addresses(5)), expected, kernels.name)


def test_an_ambient_flush_of_subnormals_changes_nothing(compiled: list[Kernels]) -> None:
    logits = normal(33, 129, scale=30.0)
    logits[:9] *= 2.0**-135
    temperature = torch.tensor([0.0, 1.0, 0.7])[torch.arange(33) % 3]
    expected = Reference().draw(logits, temperature, *addresses(33))
    for kernels in compiled:
        with flushing_denormals():
            actual = kernels.draw(logits, temperature, *addresses(33))
        assert_same_bits(actual, expected, kernels.name)
