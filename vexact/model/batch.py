"""A batch is a ragged list of chunks after prefixes, never padded.

Decode: every chunk has one token. Prefill: a longer chunk. Training: the prefix is empty and the chunk is the whole
sequence. No field names the phase, so no code can ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from vexact.model.origin import NOBODY, Addresses, Origin
from vexact_kernels import CPU, PAGE, Chunks, Segments


@dataclass(frozen=True)
class Chunk:
    """The new tokens of one sequence computed in one forward.

    prefix: how many of the sequence's tokens have keys and values in `pages` already. pages: the sequence's pages in
    order of position, at least enough for prefix + len(tokens). origin: whose tokens these are, for those who compute
    by address.
    """

    tokens: Sequence[int]
    prefix: int
    pages: Sequence[int]
    origin: Origin = NOBODY

    def __post_init__(self) -> None:
        needed = -(-(self.prefix + len(self.tokens)) // PAGE)
        if not self.tokens:
            raise ValueError("a chunk needs at least one token")
        if len(self.pages) < needed:
            raise ValueError(f"a chunk up to position {self.prefix + len(self.tokens)} needs {needed} pages")


@dataclass(frozen=True)
class Batch:
    """Chunks behind one another.

    tokens, positions: int64 [N] on the device that computes. The schedule stays on the host: chunks, their bounds,
    prefixes and pages; segments, how the tokens fall into lanes of parameter gradients, None where nobody asks for any.
    """

    tokens: Tensor
    positions: Tensor
    chunks: Chunks
    longest: int  # the highest position of any token, plus one
    segments: Segments | None = None
    origins: Sequence[Origin] = ()

    @cached_property
    def addresses(self) -> Addresses:
        """Of every token, [N] on the host. Exact ops never ask."""
        ends = self.chunks.start.tolist()
        tokens = self.tokens.tolist()
        parts = [tokens[begin:end] for begin, end in pairwise(ends)]
        return Addresses.of(self.origins, parts, self.chunks.prefix.tolist())

    @staticmethod
    def of(chunks: Sequence[Chunk], device: torch.device = CPU, segments: Segments | None = None) -> Batch:
        """Lay chunks behind one another in the order given. Raises ValueError on an empty list."""
        if not chunks:
            raise ValueError("a batch needs at least one chunk")
        tokens: list[int] = []
        positions: list[int] = []
        table: list[int] = []
        for chunk in chunks:
            tokens.extend(chunk.tokens)
            positions.extend(range(chunk.prefix, chunk.prefix + len(chunk.tokens)))
            table.extend(chunk.pages)
        return Batch(
            tokens=torch.tensor(tokens, dtype=torch.int64).to(device, non_blocking=True),
            positions=torch.tensor(positions, dtype=torch.int64).to(device, non_blocking=True),
            chunks=Chunks(
                start=_bounds([len(chunk.tokens) for chunk in chunks]),
                prefix=torch.tensor([chunk.prefix for chunk in chunks], dtype=torch.int64),
                table_start=_bounds([len(chunk.pages) for chunk in chunks]),
                table=torch.tensor(table, dtype=torch.int64),
            ),
            longest=max(chunk.prefix + len(chunk.tokens) for chunk in chunks),
            segments=segments,
            origins=[chunk.origin for chunk in chunks],
        )

    def last_rows(self) -> Tensor:
        """The row of each chunk's last token, int64 [S] on the host."""
        return self.chunks.start[1:] - 1


def _bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)
