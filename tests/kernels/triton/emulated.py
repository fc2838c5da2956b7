"""Run the compiled kernels, instruction by instruction, beside the CPU's. Triton must not interpret in this process.

    python tests/kernels/triton/emulated.py FILE TARGET …

The host code is the engine's own; each launch is compiled and its PTX run by `emulator.py` on the tensors' memory.
FILE gets how many values differ, by name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # as pytest has it
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

import numpy as np
import torch
from torch import Tensor

from helpers import differing, gradient, normal, segments, stream, wild
from kernels.triton.arithmetic import Fma
from kernels.triton.arrays import Memory, Words, fused
from kernels.triton.emulator import Machine
from kernels.triton.mutants import TILE, other_product_kernel
from kernels.triton.ptx import Program
from vexact_kernels.contract import DTYPES, OUTSIDE, Chunks, Kernels, Softmax, Stream
from vexact_kernels.cpu import Cpu
from vexact_kernels.triton import Triton
from vexact_kernels.triton.ahead import CAPABILITY, Collector, Variant, compiled


class Emulated:
    """Takes the place of `launch.run`."""

    def __init__(self, target: str, fma: Fma = fused, **options: Any) -> None:
        self.target, self.fma, self.options = target, fma, options
        self.machines: dict[Variant, Machine] = {}

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        collector = Collector(self.target)
        collector(kernel, grid, arguments, options)
        (variant,) = collector.found
        if variant not in self.machines:
            built = compiled(variant, self.target, **self.options)
            self.machines[variant] = Machine(Program(built.assembly), built.shared, self.fma)
        values = dict(zip((name for name, _ in variant.types), arguments, strict=False))
        kinds = [(kind, values.get(name)) for name, kind in variant.types if kind != "constexpr"]
        ranges = [
            (x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for _, x in kinds if isinstance(x, Tensor)
        ]
        self.machines[variant].run(grid, [parameter(kind, x) for kind, x in kinds], Memory(ranges))


def parameter(kind: str, value: Any) -> int:
    """An argument as the kernel's parameter holds it."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return int(np.float32(value).view(np.uint32)) if kind == "fp32" else int(value)


