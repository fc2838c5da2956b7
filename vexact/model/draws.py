"""Randomness is addressed, not streamed: a draw is a function of (seed, request, sample, position).

Batch mates, order and threads cannot touch it, and nothing has to be stored to repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vexact.model.origin import signed
from vexact_kernels import CPU

SMALLEST, LARGEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127  # normal float32 numbers


def is_temperature(value: float) -> bool:
    """0, which is greedy, or a normal float32 number: a smaller one would be 0 to whoever flushes subnormals."""
    return value == 0.0 or SMALLEST <= value <= LARGEST


class Address(NamedTuple):
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
    def at(addresses: Sequence[Address], device: torch.device = CPU) -> Draws:
        temperature = torch.tensor([a.temperature for a in addresses], dtype=torch.float32)
        numbers = [
            [signed(a.seed) for a in addresses],
            [signed(a.request) for a in addresses],
            [a.sample for a in addresses],
            [a.position for a in addresses],
        ]
        columns = torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)  # together: one copy
        return Draws(temperature.to(device, non_blocking=True), *columns.unbind())
