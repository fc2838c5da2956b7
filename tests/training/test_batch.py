"""Columns of a training batch follow their sequences, however it is cut."""

from __future__ import annotations

import torch

from helpers import assert_same_bits
from vexact.model.policy import Scored
from vexact.training.batch import TrainingBatch

LENGTHS = (3, 1, 4, 2, 5)


def made(mask: torch.Tensor | None = None) -> TrainingBatch:
    sequences = [Scored(list(range(2 + length)), 2) for length in LENGTHS]
    owner = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)).float()
    return TrainingBatch(sequences, owner, owner + 0.5, reference=-owner, mask=mask)


def test_the_rows_of_a_sequence_are_its_own() -> None:
    batch = made()
    assert [len(set(batch.behaviour[cut].tolist())) for cut in batch.cuts] == [1] * 5
    assert batch.counts == batch.lengths == list(LENGTHS)


def test_some_of_the_sequences_keep_their_columns() -> None:
    taken = made().take([1, 4])
    assert taken.lengths == [1, 5]
    assert taken.reference is not None and taken.old is None
    assert_same_bits(taken.behaviour, torch.tensor([1.0, 4, 4, 4, 4, 4]))
    assert_same_bits(taken.advantage, taken.behaviour + 0.5)
    assert_same_bits(taken.reference, -taken.behaviour)


def test_mini_batches_are_consecutive_as_equal_as_can_be_and_never_empty() -> None:
    batch = made()
    for count, sizes in ((1, [5]), (2, [2, 3]), (3, [1, 2, 2]), (5, [1] * 5), (9, [1] * 5)):
        parts = batch.mini_batches(count)
        assert [len(part.sequences) for part in parts] == sizes
        assert_same_bits(torch.cat([part.behaviour for part in parts]), batch.behaviour)


def test_counts_are_of_trained_tokens() -> None:
    mask = torch.tensor([1, 0, 1, 0, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1], dtype=torch.bool)
    assert made(mask).counts == [2, 0, 4, 1, 1]
    assert made(mask).take([0, 3]).counts == [2, 1]


def test_the_sequences_of_a_micro_batch_are_rows_of_it() -> None:
    assert made().within(slice(3, 8)) == [slice(0, 1), slice(1, 5)]
    assert made().within(slice(0, 15)) == made().cuts
