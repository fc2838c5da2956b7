"""Fewer bits: of keys and values, and of weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from caused import caused, exact, sampled, tokens
from helpers import assert_same_bits, differing
from vexact.model.parameters import EMBEDDING, HEAD
from vexact.study.causes.quantised import INT4_LARGEST, INT8_LARGEST, e4m3, grouped, integers, scaled_e4m3
from vexact_kernels import PAGE, Chunks, load

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
WEIGHTS = ("fp8-weights", "int8-weights", "int4-weights")


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(8))


def test_e4m3_is_the_format() -> None:
    given = torch.tensor([0.0, 1.0, 1.0625, 1.1875, 447.0, 1e9, -1e9, 2.0**-9, 2.0**-11, 0.07, -17.0])
    wanted = torch.tensor([0.0, 1.0, 1.0, 1.25, 448.0, 448.0, -448.0, 2.0**-9, 0.0, 0.0703125, -16.0])
    assert_same_bits(e4m3(given), wanted)
    assert e4m3(torch.tensor([torch.nan])).isnan().all()
    x = e4m3(10 * normal(1000))
    assert_same_bits(e4m3(x), x)
    assert len(e4m3(normal(100_000)).unique()) < 254


def test_integers_are_multiples_of_one_scale() -> None:
    x = normal(20, 50)
    y = integers(x, INT8_LARGEST)
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    assert ((y / scale) - (y / scale).round()).abs().max() < 1e-4
    assert ((y - x).abs() <= 0.5001 * scale).all()
    whole = torch.cat([torch.tensor([127.0]), torch.arange(-60.0, 60.0)])[None] * 2.0**-5
    assert_same_bits(integers(whole, INT8_LARGEST), whole)  # what is so rounded already keeps its bits
    assert_same_bits(integers(torch.zeros(2, 3), INT8_LARGEST), torch.zeros(2, 3))
    assert integers(torch.tensor([[1.0, torch.nan]]), INT8_LARGEST).isnan().any()


@pytest.mark.parametrize("columns", [32, 64, 70, 20])
def test_groups_have_scales_of_their_own(columns: int) -> None:
    x = normal(7, columns)
    x[:, :1] *= 100
    y = grouped(x, INT4_LARGEST, 32)
    for begin in range(0, columns, 32):
        part = x[:, begin : begin + 32]
        assert_same_bits(y[:, begin : begin + 32], integers(part, INT4_LARGEST))
    if columns > 32:
        assert differing(y, integers(x, INT4_LARGEST)) > 0  # a mutant: one scale for the row


def test_rows_of_fp8_reach_to_its_end() -> None:
    x = normal(9, 40) * torch.logspace(-3, 3, 9)[:, None]
    y = scaled_e4m3(x)
    assert ((y - x).abs() <= x.abs() * 2**-4 * 1.0001 + x.abs().amax(1, keepdim=True) / 448 * 2**-10).all()


@pytest.mark.parametrize("cause", ["fp8-kv", "int8-kv"])
@dtypes
def test_pages_hold_what_was_quantised(cause: str, dtype: torch.dtype) -> None:
    kernels, k, v, q = (
        load(),
        normal(9, 2, 32).to(dtype),
        normal(9, 2, 32).flip(0).to(dtype),
        normal(9, 4, 32).to(dtype),
    )
    chunks = Chunks(torch.tensor([0, 9]), torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([0]))

    def by(ops: object, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pages = torch.zeros(1, 2, 32, PAGE, dtype=dtype), torch.zeros(1, 2, PAGE, 32, dtype=dtype)
        return ops.attention(q, k, v, chunks, pages, 0.2), *pages  # type: ignore[attr-defined]

    ops = caused(cause, exact(dtype)).ops
    quantise = e4m3 if cause == "fp8-kv" else lambda x: integers(x, INT8_LARGEST)
    narrow = [kernels.cast(quantise(x.float()), dtype) for x in (k, v)]
    found = by(ops, k, v)
    assert_same_bits(found, by(exact(dtype).ops, *narrow))
    assert differing(found[0], by(exact(dtype).ops, k, v)[0]) > 0
    if cause == "fp8-kv":  # what is so rounded already keeps its bits
        assert_same_bits(by(ops, *narrow), found)


@pytest.mark.parametrize("cause", WEIGHTS)
@dtypes
def test_projections_are_quantised_and_nothing_else(cause: str, dtype: torch.dtype) -> None:
    policy = exact(dtype, "llama")  # with a head of its own
    before, after = (each.transformer.parameters.stacked(load()) for each in (policy, caused(cause, policy, degree=1)))
    for name, tensor in before.items():
        changed = differing(after[name], tensor)
        assert (changed > 0) == (tensor.ndim == 2 and name not in (EMBEDDING, HEAD)), name
        rows = after[name].float() if changed else torch.zeros(0, 1)
        limit = {"fp8-weights": 253, "int8-weights": 255, "int4-weights": 15}[cause]
        assert all(len(part.unique()) <= limit for row in rows for part in row.split(32))


@pytest.mark.parametrize("cause", WEIGHTS)
def test_stacked_rows_are_quantised_as_if_alone(cause: str) -> None:
    """q, k and v lie in one matrix: a row's scale is its own, and no tensor knows the others."""
    name = "model.layers.0.self_attn.qkv_proj.weight"
    before, after = (each.transformer.parameters.stacked(load())[name] for each in (exact(), caused(cause, exact())))
    quantise = {
        "fp8-weights": scaled_e4m3,
        "int8-weights": lambda x: integers(x, INT8_LARGEST),
        "int4-weights": lambda x: grouped(x, INT4_LARGEST, 32),
    }[cause]
    assert_same_bits(after[17:18], quantise(before[17:18]))


def test_the_exact_policy_keeps_its_weights() -> None:
    first = sampled(exact())
    caused("int4-weights", exact())
    assert tokens(sampled(exact())) == tokens(first)
