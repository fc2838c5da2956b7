"""The matrix products beside torch's own, in one process and in turns.

y is compared with `torch.nn.functional.linear`, dx with `dy @ w`, dw with two things: `dy.T @ x` alone, which writes a
result of the storage type once, and the same added to a float32 gradient, which is the work that dw does.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from timing import environment, interleaved
from vexact_kernels import Kernels, Segments, load
from vexact_kernels.contract import Stream

SMOLLM2 = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152))  # (columns K, rows N) of the weights
QWEN3 = ((2048, 4096), (2048, 2048), (2048, 12288), (6144, 2048))
FORWARD_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BACKWARD_TOKENS = (64, 128, 256, 512, 1024)
LANE_TOKENS = 128  # tokens of a rollout in the benchmark of dw: a lane ends behind each
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
QUICK_WORK = 2**29  # multiply-adds above which a quick run skips a cell

Candidates = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Cell:
    """One product of one shape: median seconds of a call by candidate, and how many times faster vexact is."""

    op: str
    dtype: str
    columns: int
    rows: int
    tokens: int
    seconds: dict[str, float]
    ratio: dict[str, float]

    @property
    def gflops(self) -> float:
        """vexact's speed, a multiply-add counting as two."""
        return 2e-9 * self.columns * self.rows * self.tokens / self.seconds["vexact"]


def forward(kernels: Kernels, weight: Tensor, tokens: int) -> Candidates:
    """y of `tokens` rows; weight [rows, columns]."""
    x, packed = torch.randn(tokens, weight.shape[1]).to(weight.dtype), kernels.pack(weight)
    return {
        "vexact": lambda: kernels.matmul(x, packed),
        "torch": lambda: torch.nn.functional.linear(x, weight),
    }


def input_gradient(kernels: Kernels, weight: Tensor, tokens: int) -> Candidates:
    """dx of `tokens` rows."""
    dy, packed = torch.randn(tokens, weight.shape[0]).to(weight.dtype), kernels.pack(weight)
    return {"vexact": lambda: kernels.matmul_dx(dy, packed), "torch": lambda: dy @ weight}


def weight_gradient(kernels: Kernels, weight: Tensor, tokens: int) -> Candidates:
    """dw over `tokens` rows, in lanes of LANE_TOKENS."""
    rows, columns = weight.shape
    x, dy = torch.randn(tokens, columns).to(weight.dtype), torch.randn(tokens, rows).to(weight.dtype)
    ends = torch.tensor([*range(LANE_TOKENS, tokens, LANE_TOKENS), tokens])
    segments = Segments(ends, torch.ones(len(ends), dtype=torch.uint8))
    stream = Stream(torch.zeros(rows, columns), torch.zeros(rows, columns))
    gradient = torch.zeros(rows, columns)
    return {
        "vexact": lambda: kernels.matmul_dw(dy, x, segments, stream),
        "torch": lambda: dy.T @ x,
        "torch, accumulated": lambda: gradient.add_(dy.T @ x),
    }


OPS = {
    "y": (forward, FORWARD_TOKENS),
    "dx": (input_gradient, BACKWARD_TOKENS),
    "dw": (weight_gradient, BACKWARD_TOKENS),
}


def measure(kernels: Kernels, ops: list[str], quick: bool, seconds: float) -> Iterator[Cell]:
    """Every cell of the benchmark, about `seconds` each; `quick` takes SmolLM2's shapes, three M, and no huge cell."""
    for op in ops:
        candidates, token_counts = OPS[op]
        for name, dtype in DTYPES.items():
            for columns, rows in SMOLLM2 if quick else SMOLLM2 + QWEN3:
                weight = (torch.randn(rows, columns) / math.sqrt(columns)).to(dtype)
                for tokens in token_counts[:: len(token_counts) // 2] if quick else token_counts:
                    if quick and columns * rows * tokens > QUICK_WORK:
                        continue
                    medians = interleaved(candidates(kernels, weight, tokens), seconds)
                    ratio = {other: t / medians["vexact"] for other, t in medians.items() if other != "vexact"}
                    yield Cell(op, name, columns, rows, tokens, medians, ratio)


def geometric_mean(values: list[float]) -> float:
    """Of positive values."""
    return math.exp(math.fsum(math.log(v) for v in values) / len(values))


def summary(cells: list[Cell]) -> list[dict[str, str | float | int]]:
    """Per op, dtype and rival: geometric mean and smallest ratio over the cells."""
    keys = sorted({(c.op, c.dtype, other) for c in cells for other in c.ratio})
    rows: list[dict[str, str | float | int]] = []
    for op, dtype, other in keys:
        ratios = [c.ratio[other] for c in cells if (c.op, c.dtype) == (op, dtype)]
        rows.append(
            {
                "op": op,
                "dtype": dtype,
                "against": other,
                "cells": len(ratios),
                "geometric_mean": geometric_mean(ratios),
                "smallest": min(ratios),
            }
        )
    return rows


def show(console: Console, cells: list[Cell]) -> None:
    """The ratios as a table with a row a weight, then the summary."""
    for op, dtype in dict.fromkeys((c.op, c.dtype) for c in cells):
        chosen = [c for c in cells if (c.op, c.dtype) == (op, dtype)]
        tokens = sorted({c.tokens for c in chosen})
        table = Table(title=f"{op}, {dtype}: times torch's speed (GFLOP/s)")
        table.add_column("K, N")
        for m in tokens:
            table.add_column(f"M = {m}", justify="right")
        for shape in dict.fromkeys((c.columns, c.rows) for c in chosen):
            by_tokens = {c.tokens: c for c in chosen if (c.columns, c.rows) == shape}
            texts = [
                f"{by_tokens[m].ratio['torch']:.2f} ({by_tokens[m].gflops:.0f})" if m in by_tokens else ""
                for m in tokens
            ]
            table.add_row(f"{shape[0]}, {shape[1]}", *texts)
        console.print(table)
    for row in summary(cells):
        console.print(
            f"{row['op']} {row['dtype']} against {row['against']}: geometric mean {row['geometric_mean']:.2f}, "
            f"smallest {row['smallest']:.2f} of {row['cells']} cells"
        )


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="SmolLM2's shapes and a few M only")
    parser.add_argument("--ops", nargs="+", choices=list(OPS), default=list(OPS))
    parser.add_argument("--isa", help="instruction set (default: the best of this machine)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.4, help="time per cell")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "matmul.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    kernels = load(isa=options.isa)
    console = Console(width=None)
    cells = []
    with console.status("measuring") as status:
        for cell in measure(kernels, options.ops, options.quick, 0.1 if options.quick else options.seconds):
            cells.append(cell)
            status.update(f"{cell.op} {cell.dtype} K {cell.columns} N {cell.rows} M {cell.tokens}")
    show(console, cells)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "environment": {**environment(), "kernels": kernels.name},
        "summary": summary(cells),
        "cells": [{**asdict(c), "gflops": c.gflops} for c in cells],
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()
