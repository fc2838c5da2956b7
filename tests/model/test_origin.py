"""Addresses say whose a token is and what came before it, and nothing of how it is computed."""

from __future__ import annotations

import torch

from vexact.model.batch import Batch, Chunk
from vexact.model.origin import EMPTY, NOBODY, Origin, rolled, signed, states

TOKENS = [5, 0, 7, 7, 300, 2]


def addresses(*cuts: int) -> list[torch.Tensor]:
    """Columns of the tokens, cut into chunks of separate batches."""
    parts = []
    for begin, end in zip((0, *cuts), (*cuts, len(TOKENS)), strict=True):
        origin = Origin(9, 2, 3, rolled(EMPTY, TOKENS[:begin]))
        at = Batch.of([Chunk(TOKENS[begin:end], begin, [0], origin)]).addresses
        parts.append([at.prefix, at.request, at.sample, at.position, at.sampled.long()])
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def test_an_address_does_not_know_its_chunk() -> None:
    whole = addresses()
    for cuts in ((1,), (3,), (1, 2, 3, 4, 5), (2, 5)):
        assert all(torch.equal(left, right) for left, right in zip(whole, addresses(*cuts), strict=True))


def test_an_address_does_not_know_its_batch() -> None:
    origin = Origin(9, 2, 3)
    alone = Batch.of([Chunk(TOKENS, 0, [0], origin)]).addresses
    among = Batch.of([Chunk([1, 2], 0, [1], NOBODY), Chunk(TOKENS, 0, [0], origin)]).addresses
    rows = torch.arange(2, 2 + len(TOKENS))
    assert torch.equal(among.at(rows).prefix, alone.prefix)
    assert torch.equal(among.at(rows).position, alone.position)


def test_tokens_behind_the_prompt_are_sampled() -> None:
    assert addresses()[4].tolist() == [0, 0, 0, 1, 1, 1]


def test_every_prefix_has_a_hash_of_its_own() -> None:
    found = {state for length in range(1, 5) for last in range(50) for state in [rolled(EMPTY, [3] * length + [last])]}
    assert len(found) == 4 * 50
    assert rolled(EMPTY, [0]) != rolled(EMPTY, [0, 0]) != EMPTY


def test_a_hash_is_carried_on() -> None:
    before, chunks = [EMPTY, rolled(EMPTY, TOKENS[:2]), EMPTY], [TOKENS, TOKENS[2:], [9]]
    pairs = zip(before, chunks, strict=True)
    one_by_one = [rolled(state, chunk[: i + 1]) for state, chunk in pairs for i in range(len(chunk))]
    assert states(before, chunks).tolist() == one_by_one
    assert one_by_one[len(TOKENS) - 1] == rolled(EMPTY, TOKENS) == rolled(before[1], TOKENS[2:])
    assert states([], []).tolist() == []
    assert rolled(EMPTY, [1, 2]) != rolled(EMPTY, [2, 1])


def test_bits_keep_their_value_as_signed_numbers() -> None:
    assert [signed(bits) for bits in (0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)] == [0, (1 << 63) - 1, -(1 << 63), -1]
