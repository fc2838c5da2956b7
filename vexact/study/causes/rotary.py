"""Other tables of cosines and sines.

- `bf16-rope`: the exact tables rounded to bfloat16. The rotation itself is the same kernel's.
- `recomputed-rope`: as engines compute them on the fly: inverse frequencies, angles, cosines and sines each in float32,
  by torch. An angle of some thousand radians then has three or four digits behind the point.

A gradient is rotated back with the same tables.
"""

from __future__ import annotations

import copy
import hashlib
import math

import torch
from torch import Tensor

from vexact.model.config import RopeConfig
from vexact.model.policy import Policy
from vexact.model.rotary import RotaryTables
from vexact.recipe import MismatchSection
from vexact.study.causes.caused import labelled

PROBED = 1024  # rows that stand for the table in a digest


def bf16_rope(policy: Policy, section: MismatchSection) -> Policy:
    return _with(policy, RoundedTables(policy.config.rope, policy.config.head_dim, policy.device), "bf16-rope")


def recomputed_rope(policy: Policy, section: MismatchSection) -> Policy:
    tables = RecomputedTables(policy.config.rope, policy.config.head_dim, policy.device)
    # torch's cosine is not the same on every machine, and nothing else of a policy would tell
    digest = hashlib.sha256()
    for table in tables.upto(PROBED):
        digest.update(table[:PROBED].cpu().numpy().tobytes())
    return _with(policy, tables, f"recomputed-rope/{digest.hexdigest()[:8]}")


class RoundedTables(RotaryTables):
    def _made(self, positions: int) -> tuple[Tensor, Tensor]:
        cos, sin = (table.to(torch.bfloat16).to(torch.float32) for table in super()._made(positions))
        return cos, sin


class RecomputedTables(RotaryTables):
    def _made(self, positions: int) -> tuple[Tensor, Tensor]:
        places = torch.arange(positions, dtype=torch.float32, device=self._device)
        angles = places[:, None] * float32_frequencies(self._rope, self._head_dim).to(self._device)
        return angles.cos(), angles.sin()


def float32_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position, float32 [K/2], in the operations that model code usually has for them."""
    even = torch.arange(0, head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / (rope.theta ** (even / head_dim))
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    length, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    waves = 2 * math.pi / frequencies
    blend = (length / waves - low) / (high - low)
    between = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = torch.where(waves > length / low, frequencies / scaling.factor, between)
    return torch.where(waves < length / high, frequencies, stretched)


def _with(policy: Policy, tables: RotaryTables, label: str) -> Policy:
    transformer = copy.copy(policy.transformer)
    transformer.rotary = tables
    return Policy(transformer, labelled(policy, label).ops, policy.version)
