"""A batch is chunks behind one another; nothing in it says what it is for."""

from __future__ import annotations

import pytest
import torch

from vexact.model.batch import Batch, Chunk


def test_chunks_lie_behind_one_another_with_positions_of_their_own() -> None:
    batch = Batch.of([Chunk([5, 6, 7], 0, [2]), Chunk([8], 64, [0, 1])])
    assert batch.tokens.tolist() == [5, 6, 7, 8]
    assert batch.positions.tolist() == [0, 1, 2, 64]
    assert batch.chunks.start.tolist() == [0, 3, 4]
    assert batch.chunks.prefix.tolist() == [0, 64]
    assert batch.chunks.table_start.tolist() == [0, 1, 3]
    assert batch.chunks.table.tolist() == [2, 0, 1]
    assert batch.last_rows().tolist() == [2, 3]
    assert batch.longest == 65 and batch.tokens.dtype == torch.int64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chunk([], 0, [0]), "at least one token"),
        (lambda: Chunk([1], 64, [0]), "needs 2 pages"),
        (lambda: Batch.of([]), "at least one chunk"),
    ],
)
def test_what_cannot_be_computed_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
