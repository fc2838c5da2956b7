"""The cosines and sines that turn queries and keys, in float64 from multiply and add alone, rounded to float32 once.

libm is not the same on every machine, so nothing of it is used. Inverse frequencies are the float64 nearest to the
exact power; the angle is the float64 product position · frequency; it is reduced by multiples of π/2 in three parts
whose products are exact; sine and cosine are Taylor polynomials on [-π/4, π/4]. Before the last rounding the error is
below 3e-16 (tests/model/test_rotary.py). A row depends on its own position alone.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal, localcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vexact.model.config import Llama3Scaling, ModelConfig, RopeConfig
from vexact_kernels import CPU

Array = NDArray[np.float64]

MAX_POSITIONS = 1 << 20  # up to here a multiple of π/2 has 20 bits and its products with 33-bit parts are exact
BLOCK = 4096  # rows computed at once, so that temporaries stay small
TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
# π/2 in two parts of 33 bits and the float64 nearest to the rest: their sum is π/2 within 2^-122.
HALF_PI = tuple(map(float.fromhex, ("0x1.921fb54400000p+0", "0x1.0b4611a600000p-34", "0x1.3198a2e037073p-69")))
SINE = tuple((-1) ** (n // 2) / math.factorial(n) for n in range(17, 2, -2))  # of r^17 … r^3, highest first
COSINE = tuple((-1) ** (n // 2) / math.factorial(n) for n in range(18, 3, -2))  # of r^18 … r^4


def tables(rope: RopeConfig, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin float32 [positions, K/2]. Raises ValueError beyond 2^20 positions."""
    if not 0 <= positions <= MAX_POSITIONS:
        raise ValueError(f"rotary tables reach to {MAX_POSITIONS} positions, not to {positions}")
    frequencies = inverse_frequencies(rope, head_dim)
    cosines, sines = (np.empty((positions, head_dim // 2), dtype=np.float32) for _ in range(2))
    for first in range(0, positions, BLOCK):
        rows = slice(first, min(first + BLOCK, positions))
        angles = np.arange(rows.start, rows.stop, dtype=np.float64)[:, None] * frequencies
        cosines[rows], sines[rows] = cos_sin(angles)
    return torch.from_numpy(cosines), torch.from_numpy(sines)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Array:
    """float64 [K/2], radians a position: nearest to theta^(-2i/K), then scaled in float64."""
    with localcontext(Context(prec=60)):
        theta = Decimal(rope.theta)
        exact = [float(theta ** (Decimal(-2 * i) / head_dim)) for i in range(head_dim // 2)]
    return np.array([f if rope.scaling is None else _stretched(f, rope.scaling) for f in exact], dtype=np.float64)


def _stretched(frequency: float, scaling: Llama3Scaling) -> float:
    """Llama 3's rule: long waves are stretched by `factor`, short ones kept, those between are blended."""
    wave = 2 * math.pi / frequency
    length = scaling.original_max_position_embeddings
    if wave < length / scaling.high_freq_factor:
        return frequency
    if wave > length / scaling.low_freq_factor:
        return frequency / scaling.factor
    blend = (length / wave - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - blend) * frequency / scaling.factor + blend * frequency


def cos_sin(angles: Array) -> tuple[Array, Array]:
    """Cosine and sine of angles ≥ 0 that are at most 2^20 radians, in float64."""
    quarter = np.rint(angles * TWO_OVER_PI)
    high = angles - quarter * HALF_PI[0]  # exact: both lie within a factor of two, or quarter is 0
    middle = quarter * HALF_PI[1]
    r = high - middle
    rest = ((high - r) - middle) - quarter * HALF_PI[2]  # what r lost: first order is enough for it
    square = r * r
    sine = r + (rest * (1.0 - 0.5 * square) + r * square * _horner(SINE, square))
    cosine = (1.0 - 0.5 * square) + (square * square * _horner(COSINE, square) - r * rest)
    turn = quarter.astype(np.int64) & 3
    swap = (turn & 1) == 1
    return (
        np.where(swap, sine, cosine) * np.where((turn == 1) | (turn == 2), -1.0, 1.0),
        np.where(swap, cosine, sine) * np.where(turn >= 2, -1.0, 1.0),
    )


def _horner(coefficients: tuple[float, ...], x: Array) -> Array:
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


class RotaryTables:
    """Tables of one model that grow with the longest sequence met. A row never changes once it is there.

    They do not know the weights, so all versions of a model may share them.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device = CPU) -> None:
        self._rope, self._head_dim, self._device = rope, head_dim, device
        nothing = torch.empty((0, head_dim // 2), dtype=torch.float32, device=device)
        self._tables = nothing, nothing

    @staticmethod
    def of(config: ModelConfig, device: torch.device) -> RotaryTables:
        return RotaryTables(config.rope, config.head_dim, device)

    def upto(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin float32 [at least `positions`, K/2]."""
        held = self._tables
        if positions > held[0].shape[0]:
            held = self._tables = self._made(max(256, 1 << (positions - 1).bit_length()))
        return held

    def _made(self, positions: int) -> tuple[Tensor, Tensor]:
        cos, sin = tables(self._rope, self._head_dim, positions)
        return cos.to(self._device), sin.to(self._device)
