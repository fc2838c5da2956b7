"""What has to hold of a compiled kernel. Each check returns what is wrong, in words: an empty list where it holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kernels.triton import ttir
from kernels.triton.ptx import Program
from vexact_kernels.triton.instructions import PORTABLE, TENSORCORE

# Bytes of shared memory that a block may have (CUDA C++ Programming Guide, compute capabilities).
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
SHORT = 8  # a polynomial's chains of fused multiply-adds are shorter than this, as its sums are its next factors


def instructions(program: Program, portable: bool) -> list[str]:
    """Instructions outside the list."""
    bad = program.forbidden(PORTABLE if portable else TENSORCORE)
    return [f"{count} × {op}" for op, count in sorted(bad.items())]


def intermediate(text: str, portable: bool) -> list[str]:
    """Operations outside the list, such as a sum by the compiler's own order."""
    return [f"{count} × {op}" for op, count in sorted(ttir.forbidden(text, units=not portable).items())]


def fusion(program: Program, text: str) -> list[str]:
    """A fused multiply-add that nobody wrote."""
    asked = any(one.name in ("math.fma", "tt.dot") for one in ttir.operations(text))
    made = sum(count for op, count in program.counts().items() if op.startswith("fma."))
    return [f"{made} fused multiply-adds, where none is written"] if made and not asked else []


def tile_chains(program: Program, rows: int, columns: int, depth: int) -> list[str]:
    """A product's program: one chain an output, of one step's depth, each link continuing the one before.

    The links are followed from register to register inside a step; from step to step a sum stays in its register. That
    k ascends along them is not seen here: it is by running the instructions (`test_emulated.py`).
    """
    try:
        lengths = [len(chain) for chain in program.chains()]
    except ValueError as error:
        return [str(error)]
    outputs = rows * columns // program.threads
    if lengths != [depth] * outputs:
        found = ", ".join(f"{lengths.count(n)} of {n}" for n in sorted(set(lengths)))
        return [f"chains: {found}; a thread's {outputs} outputs want one of {depth} each"]
    return []


def product_chains(program: Program, text: str) -> list[str]:
    """Every product that is written is chains as long as it is deep: as many links as multiplications."""
    wanted = sum(m * n * k for m, n, k in ttir.dots(text)) // program.threads
    try:
        made = sum(len(chain) for chain in program.chains() if len(chain) >= SHORT)
    except ValueError as error:
        return [str(error)]
    return [] if made == wanted else [f"{made} links of chains, where the products want {wanted}"]


def one_form(programs: Iterable[Program]) -> list[str]:
    """Sizes of one product share their matrix instructions."""
    forms = {program.matrix_forms() for program in programs}
    return [] if len(forms) <= 1 else [f"different matrix instructions: {sorted(map(sorted, forms))}"]


def same_arithmetic(one: str, other: str) -> list[str]:
    """Two variants of a kernel store the same trees of operations."""
    if ttir.without_marks(one) == ttir.without_marks(other):
        return []
    a, b = ttir.stored(one), ttir.stored(other)
    return [] if a == b else [f"{len((a - b) + (b - a))} stored values are made in another way"]


def room(target: str, local: int, shared: int) -> list[str]:
    """Nothing is spilled, and the shared memory is there."""
    wrong = [f"{local} bytes of local memory: spilled registers"] if local else []
    return wrong + ([f"{shared} bytes of shared memory"] if shared > SHARED[target] else [])


def kernels_of(folder: Path) -> set[str]:
    """The names of the kernels that are written in a folder's files: device functions have other names."""
    return {
        line.split("(")[0][4:]
        for path in folder.glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    }
