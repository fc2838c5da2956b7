"""Every kernel that the engine starts on a GPU, compiled ahead of time, holds nothing but the arithmetic as written.

`benchmarks/gpu_compile.py` makes the files, `checks.py` says what has to hold, `test_mutants.py` that it is seen where
it does not. Proven here of the portable profile: which instructions there are, that each rounds correctly and keeps
subnormals; that none is fused which is not written so; that sums of products are single chains; that nothing is summed
in an order of the compiler's; that what Triton knows of an argument (1, or a multiple of 16) changes no operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import vexact_kernels.triton
from kernels.triton import checks
from kernels.triton.conftest import Compiled, Everything
from vexact_kernels.contract import Kernels
from vexact_kernels.triton import launch

FOLDER = Path(vexact_kernels.triton.__file__).parent


def hold(check: Callable[[Compiled], list[str]], compiled: Iterable[Compiled]) -> None:
    """Raise AssertionError with what is wrong, of every kernel."""
    wrong = [f"{one}: {'; '.join(said)}" for one in compiled if (said := check(one))]
    assert not wrong, f"{len(wrong)} variants:\n" + "\n".join(wrong)


def test_every_op_is_visited(everything: Everything) -> None:
    assert set(everything.ops) == {name for name in vars(Kernels) if not name.startswith("_")}
    started = {use["op"] for one in everything.launched for use in one.row["uses"]}
    assert set(everything.ops) - started == {"pack", "unpack"}


def test_every_kernel_is_compiled(everything: Everything) -> None:
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        found = {one.row["kernel"] for one in everything.rows if one.row["target"] == target}
        late = {"gather_kernel"} if target == "gfx942" else set()  # of the tensorcore profile
        assert found >= checks.kernels_of(FOLDER) - late, target


def test_every_choice_is_compiled(everything: Everything) -> None:
    """Of each constant that is a yes or a no, both, in one profile or the other."""
    choices: dict[tuple[str, str], set[bool]] = {}
    for one in everything.launched:
        for name, value in one.row["constants"].items():
            if isinstance(value, bool):
                choices.setdefault((one.row["kernel"], name), set()).add(value)
    assert not {key for key, values in choices.items() if len(values) < 2}


def test_the_profiles_differ_in_products_alone(everything: Everything) -> None:
    for one in everything.launched:
        if len(one.row["profiles"]) == 1:
            assert {use["op"] for use in one.row["uses"]} <= {"matmul", "matmul_dx", "attention", "attention_backward"}


def test_only_allowed_instructions(everything: Everything) -> None:
    hold(lambda one: checks.instructions(one.program, one.portable), everything.variants)


def test_only_allowed_operations(everything: Everything) -> None:
    hold(lambda one: checks.intermediate(one.ir, one.portable), everything.rows)


def test_nothing_is_fused_by_the_compiler(everything: Everything) -> None:
    hold(lambda one: checks.fusion(one.program, one.ir), everything.variants)


def test_a_launch_fuses_nothing() -> None:
    """What is compiled here without fusion is also launched without."""
    given: dict[str, Any] = {}

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **options: given.update(options)

    launch.Start()(Kernel(), (1,), (), {"num_warps": 4})
    assert given == {"num_warps": 4, "enable_fp_fusion": False}


def test_a_product_is_one_chain_an_output(everything: Everything) -> None:
    products = [one for one in everything.variants if one.portable and one.row["stem"] == "matmul"]
    sizes = [tuple(one.row["constants"][name] for name in ("ROWS", "COLUMNS", "DEPTH")) for one in products]
    assert len(set(sizes)) >= 3
    size = dict(zip(map(id, products), sizes, strict=True))
    hold(lambda one: checks.tile_chains(one.program, *size[id(one)]), products)


def test_every_product_is_chains(everything: Everything) -> None:
    products = [one for one in everything.variants if one.portable and "tt.dot" in one.ir]
    assert {one.row["stem"] for one in products} >= {"matmul", "attention", "attention_backward"}
    hold(lambda one: checks.product_chains(one.program, one.ir), products)


def test_what_is_known_of_an_argument_changes_no_operation(everything: Everything) -> None:
    ir = {(one.row["file"]): one for one in everything.rows}
    others = [one for one in everything.rows if one.row["of"] != one.row["file"]]
    assert {"undivided", "ones", "one K", "one N"} <= {one.row["origin"] for one in others}
    hold(lambda one: checks.same_arithmetic(one.ir, ir[one.row["of"]].ir), others)


def test_nothing_is_spilled(everything: Everything) -> None:
    """Of what is launched. Where nothing is divisible by 16 each value has an address of its own: slow in any case."""
    hold(lambda one: checks.room(one.row["target"], one.row["local"], one.row["shared"]), everything.launched)


def test_sizes_share_their_matrix_instructions(everything: Everything) -> None:
    groups: dict[tuple[str, ...], dict[str, list[Compiled]]] = {}
    for one in everything.launched:
        for use in one.row["uses"] if "tensorcore" in one.row["profiles"] else []:
            if use["dtype"] != "float32" and use["op"] in ("matmul", "matmul_dx", "attention", "attention_backward"):
                key: tuple[str, ...] = (one.row["target"], use["op"], use["dtype"], use["shape"])
                groups.setdefault(key, {}).setdefault(use["size"], []).append(one)
    assert {key[1] for key in groups} >= {"matmul", "attention"}
    for group, by_size in groups.items():
        forms = [frozenset().union(*(one.program.matrix_forms() for one in some)) for some in by_size.values()]
        assert len(set(forms)) == 1, (group, dict(zip(by_size, map(sorted, forms), strict=True)))
        # float16's gradients are float32
        assert forms[0] or group[1:3] in (("matmul_dx", "float16"), ("attention_backward", "float16")), group
