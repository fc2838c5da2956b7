"""Kernels that break the contract, one way each, and the control that does not. Run as a script they are compiled:

    python tests/kernels/triton/mutants.py FOLDER

writes the PTX and the TTIR of each, and mutants.json.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

import torch
import triton
import triton.language as tl

from vexact_kernels.triton.ahead import Collector, compiled
from vexact_kernels.triton.matmul import product_kernel

TILE = {"ROWS": 64, "COLUMNS": 64, "DEPTH": 32}


@triton.jit
def rows_kernel(x, y, out, N, HOW: tl.constexpr, BLOCK: tl.constexpr):
    """Of a row of values: something per value, or their sum."""
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < N
    a = tl.load(x + at, mask=inside, other=0.0)
    b = tl.load(y + at, mask=inside, other=0.0)
    if HOW == "sixteen bits":
        tl.store(out + at, a * b, mask=inside)
    else:
        a, b = a.to(tl.float32), b.to(tl.float32)
        if HOW == "sum":
            tl.store(out + tl.program_id(0), tl.sum(a, 0))
        elif HOW == "scan":
            tl.store(out + at, tl.cumsum(a, 0), mask=inside)
        elif HOW == "atomic":
            tl.atomic_add(out + at, a, mask=inside)
        elif HOW == "divide":
            tl.store(out + at, a / b, mask=inside)
        elif HOW == "exp":
            tl.store(out + at, tl.exp(a), mask=inside)
        elif HOW == "sqrt":
            tl.store(out + at, tl.sqrt(a), mask=inside)
        elif HOW == "multiply and add":
            tl.store(out + at, a * b + a, mask=inside)


@triton.jit
def other_product_kernel(
    a, a_row, b, b_row, out, out_row, M, N, K,
    HOW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[m, n] = Σ_k a[m, k]·b[n, k], summed in some other way."""
    m, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    odd = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for first in range(0, K, DEPTH):
        k = first + tl.arange(0, DEPTH)
        if HOW == "descending":
            k = K - 1 - k
        inside = (k >= 0) & (k < K)
        x = tl.load(a + m[:, None] * a_row + k[None, :], mask=(m < M)[:, None] & inside[None, :], other=0.0)
        w = tl.load(b + n[None, :] * b_row + k[:, None], mask=(n < N)[None, :] & inside[:, None], other=0.0)
        if HOW == "tf32":
            acc = tl.dot(x, w, acc, input_precision="tf32")
        elif HOW == "units":
            acc = tl.dot(x, w, acc, input_precision="ieee")
        elif HOW == "two sums":
            if (first // DEPTH) % 2 == 0:
                acc = tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
            else:
                odd = tl.dot(x.to(tl.float32), w.to(tl.float32), odd, input_precision="ieee")
        else:
            acc = tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
    acc = acc + odd + 0.0
    tl.store(out + m[:, None] * out_row + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


def product(collector: Collector, **change: Any) -> None:
    """The engine's own product."""
    options: dict[str, Any] = {"M": 64, "K": 256, "UNITS": False, **TILE, **change}
    m, k = options.pop("M"), options.pop("K")
    a, b = torch.zeros(64, 256), torch.zeros(64, 256)
    if options["UNITS"]:
        a, b = a.bfloat16(), b.bfloat16()
    collector(
        product_kernel, (1,), (a, 256, b, 256, 1, a, a, 64, a, m, 64, k),
        {"HAS_BIAS": False, "SLICE": 1024, "SPLIT": False, "num_warps": 4, "num_stages": 2, **options},
    )  # fmt: skip


def other(collector: Collector, how: str, dtype: torch.dtype = torch.float32, **change: Any) -> None:
    x = torch.zeros(64, 256, dtype=dtype)
    out = torch.zeros(64, 64)
    options = {"HOW": how, **TILE, "num_warps": 4, "num_stages": 2, **change}
    collector(other_product_kernel, (1, 1), (x, 256, x, 256, out, 64, 64, 64, 256), options)


def rows(collector: Collector, how: str, dtype: torch.dtype = torch.float32, **change: Any) -> None:
    x = torch.zeros(4, 256, dtype=dtype)
    collector(rows_kernel, (4,), (x, x, x, 256), {"HOW": how, "BLOCK": 256, "num_warps": 1, **change})


# Name: how it is launched. The name of what is wrong is the kernel's HOW.
LAUNCHES = {
    "control: product": lambda c: product(c),
    "control: rows": lambda c: rows(c, "multiply and add"),
    "sum": lambda c: rows(c, "sum"),
    "scan": lambda c: rows(c, "scan"),
    "atomic": lambda c: rows(c, "atomic"),
    "divide": lambda c: rows(c, "divide"),
    "exp": lambda c: rows(c, "exp"),
    "sqrt": lambda c: rows(c, "sqrt"),
    "bfloat16": lambda c: rows(c, "sixteen bits", torch.bfloat16),
    "float16": lambda c: rows(c, "sixteen bits", torch.float16),
    "fused": lambda c: rows(c, "multiply and add", enable_fp_fusion=True),
    "two sums": lambda c: other(c, "two sums"),
    "ascending": lambda c: other(c, "ascending"),
    "descending": lambda c: other(c, "descending"),
    "tf32": lambda c: other(c, "tf32"),
    "few rows on the units": lambda c: other(c, "units", torch.bfloat16, ROWS=16, DEPTH=64),
    "many rows on the units": lambda c: other(c, "units", torch.bfloat16, ROWS=64, DEPTH=64),
    "K is one": lambda c: other(c, "ascending"),
    "spilled": lambda c: other(c, "ascending", ROWS=128, COLUMNS=128, DEPTH=64),
}  # fmt: skip


def main() -> None:
    folder, rows_made = Path(sys.argv[1]), []
    for number, (name, launch) in enumerate(LAUNCHES.items()):
        for target in ("sm_80", "sm_90", "sm_100") if "units" in name else ("sm_90",):
            collector = Collector(target)
            launch(collector)
            (variant,) = collector.found
            if name == "K is one":
                variant = next(one for one in variant.ones() if one.origin == "one K")
            built = compiled(variant, target)
            file = f"{number}.{target}"
            (folder / f"{file}.ttir").write_text(built.ir)
            (folder / f"{file}.ptx").write_text(built.assembly)
            row = {"name": name if target == "sm_90" else f"{name}, {target}", "file": file, "target": target}
            rows_made.append(row | {"local": built.local, "shared": built.shared, "profiles": ["portable"]})
    (folder / "mutants.json").write_text(json.dumps(rows_made))


if __name__ == "__main__":
    main()
