"""Paged attention beside torch's scaled_dot_product_attention; writes results/attention.json.

torch gets dense tensors [S, H, tokens, K] with the key/value heads already expanded to the query heads, outside of the
timed part: the most favourable form for it. vexact gets ragged rows and shuffled pages, and its time includes writing
the chunk's keys and values. `ratio` is torch's median over vexact's: above 1 vexact is faster.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from timing import environment, interleaved
from vexact_kernels import load
from vexact_kernels.contract import PAGE, Chunks, Kernels

RESULT = Path(__file__).parent / "results" / "attention.json"
SECONDS = 2.0  # of one comparison


@dataclass(frozen=True)
class Case:
    """`sequences` equal sequences, each with `chunk` new tokens after `prefix` tokens that are in pages already."""

    name: str
    sequences: int
    prefix: int
    chunk: int
    heads: int
    groups: int
    size: int

    @property
    def scale(self) -> float:
        return float(self.size**-0.5)


SMOLLM2, QWEN3 = (9, 3, 64), (16, 8, 128)
CASES = (
    Case("decode 1 after 1000, SmolLM2", 1, 1000, 1, *SMOLLM2),
    Case("decode 64 after 500, SmolLM2", 64, 500, 1, *SMOLLM2),
    Case("decode 16 after 2000, Qwen3", 16, 2000, 1, *QWEN3),
    Case("8 x 128, SmolLM2", 8, 0, 128, *SMOLLM2),
    Case("1 x 1024, SmolLM2", 1, 0, 1024, *SMOLLM2),
    Case("2 x 512, Qwen3", 2, 0, 512, *QWEN3),
)
DTYPES = (torch.float32, torch.bfloat16)
Pair = tuple[Callable[[], object], Callable[[], object]]  # vexact's call and torch's


def ends(count: int, step: int) -> Tensor:
    """0, step, 2·step, …: int64 [count + 1]."""
    return torch.arange(count + 1) * step


def chunks_of(case: Case) -> tuple[Chunks, int]:
    """The batch with its pages in random order, and the number of pages."""
    each = -(-(case.prefix + case.chunk) // PAGE)
    table = torch.randperm(case.sequences * each)
    prefix = torch.full((case.sequences,), case.prefix)
    return Chunks(ends(case.sequences, case.chunk), prefix, ends(case.sequences, each), table), table.numel()


def dense(x: Tensor, case: Case) -> Tensor:
    """Rows [S·chunk, heads, K] → [S, H, chunk, K], key/value heads expanded."""
    y = x.unflatten(0, (case.sequences, -1)).transpose(1, 2)
    return y.repeat_interleave(case.heads // y.size(1), 1).contiguous()


def forward(kernels: Kernels, case: Case, dtype: torch.dtype) -> Pair:
    chunks, pages = chunks_of(case)
    rows = case.sequences * case.chunk
    q = torch.randn(rows, case.heads, case.size).to(dtype)
    k, v = torch.randn(2, rows, case.groups, case.size).to(dtype)
    key_pages = torch.randn(pages, case.groups, case.size, PAGE).to(dtype)
    value_pages = torch.randn(pages, case.groups, PAGE, case.size).to(dtype)
    length = case.prefix + case.chunk
    keys, values = torch.randn(2, case.sequences, case.heads, length, case.size).to(dtype)
    query, causal = dense(q, case), case.chunk > 1
    return (
        lambda: kernels.attention(q, k, v, chunks, key_pages, value_pages, case.scale),
        lambda: scaled_dot_product_attention(query, keys, values, is_causal=causal, scale=case.scale),
    )


def backward(kernels: Kernels, case: Case, dtype: torch.dtype) -> Pair:
    """Gradients of q, k and v alone: the forward of either side has been run before."""
    chunks, pages = chunks_of(case)
    rows = case.sequences * case.chunk
    q, dy = torch.randn(2, rows, case.heads, case.size).to(dtype)
    k, v = torch.randn(2, rows, case.groups, case.size).to(dtype)
    key_pages = torch.empty(pages, case.groups, case.size, PAGE, dtype=dtype)
    value_pages = torch.empty(pages, case.groups, PAGE, case.size, dtype=dtype)
    y, lse = kernels.attention(q, k, v, chunks, key_pages, value_pages, case.scale)
    inputs = query, keys, values = tuple(dense(x, case).requires_grad_() for x in (q, k, v))
    out, d_out = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=case.scale), dense(dy, case)
    return (
        lambda: kernels.attention_backward(q, k, v, y, dy, lse, chunks, case.scale),
        lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True),
    )


def measure(kernels: Kernels, case: Case, dtype: torch.dtype, direction: str) -> dict[str, object]:
    pair = (forward if direction == "forward" else backward)(kernels, case, dtype)
    median = interleaved({"vexact": pair[0], "torch": pair[1]}, seconds=SECONDS)
    return {
        **asdict(case),
        "direction": direction,
        "dtype": str(dtype).removeprefix("torch."),
        "vexact_ms": round(median["vexact"] * 1e3, 4),
        "torch_ms": round(median["torch"] * 1e3, 4),
        "ratio": round(median["torch"] / median["vexact"], 3),
    }


def main() -> None:
    torch.manual_seed(0)
    kernels, rows = load(), []
    for case in CASES:
        for direction in ("forward", "backward") if case.prefix == 0 else ("forward",):
            for dtype in DTYPES:
                row = measure(kernels, case, dtype, direction)
                rows.append(row)
                print(
                    f"{case.name:30} {direction:8} {row['dtype']:8} vexact {row['vexact_ms']:8} ms "
                    f"torch {row['torch_ms']:8} ms ratio {row['ratio']}",
                    flush=True,
                )
    RESULT.parent.mkdir(exist_ok=True)
    result = {"environment": environment(), "kernels": kernels.name, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
