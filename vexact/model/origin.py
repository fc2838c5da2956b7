"""Where a token stands: the address that noise is drawn at.

An address says whose token it is and what came before it, never how it is computed: batch, schedule, chunk and cache
have no part in it. The prefix is named by a rolling hash of its ids, which a chunk carries on from the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BITS = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd: multiplication by it is one to one
EMPTY = 0  # the state before a sequence's first token


class Origin(NamedTuple):
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
    def of(origins: Sequence[Origin], tokens: Sequence[Sequence[int]], first: Sequence[int]) -> Addresses:
        """tokens: of each chunk; first: the position of its first one."""
        counts = torch.tensor([len(chunk) for chunk in tokens])

        def each(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int64).repeat_interleave(counts)

        prefix = torch.from_numpy(states([origin.state for origin in origins], tokens).view(np.int64))
        begins = accumulate((len(chunk) for chunk in tokens[:-1]), initial=0)
        shift = each(begin - row for begin, row in zip(first, begins, strict=True))
        position = torch.arange(len(prefix)) + shift
        request = each(signed(origin.request) for origin in origins)
        sample = each(origin.sample for origin in origins)
        return Addresses(prefix, request, sample, position, position >= each(origin.prompt for origin in origins))

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


def states(before: Sequence[int], chunks: Sequence[Sequence[int]]) -> NDArray[np.uint64]:
    """`rolled` behind each token of each chunk, one chunk behind the other: a place of all chunks at a time. before:
    the hash before each chunk."""
    lengths = np.array([len(chunk) for chunk in chunks])
    begins = np.cumsum(lengths) - lengths
    found = np.fromiter(chain.from_iterable(chunks), np.uint64, int(lengths.sum())) + np.uint64(1)
    state = np.array(before, np.uint64)
    for place in range(int(lengths.max(initial=0))):
        longer = lengths > place
        rows = begins[longer] + place
        mixed = (state[longer] ^ found[rows]) * np.uint64(_MULTIPLIER)
        mixed ^= mixed >> np.uint64(29)
        state[longer] = found[rows] = mixed
    return found


def signed(bits: int) -> int:
    """The signed number of the same 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits
