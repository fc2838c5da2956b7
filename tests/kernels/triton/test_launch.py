"""What the compiler made of a kernel is read before its results count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vexact_kernels.triton.instructions import counts, forbidden
from vexact_kernels.triton.launch import ForbiddenInstruction, Start

BODY = """
.visible .entry k(.param .u64 p0) // fma.rn.bf16 in a comment
.reqntid 128
{
\t.reg .b32 %r<9>;
$L__BB0_1:
\tmov.u32 %r1, %tid.x;
\t@%p1 bra $L__BB0_1;
\tfma.rn.f32 %r2, %r3, %r4, %r5;
\t{ add.rn.f32 %r2, %r3, %r4; sub.rn.f32 %r2, %r3, %r4; }
\tINSERT
\tret;
}
"""
BAD = ("ex2.approx.ftz.f32", "add.rn.bf16x2", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "fma.rn.ftz.f32")
UNITS = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"


def text(instruction: str) -> str:
    return BODY.replace("INSERT", f"{instruction} %r1, %r2;")


class Kernel(dict[tuple[int, ...], Any]):
    """What a grid picks is called with the arguments, as of a kernel of Triton's."""

    __name__ = "made"


class Assembly(dict[str, str]):
    """Texts by name, which counts how often one is read."""

    reads = 0

    def __getitem__(self, name: str) -> str:
        self.reads += 1
        return super().__getitem__(name)


def start(ptx: str, times: int = 1, **options: Any) -> int:
    """Launch a kernel whose compiler gave that text, and say how often the text was read."""
    assembly = Assembly(ptx=ptx)
    kernel = Kernel({(1,): lambda **_: SimpleNamespace(hash="h", asm=assembly)})
    launch = Start()
    for _ in range(times):
        launch(kernel, (1,), (), options)
    return assembly.reads


def test_instructions_are_found_behind_predicates_braces_and_labels() -> None:
    found = counts(text("neg.f32"))
    assert found == dict.fromkeys(("mov.u32", "bra", "fma.rn.f32", "add.rn.f32", "sub.rn.f32", "neg.f32", "ret"), 1)


@pytest.mark.parametrize("bad", BAD)
def test_a_forbidden_instruction_is_an_error_that_names_it(bad: str) -> None:
    with pytest.raises(ForbiddenInstruction, match=bad.replace(".", r"\.")):
        start(text(bad))


def test_matrix_units_are_allowed_where_they_were_asked_for() -> None:
    assert forbidden(text(UNITS)) and not forbidden(text(UNITS), units=True)
    start(text(UNITS), UNITS=True)
    with pytest.raises(ForbiddenInstruction, match="wgmma"):
        start(text(UNITS), UNITS=False)


def test_a_kernel_is_read_once() -> None:
    assert start(text("neg.f32"), times=3) == 1