def product(k: Kernels, dtype: torch.dtype, m: int) -> Iterator[Tensor]:
    x, w, b = wild(m, 37, dtype=dtype, seed=1), wild(66, 37, dtype=dtype, seed=2), wild(66, dtype=dtype, seed=3)
    dy = gradient(m, 66, dtype=dtype, seed=4)
    yield k.matmul(x, k.pack(w), b)
    yield k.matmul_dx(dy, k.pack(w))
    for one in (stream(66, 37), Stream(normal(66, 37, seed=5), normal(66, 37, seed=6))):
        k.matmul_dw(dy, x, segments([m // 2, m], [1, 0]), one)
        yield from (one.lane, one.total)


def chunks(lengths: list[int]) -> Chunks:
    start = torch.tensor([0, *lengths]).cumsum(0)
    pages = torch.tensor([0, *(-(-n // 64) for n in lengths)]).cumsum(0)
    return Chunks(start, torch.zeros(len(lengths), dtype=torch.int64), pages, torch.arange(int(pages[-1])))


def attended(k: Kernels, dtype: torch.dtype, size: int) -> Iterator[Tensor]:
    batch, n = chunks([70, 3]), 73
    q, key, v = (normal(n, heads, size, dtype=dtype, seed=i) for i, heads in enumerate((2, 1, 1)))
    pages = torch.zeros(3, 1, size, 64, dtype=dtype), torch.zeros(3, 1, 64, size, dtype=dtype)
    y, lse = k.attention(q, key, v, batch, *pages, size**-0.5)
    yield from (y, lse)
    dy = gradient(n, 2, size, dtype=dtype, seed=7)
    yield from k.attention_backward(q, key, v, y, dy, lse, batch, size**-0.5)


def rowwise(k: Kernels, dtype: torch.dtype) -> Iterator[Tensor]:
    x, w, dy = wild(5, 100, dtype=dtype, seed=1), wild(100, dtype=dtype, seed=2), gradient(5, 100, dtype=dtype, seed=3)
    y, rstd = k.rmsnorm(x, w, 1e-5)
    yield from (y, rstd)
    yield k.rmsnorm_dx(x, w, rstd, dy, None)
    yield k.swiglu(wild(5, 100, dtype=dtype, seed=4))
    yield k.swiglu_backward(wild(5, 200, dtype=dtype, seed=4), dy)
    table = normal(9, 16, seed=5)
    yield k.rope(wild(5, 2, 32, dtype=dtype, seed=6), torch.arange(5), table, table.flip(0))
    yield k.add(x, x.flip(0))
    norm = stream(100)
    k.rmsnorm_dw(x, rstd, dy, segments([2, 5]), norm)
    yield norm.total


def whole(k: Kernels) -> Iterator[Tensor]:
    logits, ids, heat = normal(3, 1500, scale=4.0), torch.tensor([3, 0, 1499]), torch.tensor([1.0, 0.7, 0.0])
    logprob, entropy, high, total, _ = k.logprob(logits, ids, heat)
    assert entropy is not None
    yield from (logprob, entropy, high, total)
    ones = torch.ones(3)
    yield k.logprob_backward(logits, ids, heat, high, total, entropy, ones, ones, torch.bfloat16)
    p, q, b = (Softmax(x, *k.logprob(x, ids, heat)[2:4]) for x in (logits, logits.flip(0), logits + normal(3, 1500)))
    for outside in OUTSIDE:
        yield from k.centre(p, q, b, ids, heat, ones, 0.5 * ones, 2.0 * ones, outside, torch.bfloat16)
    yield k.noise(torch.arange(3) - 1, 1500)
    address = [torch.arange(3) + i for i in range(4)]
    yield k.draw(logits, heat, *address)
    yield k.sum(wild(3000)).reshape(1)
    yield k.sum_squares(wild(3000)).reshape(1)
    yield k.exp(wild(300, high=8))
    yield k.log(wild(300).abs())
    state = [wild(77, seed=i).abs() for i in range(4)]
    k.adamw(*state, clip=0.5, beta1=0.9, beta2=0.99, eps=1e-8, decay=0.999, step=1e-3, rsqrt_correction2=2.0)
    yield from state


Case = Callable[[Kernels], Iterator[Tensor]]


def cases(full: bool) -> Iterator[tuple[str, Case]]:
    for dtype in DTYPES if full else DTYPES[:2]:
        name = str(dtype)[6:]
        for m in (3, 70):
            yield f"products {name} {m}", partial(product, dtype=dtype, m=m)
        yield f"rows {name}", partial(rowwise, dtype=dtype)
        if full:
            yield f"attention {name}", partial(attended, dtype=dtype, size=32)
    if full:
        yield "whole rows", whole


def follow(a: Words, b: Words, c: Words) -> Words:
    """In place of a fused multiply-add: factors are numbers k + 1, and a sum is the k + 1 that it has reached.

    Anything but the next k makes it NaN, which it then stays. A zero factor is a pad and leaves the sum as it is.
    """
    return np.where((a == 0) | (b == 0), c, np.where((a == b) & (c == a - 1), a, np.float32(np.nan)))


def order(target: str, dtype: torch.dtype) -> dict[str, int]:
    """Of y, dx and dw: how many outputs were not one chain over every k, ascending."""
    k = 100
    number = torch.arange(1, k + 1, dtype=torch.float32)
    wrong = {}
    for m in (3, 70):
        kernels = Triton(
            "portable", torch.device("cpu"), launch=Emulated(target, follow), capability=CAPABILITY[target]
        )
        x, w = number.expand(m, k).to(dtype), number.expand(66, k).to(dtype)
        y = kernels.matmul(x, kernels.pack(w), logits=True)
        dx = kernels.matmul_dx(number.expand(m, k).to(dtype), kernels.pack(number.expand(66, k).T.to(dtype)))
        wrong[f"y {m}"], wrong[f"dx {m}"] = (int((out.float() != k).sum()) for out in (y, dx))
    one, both = stream(66, m), number[:, None].to(dtype)
    kernels.matmul_dw(both.expand(k, 66), both.expand(k, m), segments([k]), one)
    wrong["dw"] = int((one.total != k).sum())
    return wrong


def mutant(how: str) -> int:
    """The same of a mutant."""
    x, out = torch.arange(1, 101, dtype=torch.float32).expand(64, 100).contiguous(), torch.zeros(64, 64)
    options = {"HOW": how, **TILE, "num_warps": 4, "num_stages": 2}
    Emulated("sm_90", follow)(other_product_kernel, (1, 1), (x, 100, x, 100, out, 64, 64, 64, 100), options)
    return int((out != 100).sum())


def main() -> None:
    file, targets = Path(sys.argv[1]), sys.argv[2:]
    found: dict[str, Any] = {}
    cpu = Cpu("baseline")
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    for target in targets:
        kernels = Triton("portable", torch.device("cpu"), launch=Emulated(target), capability=CAPABILITY[target])
        for name, case in cases(full=target == "sm_90"):
            pairs = zip(case(kernels), case(cpu), strict=True)
            found[f"{target} {name}"] = [differing(actual, expected) for actual, expected in pairs]
            print(target, name, found[f"{target} {name}"], flush=True)
        for dtype in (torch.float32, torch.bfloat16):
            found[f"{target} order {str(dtype)[6:]}"] = [*order(target, dtype).values()]
    for how in ("ascending", "descending", "two sums"):
        found[f"mutant {how}"] = [mutant(how)]
    fused_here = Triton(
        "portable", torch.device("cpu"), launch=Emulated("sm_90", enable_fp_fusion=True), capability=(9, 0)
    )
    table = normal(9, 16, seed=5)
    pair = [k.rope(wild(5, 2, 32, seed=6), torch.arange(5), table, table.flip(0)) for k in (fused_here, cpu)]
    found["mutant fused rotation"] = [differing(*pair)]
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
