"""noise and centre over SmolLM2's vocabulary, beside torch.randn and the ops that they stand next to; writes
results/noise.json.

A noisy row of logits costs one row of `noise` beside its part of the head's product; a centred gradient costs `centre`
where the plain one costs `logprob_backward`. `randn` and `head` are their medians over noise's, `plain` is
logprob_backward's median over centre's: above 1 the other one is slower.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from timing import environment, interleaved
from vexact_kernels import Kernels, Softmax, load

RESULT = Path(__file__).parent / "results" / "noise.json"
SECONDS = 2.0  # of one comparison
WIDTH, VOCABULARY = 576, 49_152  # SmolLM2-135M
ROWS = (1, 16, 64)


def noise(kernels: Kernels, rows: int) -> dict[str, Callable[[], object]]:
    """noise, torch's normal numbers, and the bfloat16 head."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, WIDTH, generator=generator).bfloat16() for n in (rows, VOCABULARY))
    head, key = kernels.pack(weight), torch.arange(rows)
    return {
        "noise": lambda: kernels.noise(key, VOCABULARY),
        "randn": lambda: torch.randn(rows, VOCABULARY, generator=generator),
        "head": lambda: kernels.matmul(x, head, logits=True),
    }


def centre(kernels: Kernels, rows: int) -> dict[str, Callable[[], object]]:
    """centre with a base, and the plain gradient."""
    generator = torch.Generator().manual_seed(1)
    ids, ones = torch.arange(rows), torch.ones(rows)
    logits = (4.0 * torch.randn(rows, VOCABULARY, generator=generator) for _ in range(3))
    p, q, b = (Softmax(z, *kernels.logprob(z, ids, ones, entropy=False)[2:4]) for z in logits)
    return {
        "centre": lambda: kernels.centre(p, q, b, ids, ones, ones, 0.0 * ones, 2.0 * ones, "clamp", torch.bfloat16),
        "plain": lambda: kernels.logprob_backward(p.logits, ids, ones, p.max, p.sum, None, ones, None, torch.bfloat16),
    }


def measured(calls: dict[str, Callable[[], object]], rows: int) -> dict[str, float | int]:
    """Microseconds a row of the first, and the others over it."""
    (first, own), *others = interleaved(calls, SECONDS).items()
    row: dict[str, float | int] = {"rows": rows, f"{first}_us_a_row": round(own / rows * 1e6, 1)}
    return row | {name: round(seconds / own, 2) for name, seconds in others}


def main() -> None:
    kernels = load("cpu")
    result: dict[str, object] = {"environment": environment() | {"kernels": kernels.name}}
    for make in (noise, centre):
        rows = [measured(make(kernels, n), n) for n in ROWS]
        result[make.__name__] = rows
        print(make.__name__, *rows, sep="\n  ", flush=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
