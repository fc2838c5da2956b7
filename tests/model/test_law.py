"""A kept law is what a recomputed softmax is, in every bit where it is whole, and within its tail where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers import assert_same_bits
from vexact.model import law as module
from vexact.model.batch import Batch, Chunk
from vexact.model.law import Kept, Law, greatest
from vexact.model.origin import Origin
from vexact_kernels import Softmax, load

KERNELS = load()
ROWS, WIDE = 12, 1500  # a vocabulary that is not kept whole
TEMPERATURE = torch.tensor([0.7, 1.0, 0.0, 1.3] * 3)
DRAWN = torch.arange(ROWS) * 101 % 300


def some_logits(vocabulary: int, seed: int = 0) -> Tensor:
    return 1.5 * torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(seed))


def probabilities(logits: Tensor, temperature: Tensor = TEMPERATURE) -> Tensor:
    """float64."""
    return (logits.double() / torch.where(temperature == 0, 1.0, temperature).double()[:, None]).softmax(-1)


def of(softmax: Softmax, temperature: Tensor) -> Tensor:
    """Probabilities float64 that the kernels read from rows, from their max and sum."""
    t = torch.where(temperature == 0, 1.0, temperature)
    z = softmax.logits.double() / t.double()[:, None]
    return (z - softmax.max.double()[:, None]).exp() / softmax.sum.double()[:, None]


def test_a_whole_law_is_the_softmax_that_was_drawn_from() -> None:
    logits = some_logits(300)
    law = Law.of(KERNELS, logits, TEMPERATURE, DRAWN)
    logprob, _, largest, total, _ = KERNELS.logprob(logits, DRAWN, TEMPERATURE, entropy=False)
    found = law.softmax(KERNELS, TEMPERATURE)
    assert_same_bits([found.logits, found.max, found.sum], [logits, largest, total])
    assert_same_bits(law.logprobs(KERNELS).gather(1, DRAWN[:, None])[:, 0], logprob)
    assert (law.ids, law.tail) == (None, None)


def test_a_law_read_at_another_temperature_is_the_same_law() -> None:
    logits, others = some_logits(300), torch.tensor([1.1, 0.8, 1.0, 0.7] * 3)
    law = Law.of(KERNELS, logits, TEMPERATURE, DRAWN)
    expected = probabilities(logits)
    assert (of(law.softmax(KERNELS, others), others) / expected - 1).abs().max() < 1e-5
    mutant = replace(law, temperature=others)  # which forgot at what it was drawn
    assert (of(mutant.softmax(KERNELS, others), others) - expected).abs().max() > 1e-2
    at_one = law.softmax(KERNELS, torch.ones(ROWS))  # times 1 is exact: these bits are those of the draw
    log = (at_one.logits - at_one.max[:, None]) - KERNELS.log(at_one.sum)[:, None]
    assert_same_bits(log, law.logprobs(KERNELS))


def test_a_large_law_keeps_the_greatest_as_they_are_and_the_mass_of_the_others() -> None:
    logits = some_logits(WIDE)
    logits[:, 900:] -= 2.0  # so that a tail has a shape
    whole = Law(WIDE, logits, *KERNELS.logprob(logits, DRAWN, TEMPERATURE, entropy=False)[2:4], TEMPERATURE)
    law, expected = Law.of(KERNELS, logits, TEMPERATURE, DRAWN), probabilities(logits)
    assert law.ids is not None and law.tail is not None and law.logits.shape == (ROWS, module.KEPT)
    ids = law.ids.long()
    assert (ids == DRAWN[:, None]).any(dim=1).all()
    assert_same_bits(law.logprobs(KERNELS).gather(1, ids), whole.logprobs(KERNELS).gather(1, ids))
    tail = 1.0 - expected.gather(1, ids).sum(1)
    assert (law.tail.double().exp() / tail - 1).abs().max() < 1e-5 and 1e-3 < tail.min() < tail.max() < 0.9
    for temperature in (TEMPERATURE, torch.full((ROWS,), 0.9)):
        found = of(law.softmax(KERNELS, temperature), temperature)
        assert (found.sum(1) - 1).abs().max() < 1e-5
        assert ((found - expected).abs().sum(1) < 2 * tail).all()
        flat = tail / (WIDE - module.KEPT)
        others = found.scatter(1, ids, 0.0).max(1).values
        assert (others / flat - 1).abs().max() < 1e-4
    ignored = replace(law, tail=torch.full_like(law.tail, -torch.inf))  # the mutant
    assert (of(ignored.softmax(KERNELS, TEMPERATURE), TEMPERATURE).sum(1) < 1 - tail / 2).all()


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_a_centred_gradient_is_that_of_float64_within_the_mass_of_the_tail(cut: bool) -> None:
    """Of g·(1_a − q)/T: two laws that share all but a tail are 2·tail apart."""
    vocabulary = WIDE if cut else 300
    logits, policy = some_logits(vocabulary), some_logits(vocabulary, 1)
    law = Law.of(KERNELS, logits, TEMPERATURE, DRAWN)
    given = torch.linspace(-1, 1, ROWS)
    p = Softmax(policy, *KERNELS.logprob(policy, DRAWN, TEMPERATURE, entropy=False)[2:4])
    rows = law.softmax(KERNELS, TEMPERATURE)
    found, _, _ = KERNELS.centre(p, rows, None, DRAWN, TEMPERATURE, given, None, None, "clamp", torch.float32)
    t = torch.where(TEMPERATURE == 0, 1.0, TEMPERATURE).double()
    expected = torch.zeros(ROWS, vocabulary, dtype=torch.float64).scatter(1, DRAWN[:, None], 1.0)
    expected = (expected - probabilities(logits)) * given.double()[:, None] / t[:, None]
    apart = (found.double() - expected).abs().sum(1)
    tail = torch.zeros(ROWS) if law.tail is None else law.tail.exp()
    assert (apart <= 2 * tail.double() * given.abs() / t + 1e-5).all()
    assert (apart[:5].min() > 1e-3) == cut  # a flat tail is not the tail


def test_what_was_drawn_is_kept_however_rare_and_ties_go_to_the_lowest_ids() -> None:
    row = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -1.0]])
    ids = lambda drawn, count: greatest(row, torch.tensor([drawn]), count)[0].nonzero()[:, 0].tolist()  # noqa: E731
    assert ids(1, 3) == [1, 2, 3]
    assert ids(4, 3) == [1, 2, 4]
    assert ids(5, 3) == [1, 2, 5]
    assert ids(5, 1) == [5]


def test_ids_that_cannot_be_drawn_have_no_mass() -> None:
    logits = some_logits(WIDE)
    logits[:, 300:] = -torch.inf
    logits[:6, 50:] = -torch.inf  # fewer than are kept: nothing is left for a tail
    drawn = torch.where(torch.arange(ROWS) < 6, DRAWN % 50, DRAWN)
    law = Law.of(KERNELS, logits, TEMPERATURE, drawn)
    assert law.tail is not None and (law.tail[:6] == -torch.inf).all() and law.tail[6:].isfinite().all()
    found = of(law.softmax(KERNELS, TEMPERATURE), TEMPERATURE)
    assert (found[:6, 50:] == 0).all() and (found.sum(1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("vocabulary", [300, WIDE])
def test_a_row_does_not_know_its_batch(vocabulary: int) -> None:
    logits = some_logits(vocabulary).round()  # many ties
    logits[3, 7] = torch.nan  # a row that is not finite spoils no other
    logits[4, 9] = torch.inf
    together = Law.of(KERNELS, logits, TEMPERATURE, DRAWN)
    alone = [
        Law.of(KERNELS, logits[i : i + 1], TEMPERATURE[i : i + 1], DRAWN[i : i + 1]) for i in range(ROWS)
    ]  # fmt: skip
    fine = torch.tensor([i for i in range(ROWS) if i not in (3, 4)])
    for name, column in Law.joined(alone)._columns.items():
        assert_same_bits(together._columns[name][fine], column[fine], name)


def laws_of(lengths: dict[int, int]) -> dict[tuple[int, int], Law]:
    """Rows of each sample whose logits say whose they are, and which."""
    made = {}
    for sample, count in lengths.items():
        logits = torch.arange(count * 5, dtype=torch.float32).view(count, 5) + 100 * sample
        made[0, sample] = Law.of(KERNELS, logits, torch.ones(count), torch.zeros(count, dtype=torch.int64))
    return made


def test_rows_of_a_batch_find_the_law_of_their_own_sequence() -> None:
    """Whatever the order; the mutants are the laws of other sequences, and rows that are one off."""

    def chunk(sample: int, prompt: int, count: int) -> Chunk:
        return Chunk([1] * (prompt + count - 1), 0, [sample], Origin(0, sample, prompt))

    laws, ones = laws_of({0: 3, 1: 2, 2: 4}), torch.ones(9)
    rows = [torch.arange(first, first + count) for first, count in ((1, 4), (5, 3), (11, 2))]
    batch = Batch.of([chunk(2, 2, 4), chunk(0, 1, 3), chunk(1, 4, 2)])
    found = Kept(laws, batch, torch.cat(rows), KERNELS)
    ids = torch.zeros(9, dtype=torch.int64)
    expected = torch.cat([laws[0, sample].logits for sample in (2, 0, 1)])
    assert_same_bits(found.softmax(slice(0, 9), ids, ones).logits, expected)
    assert_same_bits(found.softmax(slice(3, 6), ids[3:6], ones[3:6]).logits, expected[3:6])
    some = Kept(laws, batch, torch.tensor([2, 4, 12]), KERNELS)
    assert_same_bits(some.softmax(slice(0, 3), ids[:3], ones[:3]).logits, expected[[1, 3, 8]])
    with pytest.raises(RuntimeError, match=r"rollout \(0, 1\) has no law, 2 are centred"):
        Kept({id: law for id, law in laws.items() if id != (0, 1)}, batch, torch.cat(rows), KERNELS)
    with pytest.raises(RuntimeError, match=r"rollout \(0, 2\) has a law of 3 tokens, 4 are centred"):
        Kept({**laws, (0, 2): laws[0, 0]}, batch, torch.cat(rows), KERNELS)
