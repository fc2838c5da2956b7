"""Randomness is addressed, not streamed: a draw is a function of (seed, request, sample, position).

Batch mates, order and threads cannot touch it, and nothing has to be stored to repeat it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST, LARGEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127  # normal float32 numbers


def is_temperature(value: float) -> bool:
    """0, which is greedy, or a normal float32 number: a smaller one would be 0 to whoever flushes subnormals."""
    return value == 0.0 or SMALLEST <= value <= LARGEST


@dataclass(frozen=True)
class Address:
    """Where one token is drawn. seed, request: 64 bits; sample, position: 32 bits. temperature 0 is greedy."""

    seed: int
    request: int
    sample: int
    position: int
    temperature: float


@dataclass(frozen=True)
class Draws:
    """Addresses as columns: temperature float32 [R], the rest int64 [R] holding the unsigned bits."""

    temperature: Tensor
    seed: Tensor
    request: Tensor
    sample: Tensor
    position: Tensor

    @staticmethod
    def at(addresses: Sequence[Address]) -> Draws:
        return Draws(
            torch.tensor([a.temperature for a in addresses], dtype=torch.float32),
            _unsigned(a.seed for a in addresses),
            _unsigned(a.request for a in addresses),
            _unsigned(a.sample for a in addresses),
            _unsigned(a.position for a in addresses),
        )


def _unsigned(values: Iterable[int]) -> Tensor:
    wrapped = [value - (1 << 64) if value >> 63 else value for value in values]
    return torch.tensor(wrapped, dtype=torch.int64)
