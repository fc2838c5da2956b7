"""Where a token stands: the address that noise is drawn at.

An address says whose token it is and what came before it, never how it is computed: batch, schedule, chunk and cache
have no part in it. The prefix is named by a rolling hash of its ids, which a chunk carries on from the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd: multiplication by it is one to one
EMPTY = 0  # the state before a sequence's first token


@dataclass(frozen=True)
class Origin:
    """Of a chunk. request, sample: as they address draws; prompt: how many tokens the sequence's prompt has; state: the
    rolling hash of all tokens before the chunk."""

    request: int = 0
    sample: int = 0
    prompt: int = 0
    state: int = EMPTY


NOBODY = Origin()


@dataclass(frozen=True)
class Addresses:
    """Of a batch's tokens, int64 [N] on the host, holding unsigned bits where they are 64.

    prefix: hash of the sequence up to and with that token. sampled: bool, whether the token was sampled; those of a
    prompt are shared by all samples of their request.
    """

    prefix: Tensor
    request: Tensor
    sample: Tensor
    position: Tensor
    sampled: Tensor

    @staticmethod
    def of(origins: Sequence[Origin], tokens: Iterable[Sequence[int]], first: Sequence[int]) -> Addresses:
        """tokens: of each chunk; first: the position of its first one."""
        columns: list[list[int]] = [[] for _ in range(5)]
        for origin, chunk, begin in zip(origins, tokens, first, strict=True):
            positions = range(begin, begin + len(chunk))
            columns[0].extend(signed(state) for state in states(origin.state, chunk))
            columns[1].extend([signed(origin.request)] * len(chunk))
            columns[2].extend([origin.sample] * len(chunk))
            columns[3].extend(positions)
            columns[4].extend(position >= origin.prompt for position in positions)
        prefix, request, sample, position, sampled = (torch.tensor(column, dtype=torch.int64) for column in columns)
        return Addresses(prefix, request, sample, position, sampled.bool())

    def at(self, rows: Tensor) -> Addresses:
        """Of some of the tokens, int64 [R] on the host."""
        return Addresses(
            self.prefix[rows], self.request[rows], self.sample[rows], self.position[rows], self.sampled[rows]
        )


def rolled(state: int, tokens: Iterable[int]) -> int:
    """The hash of a sequence that ends with those tokens, from its hash before them."""
    for token in tokens:
        state = (state ^ (token + 1)) * _MULTIPLIER & _BITS
        state ^= state >> 29
    return state


def states(state: int, tokens: Iterable[int]) -> Iterator[int]:
    """The hash behind each token."""
    for token in tokens:
        state = rolled(state, (token,))
        yield state


def signed(bits: int) -> int:
    """The signed number of the same 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits
