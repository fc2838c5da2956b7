"""Rotary tables against exact mathematics, and against themselves."""

from __future__ import annotations

import hashlib
import math

import mpmath
import numpy as np
import pytest
import torch

from checkpoints import LLAMA3
from vexact.model import rotary
from vexact.model.config import Llama3Scaling, RopeConfig
from vexact.model.rotary import MAX_POSITIONS, RotaryTables, cos_sin, inverse_frequencies, tables

SCALED = RopeConfig(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
GOLDEN = "01d018c476336f4321f7e9974b9d2d172d7dcc81496ee8bfd68b54cfbc6296ac"


@pytest.fixture(autouse=True)
def precise() -> object:
    with mpmath.workprec(200):
        yield


def hard_angles() -> np.ndarray:
    random = np.random.default_rng(0)
    near = np.array([float(mpmath.pi / 4 * n) for n in [*range(1200), *range(10**6, 10**6 + 300)]])
    wide = [random.uniform(0, top, 700) for top in (1e-6, 1.0, 131072.0, float(MAX_POSITIONS))]
    return np.concatenate([near, *wide, np.array([0.0, 131071.0, float(MAX_POSITIONS)])])


def error(angles: np.ndarray, cosine: np.ndarray, sine: np.ndarray) -> float:
    exact = [(mpmath.cos(mpmath.mpf(x)), mpmath.sin(mpmath.mpf(x))) for x in angles.tolist()]
    pairs = zip(exact, cosine.tolist(), sine.tolist(), strict=True)
    return float(max(max(abs(c - mpmath.mpf(y)), abs(s - mpmath.mpf(z))) for (c, s), y, z in pairs))


def test_sine_and_cosine_are_within_3e_16_of_the_exact_ones() -> None:
    angles = hard_angles()
    assert error(angles, *cos_sin(angles)) < 3e-16  # float64's own spacing below 1 is 1.1e-16


def test_the_bound_notices_a_reduction_that_drops_its_last_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "HALF_PI", (*rotary.HALF_PI[:1], float.fromhex("0x1.0b4611a5p-34"), 0.0))
    angles = hard_angles()
    assert error(angles, *cos_sin(angles)) > 1e-15


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0, 1000000.0])
def test_inverse_frequencies_are_the_nearest_float64(head_dim: int, theta: float) -> None:
    exact = [mpmath.power(theta, mpmath.mpf(-2 * i) / head_dim) for i in range(head_dim // 2)]
    found = inverse_frequencies(RopeConfig(theta), head_dim)
    assert found.tolist() == [float(value) for value in exact]


@pytest.mark.parametrize("original", [64, 8192])
def test_llama3_scaling_agrees_with_transformers(original: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {**LLAMA3, "original_max_position_embeddings": original}
    parameters = {"rope_theta": 500000.0, "rope_type": "llama3", **scaling}
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, head_dim=128, rope_parameters=parameters)
    theirs, attention_scale = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    ours = inverse_frequencies(RopeConfig(500000.0, Llama3Scaling(8.0, 1.0, 4.0, original)), 128)
    plain = inverse_frequencies(RopeConfig(500000.0), 128)
    assert attention_scale == 1.0
    # Theirs is float32 arithmetic on a float32 power; the blend loses a few of its units.
    assert np.max(np.abs(theirs.numpy() / ours - 1)) < 2e-6
    assert len({round(float(r), 6) for r in plain / ours}) > 3  # kept, stretched by 8, and blends between


def test_a_row_does_not_know_the_length_of_its_table() -> None:
    whole = tables(SCALED, 64, 5000)
    for positions in (1, 63, 64, 4095, 4096, 4097):
        for part, all_ in zip(tables(SCALED, 64, positions), whole, strict=True):
            assert part.shape == (positions, 32)
            assert bool((part.view(torch.int32) == all_[:positions].view(torch.int32)).all())


def test_a_cache_grows_without_changing_a_row() -> None:
    cache = RotaryTables(SCALED, 64)
    early = cache.upto(10)[1][:10].clone()
    late = cache.upto(3000)[1]
    assert late.shape[0] >= 3000
    assert bool((early.view(torch.int32) == late[:10].view(torch.int32)).all())


def test_the_table_is_the_rounding_of_the_exact_one_at_far_positions() -> None:
    rope, positions = RopeConfig(10000.0), [0, 1, 1857, 8191, 131071]
    cos, sin = tables(rope, 32, 131072)
    for position in positions:
        angles = [mpmath.mpf(float(np.float64(position) * f)) for f in inverse_frequencies(rope, 32)]
        assert cos[position].tolist() == [float(np.float32(float(mpmath.cos(a)))) for a in angles]
        assert sin[position].tolist() == [float(np.float32(float(mpmath.sin(a)))) for a in angles]
        # The angle's own rounding moves the cosine by less than a float32 unit even here.
        exact = [mpmath.cos(position * mpmath.power(10000, mpmath.mpf(-i) / 16)) for i in range(16)]
        assert max(abs(float(c - mpmath.mpf(y))) for c, y in zip(exact, cos[position].tolist(), strict=True)) < 6e-8


def test_half_precision_angles_would_be_noticed() -> None:
    angle = torch.tensor(1857.0).bfloat16() * torch.tensor(1.0).bfloat16()
    cos, _ = tables(RopeConfig(10000.0), 32, 2000)
    assert abs(math.cos(float(angle)) - float(cos[1857, 0])) > 0.1


def test_an_ambient_flush_denormal_changes_nothing() -> None:
    normal = tables(SCALED, 64, 300)
    torch.set_flush_denormal(True)
    try:
        flushed = tables(SCALED, 64, 300)
    finally:
        torch.set_flush_denormal(False)
    assert all(bool((a.view(torch.int32) == b.view(torch.int32)).all()) for a, b in zip(normal, flushed, strict=True))


def test_the_bits_are_the_recorded_ones() -> None:
    digest = hashlib.sha256()
    for rope, head_dim in ((RopeConfig(10000.0), 80), (RopeConfig(100000.0), 64), (SCALED, 128)):
        for table in tables(rope, head_dim, 2048):
            digest.update(table.numpy().tobytes())
    assert digest.hexdigest() == GOLDEN


def test_too_many_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="reach to 1048576 positions, not to 1048577"):
        tables(RopeConfig(10000.0), 16, MAX_POSITIONS + 1)
