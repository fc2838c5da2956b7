"""Other cosines and sines, and the rounding of norms."""

from __future__ import annotations

import pytest
import torch

from caused import caused, exact, k3, recorded, sampled, scored, tokens
from helpers import assert_same_bits, differing, ulps
from vexact.model.config import Llama3Scaling, RopeConfig
from vexact.model.parameters import Vector
from vexact.model.rotary import RotaryTables, inverse_frequencies, tables
from vexact.study.causes.rotary import RecomputedTables, RoundedTables, float32_frequencies

ROPE = RopeConfig(10000.0)
LLAMA3 = RopeConfig(500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def test_rounded_tables_are_the_exact_ones_in_bfloat16() -> None:
    clean = RotaryTables(ROPE, 64).upto(300)
    for table, wanted in zip(RoundedTables(ROPE, 64).upto(300), clean, strict=True):
        assert_same_bits(table, wanted.bfloat16().float())
        assert differing(table, wanted) > 0
        assert_same_bits(table[0], wanted[0])  # cos 0 and sin 0 have few digits


@pytest.mark.parametrize("rope", [ROPE, LLAMA3], ids=["plain", "llama3"])
def test_recomputed_tables_err_as_float32_angles_do(rope: RopeConfig) -> None:
    positions = 4096
    clean, found = tables(rope, 64, positions), RecomputedTables(rope, 64).upto(positions)
    angles = torch.arange(positions).double()[:, None] * torch.from_numpy(inverse_frequencies(rope, 64))
    for one, other in zip(found, clean, strict=True):
        # a frequency is off by some ulp, and the product rounds once more
        assert ((one.double() - other.double()).abs() <= 2**-23 * (1 + 4 * angles)).all()
        assert differing(one[:positions], other) > 0


@pytest.mark.parametrize("rope", [ROPE, LLAMA3], ids=["plain", "llama3"])
def test_frequencies_are_the_same_formula(rope: RopeConfig) -> None:
    wanted = torch.from_numpy(inverse_frequencies(rope, 64))
    assert (float32_frequencies(rope, 64).double() / wanted - 1).abs().max() < 1e-6
    unstretched = float32_frequencies(RopeConfig(rope.theta), 64).double()
    assert rope.scaling is None or (unstretched / wanted - 1).abs().max() > 1  # a mutant: the scaling forgotten


def test_a_table_of_another_machine_has_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = caused("recomputed-rope", exact()).digest
    monkeypatch.setattr("vexact.study.causes.rotary.float32_frequencies", lambda *_: torch.ones(16))
    assert caused("recomputed-rope", exact()).digest != digest


@dtypes
def test_the_exact_policy_keeps_its_tables(dtype: torch.dtype) -> None:
    before = exact(dtype).transformer.rotary
    caused("bf16-rope", exact(dtype))
    assert exact(dtype).transformer.rotary is before
    assert type(before) is RotaryTables


def test_a_norm_that_rounds_once_is_nothing_in_float32() -> None:
    rollouts, other = sampled(exact()), sampled(caused("norm-cast", exact()))
    assert tokens(other) == tokens(rollouts)
    assert_same_bits(recorded(other), recorded(rollouts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_norm_that_rounds_once_is_nearer_in_half_precision(dtype: torch.dtype) -> None:
    policy, generator = exact(dtype), torch.Generator().manual_seed(6)
    x, w = (torch.randn(shape, generator=generator).to(dtype) for shape in ((50, 64), (64,)))
    once = caused("norm-cast", policy).ops.rmsnorm(x, Vector("norm", w), 1e-6)
    twice = policy.ops.rmsnorm(x, Vector("norm", w), 1e-6)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * w.double()
    assert ulps(once, expected).max() < 0.51 < ulps(twice, expected).max()
    rollouts = sampled(caused("norm-cast", policy))
    assert k3(scored(policy, rollouts) - recorded(rollouts)) > 0


@dtypes
def test_heads_are_normed_otherwise_too(dtype: torch.dtype) -> None:
    policy, generator = exact(dtype), torch.Generator().manual_seed(7)
    qkv, w = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 8, 32), (32,)))
    part = qkv[:, 2:4]  # strided, as split_heads leaves it
    found = caused("norm-cast", policy).ops.rmsnorm(part, Vector("norm", w), 1e-6)
    again = caused("norm-cast", policy).ops.rmsnorm(part.contiguous(), Vector("norm", w), 1e-6)
    assert_same_bits(found, again)
    assert (differing(found, policy.ops.rmsnorm(part, Vector("norm", w), 1e-6)) > 0) == (dtype != torch.float32)
