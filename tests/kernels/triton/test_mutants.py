"""Every check of `test_compile.py` sees a kernel that breaks the contract: `mutants.py` holds one for each."""

from __future__ import annotations

import pytest

from kernels.triton import checks
from kernels.triton.conftest import Compiled

TILE = (64, 64, 32)


@pytest.mark.parametrize("name", ["control: product", "control: rows", "ascending"])
def test_the_controls_pass(mutants: dict[str, Compiled], name: str) -> None:
    one = mutants[name]
    assert not checks.instructions(one.program, portable=True)
    assert not checks.intermediate(one.ir, portable=True)
    assert not checks.fusion(one.program, one.ir)
    assert not checks.product_chains(one.program, one.ir)
    if name.startswith("control"):
        assert not checks.room("sm_90", one.row["local"], one.row["shared"])
    if "rows" not in name:
        assert not checks.tile_chains(one.program, *TILE)


@pytest.mark.parametrize(
    "name, op",
    [
        ("exp", "ex2.approx.f32"),
        ("divide", "div.full.f32"),
        ("sqrt", "sqrt.approx.ftz.f32"),
        ("bfloat16", "mul.rn.bf16x2"),
        ("float16", "mul.rn.f16x2"),
        ("atomic", "atom.global"),
        ("tf32", "tf32"),
    ],
)
def test_an_instruction_outside_the_list_is_seen(mutants: dict[str, Compiled], name: str, op: str) -> None:
    assert any(op in said for said in checks.instructions(mutants[name].program, portable=True))


@pytest.mark.parametrize(
    "name, op",
    [
        ("sum", "tt.reduce over floats by arith.addf"),
        ("scan", "tt.scan over floats by arith.addf"),
        ("atomic", "tt.atomic_rmw"),
        ("divide", "arith.divf"),
        ("exp", "math.exp"),
        ("sqrt", "math.sqrt"),
        ("bfloat16", "arith.mulf on bf16"),
        ("float16", "arith.mulf on f16"),
        ("tf32", "tt.dot in tf32"),
    ],
)
def test_an_operation_outside_the_list_is_seen(mutants: dict[str, Compiled], name: str, op: str) -> None:
    assert [said.split(" × ")[1] for said in checks.intermediate(mutants[name].ir, portable=True)] == [op]


def test_fusion_is_seen(mutants: dict[str, Compiled]) -> None:
    one = mutants["fused"]
    assert checks.fusion(one.program, one.ir) == ["8 fused multiply-adds, where none is written"]


def test_matrix_units_are_seen_in_the_portable_profile(mutants: dict[str, Compiled]) -> None:
    one = mutants["many rows on the units"]
    assert any("wgmma.mma_async" in said for said in checks.instructions(one.program, portable=True))
    assert "1 × tt.dot on bf16, f32" in checks.intermediate(one.ir, portable=True)


def test_more_than_one_chain_is_seen(mutants: dict[str, Compiled]) -> None:
    said = checks.tile_chains(mutants["two sums"].program, *TILE)
    assert said == ["chains: 64 of 32; a thread's 32 outputs want one of 32 each"]


def test_a_form_that_depends_on_the_rows_is_seen(mutants: dict[str, Compiled]) -> None:
    few, many = mutants["few rows on the units"].program, mutants["many rows on the units"].program
    assert checks.one_form([many, many]) == []
    assert checks.one_form([few, many])


def test_a_specialisation_that_changes_the_arithmetic_is_seen(mutants: dict[str, Compiled]) -> None:
    """K = 1 as a constant leaves one step, to which Triton adds what is to be added behind it."""
    assert checks.same_arithmetic(mutants["K is one"].ir, mutants["ascending"].ir)


def test_spilling_is_seen(mutants: dict[str, Compiled]) -> None:
    one = mutants["spilled"]
    assert checks.room("sm_90", one.row["local"], one.row["shared"])
