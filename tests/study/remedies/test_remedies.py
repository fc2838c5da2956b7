"""What a remedy answers is a formula of the log-ratios, finite whatever they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from helpers import assert_same_bits, assert_within
from vexact.model.remedy import AfterUpdate, BeforeUpdate, Plain, Ratios, Remedy, Weighted
from vexact.study.remedies import SequenceRejection, Together, TokenTIS
from vexact_kernels import load

KERNELS = load()
WILD = [[100.0], [-100.0], [math.log(0.7)] * 300, [0.0] * 5, [200.0, -200.0], [3e38, 3e38], [-3e38, -3e38]]


def ratios(*sequences: list[float]) -> Ratios:
    ends = list(accumulate(len(sequence) for sequence in sequences))
    cuts = [slice(end - len(sequence), end) for sequence, end in zip(sequences, ends, strict=True)]
    log = torch.tensor([x for sequence in sequences for x in sequence])
    return Ratios(log, log, cuts, KERNELS)


def answer(remedy: Remedy, given: Ratios, mask: Tensor | None = None) -> Weighted:
    everything = torch.ones(len(given.correction), dtype=torch.bool)
    return remedy.weights(given, everything if mask is None else mask, torch.ones(len(given.correction)))


def kept(remedy: Remedy, given: Ratios, mask: Tensor | None = None) -> list[bool]:
    """Of each sequence whether all of it is kept; none is kept in part."""
    found = answer(remedy, given, mask).kept
    assert all(len(set(found[cut].tolist())) == 1 for cut in given.cuts) or mask is not None
    return [bool(found[cut].any()) for cut in given.cuts]


def test_token_tis_is_the_ratio_up_to_its_cap() -> None:
    given = ratios([-1.0, 0.0, 0.5], [0.69, 0.70, 3.0])
    found = answer(TokenTIS(2.0), given)
    assert_within(found.weights, given.correction.double().exp().clamp(max=2.0), bound=1)
    assert found.weights[1] == 1.0 and found.weights[4:].tolist() == [2.0, 2.0]
    assert found.kept.all()
    assert answer(TokenTIS(2.0, 0.5), given).weights[0] == 0.5


@pytest.mark.parametrize("remedy", [TokenTIS(2.0), TokenTIS(2.0, 0.5)])
def test_token_weights_are_finite_and_the_cap_is_met_exactly(remedy: TokenTIS) -> None:
    found = answer(remedy, ratios(*WILD)).weights
    assert found.isfinite().all()
    assert found[0] == remedy.cap
    assert remedy.floor <= found[1] < 1e-40 or found[1] == remedy.floor
    assert found[302:307].tolist() == [1.0] * 5
    assert ratios(*WILD).token(ratios(*WILD).correction)[0] == math.inf  # the uncapped value


def test_product_and_geometric_mean_go_by_their_own_names() -> None:
    given = ratios([0.005] * 300, [0.0] * 300)
    mask = torch.ones(600, dtype=torch.bool)
    assert given.product(given.correction, mask).tolist() == [pytest.approx(4.4817, abs=1e-4), 1.0]
    assert given.geometric(given.correction, mask).tolist() == [pytest.approx(1.00501, abs=1e-5), 1.0]


@pytest.mark.parametrize(
    ("remedy", "expected"),
    [
        (SequenceRejection(0.5, 2.0), [False, False, False, True, True, False, False]),
        (SequenceRejection(0.0, 2.0), [False, True, True, True, True, False, True]),
        (SequenceRejection(0.0, math.inf), [True] * 7),
        (SequenceRejection(0.69, 1.01, "geometric"), [False, False, True, True, True, False, False]),
    ],
)
def test_a_sequence_is_kept_or_rejected_whole(remedy: SequenceRejection, expected: list[bool]) -> None:
    assert kept(remedy, ratios(*WILD)) == expected
    assert_same_bits(answer(remedy, ratios(*WILD)).weights, torch.ones(len(ratios(*WILD).correction)))


def test_bounds_belong_to_what_is_kept() -> None:
    assert kept(SequenceRejection(1.0, 1.0), ratios([0.0], [1e-7, -1e-7], [1e-6])) == [True, True, False]


def test_what_is_not_a_number_is_kept_to_be_seen() -> None:
    assert kept(SequenceRejection(0.5, 2.0), ratios([math.nan, 0.0], [5.0])) == [True, False]


def test_what_a_mask_leaves_out_has_no_part_in_a_sequences_ratio() -> None:
    given = ratios([5.0, 0.1], [math.nan, 0.2], [math.inf, 9.0])
    mask = torch.tensor([False, True, False, True, False, False])
    assert_within(given.product(given.correction, mask), torch.tensor([0.1, 0.2, 0.0]).double().exp(), bound=2)
    assert kept(SequenceRejection(0.5, 2.0), given, mask) == [True, True, False]
    assert answer(SequenceRejection(0.5, 2.0), given, mask).kept.tolist() == [False, True, False, True, False, False]


def test_a_sequence_does_not_know_its_batch() -> None:
    whole, alone = ratios(*WILD, [0.1, 0.2, 0.3]), ratios([0.1, 0.2, 0.3])
    everything = torch.ones(len(whole.correction), dtype=torch.bool)
    for value in (Ratios.product, Ratios.geometric):
        expected = value(alone, alone.correction, everything[:3])
        assert_same_bits(value(whole, whole.correction, everything)[-1:], expected)


def test_remedies_together_reject_first_and_weigh_what_is_left() -> None:
    given = ratios([0.5, 0.1], [3.0, 0.0])
    found = answer(Together(SequenceRejection(0.5, 2.0), TokenTIS(1.5)), given)
    assert found.kept.tolist() == [True, True, False, False]
    assert_same_bits(found.weights, answer(TokenTIS(1.5), given).weights)
    assert answer(Together(TokenTIS(1.5), TokenTIS(2.0)), ratios([9.0])).weights.tolist() == [3.0]


def test_token_weights_are_of_the_correction_and_a_rejection_of_what_it_names() -> None:
    correction = ratios([0.1, 0.2], [0.0])
    moved = replace(correction, current=torch.tensor([5.0, 5.0, 0.5]))
    both = Together(SequenceRejection(0.5, 2.0, ratio="current"), TokenTIS(2.0))
    assert both.every_update
    found = answer(both, moved)
    assert found.kept.tolist() == [False, False, True]
    assert_same_bits(found.weights, answer(TokenTIS(2.0), correction).weights)
    assert kept(SequenceRejection(0.5, 2.0), moved) == [True, True]


class Asking(Plain):
    """Weighs nothing and answers as it is told."""

    def __init__(self, after: AfterUpdate) -> None:
        self.after = after

    def before_update(self, metrics: Mapping[str, float]) -> BeforeUpdate:
        return "discard" if metrics["remedy_ratio_max"] > 2 else "use"

    def lr_scale(self, metrics: Mapping[str, float]) -> float:
        return 0.5

    def after_update(self, metrics: Mapping[str, float]) -> AfterUpdate:
        return self.after


def test_remedies_together_discard_or_sync_if_one_does_and_a_rollback_is_more_than_a_sync() -> None:
    pair = Together(TokenTIS(), Asking("sync"))
    assert pair.before_update({"remedy_ratio_max": 3.0}) == "discard"
    assert pair.before_update({"remedy_ratio_max": 1.0}) == "use"
    assert pair.after_update({}) == "sync"
    assert Together(TokenTIS(), SequenceRejection(0.5, 2.0)).after_update({}) == "none"
    assert Together(Asking("sync"), Asking("none")).after_update({}) == "sync"
    assert Together(Asking("sync"), Asking("rollback")).after_update({}) == "rollback"
    assert Together(Asking("sync"), TokenTIS(), Asking("sync")).lr_scale({}) == 0.25


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TokenTIS(0.0), "token TIS needs"),
        (lambda: TokenTIS(1.0, 2.0), "token TIS needs"),
        (lambda: SequenceRejection(2.0, 1.0), "sequence rejection needs"),
        (lambda: SequenceRejection(math.nan, 1.0), "sequence rejection needs"),
    ],
)
def test_bounds_that_cannot_be_met_are_refused(make: type, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
