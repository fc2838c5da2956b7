"""Remedies of whole sequences: their formulas, bounds that know a length, nothing that overflows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vexact.model.remedy import Ratios, Remedy, Weighted
from vexact.study.remedies import NegativesMask, SequenceMask, SequenceRejection, SequenceTIS
from vexact_kernels import load

KERNELS = load()


def ratios(*sequences: list[float]) -> Ratios:
    log = torch.tensor([x for sequence in sequences for x in sequence])
    cuts, at = [], 0
    for sequence in sequences:
        cuts.append(slice(at, at + len(sequence)))
        at += len(sequence)
    return Ratios(log, log, cuts, KERNELS)


def answer(remedy: Remedy, given: Ratios, advantages: Tensor | None = None) -> tuple[list[float], list[bool]]:
    """Weight of each sequence, and whether it is kept: the same for all of its tokens."""
    count = len(given.correction)
    found: Weighted = remedy.weights(
        given, torch.ones(count) > 0, torch.ones(count) if advantages is None else advantages
    )
    for cut in given.cuts:
        assert len(set(found.weights[cut].tolist())) == 1 and len(set(found.kept[cut].tolist())) == 1
    return [float(found.weights[cut][0]) for cut in given.cuts], [bool(found.kept[cut][0]) for cut in given.cuts]


GIVEN = ratios([0.1, 0.2], [0.5, 0.5], [-1.0, 0.3, 0.0], [100.0, 3e38], [-3e38, -3e38])


def test_sequence_tis_is_the_product_up_to_its_cap() -> None:
    weights, kept = answer(SequenceTIS(2.0), GIVEN)
    assert weights == pytest.approx([math.exp(0.3), 2.0, math.exp(-0.7), 2.0, 0.0]) and all(kept)
    assert weights[1] == weights[3] == 2.0
    geometric, _ = answer(SequenceTIS(1.5, "geometric"), GIVEN)
    assert geometric == pytest.approx([math.exp(0.15), 1.5, math.exp(-0.7 / 3), 1.5, 0.0])
    unbounded, _ = answer(SequenceTIS(3.4e38), GIVEN)
    assert math.isfinite(unbounded[3]) and unbounded[1] == pytest.approx(math.e)


def test_trls_mask_weighs_what_it_keeps() -> None:
    weights, kept = answer(SequenceMask(), GIVEN)
    assert kept == [True, True, True, False, True]
    assert weights == pytest.approx([math.exp(0.3), math.e, math.exp(-0.7), 0.0, 0.0])
    assert answer(SequenceRejection(0.0, 3.0), GIVEN) == ([1.0] * 5, kept)  # the mutant: a mask that does not weigh


@pytest.mark.parametrize(("level", "value"), [("k2", lambda x: x * x / 2), ("k3", lambda x: math.expm1(x) - x)])
def test_k2_and_k3_are_means_over_tokens(level: Any, value: Callable[[float], float]) -> None:
    given = ratios([0.1, 0.2], [0.9, 0.0], [0.9])
    kept = [
        answer(SequenceRejection(0.0, value(0.9) / 2 * scale, level), given)[1]
        for scale in (0.999, 1.001, 1.999, 2.001)
    ]
    assert kept == [[True, False, False], [True, True, False], [True, True, False], [True, True, True]]


def test_rounding_does_not_reject_what_hardly_differs() -> None:
    """In float32 (e^x − 1) − x of −8.8e-5 is below 0."""
    given = ratios([-8.76638762e-05] * 3)
    assert answer(SequenceRejection(0.0, 1e-3, "k3"), given)[1] == [True]
    raw = (KERNELS.exp(given.correction) - 1.0) - given.correction
    assert bool((raw < 0).all())  # what would be seen without the clamp


@pytest.mark.parametrize("length", [1, 4, 100, 2048])
@pytest.mark.parametrize("level", ["product", "geometric"])
def test_scaled_bounds_are_as_strict_at_every_length(level: Any, length: int) -> None:
    """Log-ratios that sum to c·√T·RMS: kept below κ, rejected above, whatever T."""
    rms, kappa = 0.03, 2.0
    remedy = SequenceRejection(0.0, 2.0, level, kappa=kappa, rms=rms)
    for scale, expected in ((1.99, True), (2.01, False), (-1.99, True), (-2.01, False)):
        assert answer(remedy, ratios([scale * rms / math.sqrt(length)] * length))[1] == [expected]
    width = rms * math.sqrt(length) if level == "product" else rms / math.sqrt(length)
    (weight,), _ = answer(SequenceTIS(9.0, level, kappa=1.0, rms=rms), ratios([1.9 * rms / math.sqrt(length)] * length))
    assert weight == pytest.approx(math.exp(width), rel=1e-6)


def test_a_fixed_bound_does_not_carry_over_to_another_length() -> None:
    """The counter-example of the test above."""
    given = ratios([0.06 / math.sqrt(4)] * 4, [0.06 / math.sqrt(2048)] * 2048)
    assert answer(SequenceRejection(0.5, 2.0), given)[1] == [True, False]
    assert answer(SequenceRejection(0.999, 1.002, "geometric"), given)[1] == [False, True]


def test_only_negatives_that_the_trainer_has_left_are_masked() -> None:
    """DeepSeek-V3.2, Eq. 9: A < 0 and mean(log q − log p) > δ."""
    given = ratios([-1.0, -0.2], [-1.0, -0.2], [-0.4, -0.4], [1.0, 1.0])
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
    assert answer(NegativesMask(0.5), given, advantages) == ([1.0] * 4, [False, True, True, True])
    assert answer(NegativesMask(0.3), given, advantages)[1] == [False, True, False, True]
    for mutant in (-advantages, -advantages.abs()):  # positives masked; every sign masked
        assert answer(NegativesMask(0.5), given, mutant)[1] != [False, True, True, True]


def test_what_a_mask_left_out_before_has_no_part() -> None:
    given = ratios([5.0, 0.1], [math.nan, 0.2])
    mask = torch.tensor([False, True, False, True])
    for remedy in (SequenceTIS(), SequenceMask(), SequenceRejection(0.0, 2.0, "k3"), NegativesMask(0.1),
                   SequenceRejection(0.0, 0.0, kappa=5.0, rms=0.1)):  # fmt: skip
        found = remedy.weights(given, mask, -torch.ones(4))
        assert found.kept.tolist() == mask.tolist() and found.weights.isfinite().all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SequenceTIS(0.0), "a cap above 0"),
        (lambda: SequenceRejection(0.0, 1.0, "k3", kappa=1.0, rms=1.0), "by k3 has no bounds of kappa"),
        (lambda: SequenceRejection(0.0, 1.0, kappa=1.0), "bounds of kappa need the rms"),
        (lambda: NegativesMask(0.0), "a delta above 0"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
