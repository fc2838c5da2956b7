"""A call of every op in every form in which the engine makes it: what `gpu_compile.py` has to see.

Only what changes a kernel matters here: storage types, head sizes, whether rows are few or many, whether 16 divides a
length. So widths are those of small models, and weights stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vexact_kernels.contract import DTYPES, OUTSIDE, PAGE, Chunks, Kernels, Segments, Softmax, Stream, grad_dtype

FEW, MANY = 16, 256  # rows of decoding, rows of a prefill or of training

# Head sizes. Each costs seconds of compiling: all of them in the type that is trained in, the others where it counts.
HEADS = {torch.float32: (64, 128), torch.bfloat16: (64, 80, 128, 256), torch.float16: (128,)}
QUERY_HEADS, KEY_HEADS = 4, 2


@dataclass(frozen=True)
class Use:
    """What a launch was made for. In the tensorcore profile all sizes of one op, dtype and shape are to share their
    matrix instructions.
    """

    op: str
    dtype: str
    shape: str
    size: str


Call = Callable[[], object]
Visits = Iterator[tuple[str, str, Call]]  # shape, size, call


def segments(tokens: int) -> Segments:
    """Two lanes; the first one ends."""
    ends = torch.tensor([tokens // 2, tokens])
    return Segments(ends, torch.tensor([1, 0], dtype=torch.uint8))


def streams(*shape: int, touched: bool = False) -> Iterator[Stream]:
    """A stream in the middle of a step and, but for an embedding, a fresh one in each way."""
    flags = torch.zeros(shape[0], dtype=torch.uint8) if touched else None
    for lane_is_zero, total_is_zero in ((False, False),) if touched else ((False, False), (True, True)):
        yield Stream(torch.zeros(shape), torch.zeros(shape), False, lane_is_zero, total_is_zero, flags)


def matmul(kernels: Kernels, dtype: torch.dtype) -> Visits:
    for k, n, bias, logits in (
        (576, 960, False, False), (896, 1152, True, False), (1536, 960, True, False), (2048, 960, False, True),
    ):  # fmt: skip
        w = kernels.pack(torch.zeros(n, k, dtype=dtype))
        b = torch.zeros(n, dtype=dtype) if bias else None
        for m in (FEW, MANY):
            x = torch.zeros(m, k, dtype=dtype)
            yield f"{k}x{n}", str(m), partial(kernels.matmul, x, w, b, logits=logits)


def matmul_dx(kernels: Kernels, dtype: torch.dtype) -> Visits:
    w = kernels.pack(torch.zeros(960, 576, dtype=dtype))
    for m in (FEW, MANY):
        yield "576x960", str(m), partial(kernels.matmul_dx, torch.zeros(m, 960, dtype=grad_dtype(dtype)), w)


def matmul_dw(kernels: Kernels, dtype: torch.dtype) -> Visits:
    dy, x = torch.zeros(MANY, 960, dtype=grad_dtype(dtype)), torch.zeros(MANY, 576, dtype=dtype)
    for stream in streams(960, 576):
        yield "576x960", str(MANY), partial(kernels.matmul_dw, dy, x, segments(MANY), stream)


def matmul_db(kernels: Kernels, dtype: torch.dtype) -> Visits:
    dy = torch.zeros(MANY, 960, dtype=grad_dtype(dtype))
    for stream in streams(960):
        yield "960", str(MANY), partial(kernels.matmul_db, dy, segments(MANY), stream)


def embed(kernels: Kernels, dtype: torch.dtype) -> Visits:
    w = kernels.pack(torch.zeros(2048, 576, dtype=dtype))
    for n in (FEW, MANY):
        yield "2048x576", str(n), partial(kernels.embed, torch.arange(n), w)


def embed_dw(kernels: Kernels, dtype: torch.dtype) -> Visits:
    ids, dy = torch.arange(MANY) % 7, torch.zeros(MANY, 576, dtype=grad_dtype(dtype))
    for stream in streams(2048, 576, touched=True):
        yield "2048x576", str(MANY), partial(kernels.embed_dw, ids, dy, segments(MANY), stream)


def norms(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Shape, x, w: hidden widths, one above a block of the tree, and the heads that Qwen3 norms."""
    for width in (576, 2048):
        yield str(width), torch.zeros(MANY, width, dtype=dtype), torch.zeros(width, dtype=dtype)
    heads = torch.zeros(MANY, QUERY_HEADS + 2 * KEY_HEADS, 128, dtype=dtype)[:, :QUERY_HEADS]
    yield "heads 128", heads, torch.zeros(128, dtype=dtype)


def rmsnorm(kernels: Kernels, dtype: torch.dtype) -> Visits:
    for shape, x, w in norms(dtype):
        yield shape, str(MANY), partial(kernels.rmsnorm, x, w, 1e-6)


def rmsnorm_dx(kernels: Kernels, dtype: torch.dtype) -> Visits:
    for shape, x, w in norms(dtype):
        rstd, dy = torch.zeros(x.shape[:-1]), torch.zeros(x.shape, dtype=grad_dtype(dtype))
        for residual in (None, torch.zeros_like(dy)):
            yield shape, str(MANY), partial(kernels.rmsnorm_dx, x, w, rstd, dy, residual)


def rmsnorm_dw(kernels: Kernels, dtype: torch.dtype) -> Visits:
    for shape, x, w in norms(dtype):
        rstd, dy = torch.zeros(x.shape[:-1]), torch.zeros(x.shape, dtype=grad_dtype(dtype))
        for stream in streams(len(w)):
            yield shape, str(MANY), partial(kernels.rmsnorm_dw, x, rstd, dy, segments(MANY), stream)


def rope(kernels: Kernels, dtype: torch.dtype) -> Visits:
    for size in HEADS[dtype]:
        table = torch.zeros(MANY, size // 2)
        for kind, inverse in ((dtype, False), (grad_dtype(dtype), True)):
            x = torch.zeros(MANY, QUERY_HEADS + 2 * KEY_HEADS, size, dtype=kind)[:, :QUERY_HEADS]
            yield f"head {size}", str(MANY), partial(kernels.rope, x, torch.arange(MANY), table, table, inverse=inverse)


def chunks(lengths: Sequence[int], prefixes: Sequence[int]) -> Chunks:
    """A ragged batch whose sequences own consecutive pages."""
    pages = [-(-(length + prefix) // PAGE) for length, prefix in zip(lengths, prefixes, strict=True)]
    start, first = ([0, *torch.tensor(counts).cumsum(0).tolist()] for counts in (lengths, pages))
    return Chunks(torch.tensor(start), torch.tensor(prefixes), torch.tensor(first), torch.arange(first[-1]))


def projections(n: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k and v as they come: parts of the rows of one product."""
    rows = torch.zeros(n, QUERY_HEADS + 2 * KEY_HEADS, size, dtype=dtype)
    return rows.split((QUERY_HEADS, KEY_HEADS, KEY_HEADS), dim=1)


def attention(kernels: Kernels, dtype: torch.dtype) -> Visits:
    for size in HEADS[dtype]:
        for name, lengths, prefixes in (
            ("decode", [1] * FEW, [100] * FEW),
            ("prefill", [100, 28, 128], [0, 70, 0]),
        ):
            batch, n = chunks(lengths, prefixes), sum(lengths)
            q, k, v = projections(n, size, dtype)
            pages = len(batch.table)
            key = torch.zeros(pages, KEY_HEADS, size, PAGE, dtype=dtype)
            value = torch.zeros(pages, KEY_HEADS, PAGE, size, dtype=dtype)
            yield f"head {size}", name, partial(kernels.attention, q, k, v, batch, key, value, size**-0.5)


def attention_backward(kernels: Kernels, dtype: torch.dtype) -> Visits:
    for size in HEADS[dtype]:
        for name, lengths in (("short", [40, 24]), ("long", [256])):
            batch, n = chunks(lengths, [0] * len(lengths)), sum(lengths)
            q, k, v = projections(n, size, dtype)
            y, dy = (torch.zeros(n, QUERY_HEADS, size, dtype=kind) for kind in (dtype, grad_dtype(dtype)))
            lse = torch.zeros(n, QUERY_HEADS)
            yield f"head {size}", name, partial(kernels.attention_backward, q, k, v, y, dy, lse, batch, size**-0.5)


def swiglu(kernels: Kernels, dtype: torch.dtype) -> Visits:
    yield "1536", str(MANY), partial(kernels.swiglu, torch.zeros(MANY, 3072, dtype=dtype))


def swiglu_backward(kernels: Kernels, dtype: torch.dtype) -> Visits:
    gate_up, dy = torch.zeros(MANY, 3072, dtype=dtype), torch.zeros(MANY, 1536, dtype=grad_dtype(dtype))
    yield "1536", str(MANY), partial(kernels.swiglu_backward, gate_up, dy)


def add(kernels: Kernels, dtype: torch.dtype) -> Visits:
    x = torch.zeros(MANY, 576, dtype=dtype)
    yield "576", str(MANY), partial(kernels.add, x, x.clone())


def cast(kernels: Kernels, dtype: torch.dtype) -> Visits:
    for other in DTYPES:
        yield f"to {str(other)[6:]}", str(MANY), partial(kernels.cast, torch.zeros(MANY, 576, dtype=dtype), other)


VOCABULARIES = (49152, 151936)  # SmolLM2's, Qwen3's


def logprob(kernels: Kernels, dtype: torch.dtype) -> Visits:
    for v in VOCABULARIES:
        logits, ids, heat = torch.zeros(FEW, v), torch.zeros(FEW, dtype=torch.int64), torch.ones(FEW)
        for entropy in (True, False):
            yield str(v), str(FEW), partial(kernels.logprob, logits, ids, heat, entropy=entropy)


def logprob_backward(kernels: Kernels, dtype: torch.dtype) -> Visits:
    for v in VOCABULARIES:
        logits, ids, one = torch.zeros(FEW, v), torch.zeros(FEW, dtype=torch.int64), torch.ones(FEW)
        for entropy in (one, None):
            yield (
                str(v),
                str(FEW),
                partial(kernels.logprob_backward, logits, ids, one, one, one, entropy, one, entropy, dtype),
            )


def centre(kernels: Kernels, dtype: torch.dtype) -> Visits:
    for v in VOCABULARIES:
        ids, one = torch.zeros(FEW, dtype=torch.int64), torch.ones(FEW)
        rows = Softmax(torch.zeros(FEW, v), one, one)
        for outside in OUTSIDE:
            given = (rows, rows, rows, ids, one, one, one, one, outside, dtype)
            yield str(v), str(FEW), partial(kernels.centre, *given)


def noise(kernels: Kernels, dtype: torch.dtype) -> Visits:
    for v in VOCABULARIES:
        yield str(v), str(FEW), partial(kernels.noise, torch.zeros(FEW, dtype=torch.int64), v)


def draw(kernels: Kernels, dtype: torch.dtype) -> Visits:
    for v in VOCABULARIES:
        address = torch.zeros(FEW, dtype=torch.int64)
        yield str(v), str(FEW), partial(kernels.draw, torch.zeros(FEW, v), torch.ones(FEW), *[address] * 4)


def exp(kernels: Kernels, dtype: torch.dtype) -> Visits:
    yield "any", str(MANY), partial(kernels.exp, torch.zeros(MANY))


def log(kernels: Kernels, dtype: torch.dtype) -> Visits:
    yield "any", str(MANY), partial(kernels.log, torch.ones(MANY))


SIZES = (5, 1024, 96 * 1024, 4 * 1024 * 1024)  # elements: a vector, a block of the tree, a matrix, a larger one


def sums(op: str, kernels: Kernels, dtype: torch.dtype) -> Visits:
    for n in SIZES:
        yield "any", str(n), partial(getattr(kernels, op), torch.zeros(n))


def adamw(kernels: Kernels, dtype: torch.dtype) -> Visits:
    scalars: dict[str, Any] = {
        "clip": 1.0, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decay": 1.0, "step": 1e-5, "rsqrt_correction2": 2.0,
    }  # fmt: skip
    for shape in ((960, 576), (577,)):
        yield "any", str(shape[0]), partial(kernels.adamw, *(torch.zeros(shape) for _ in range(4)), **scalars)


STORED: dict[str, Callable[[Kernels, torch.dtype], Visits]] = {
    "matmul": matmul,
    "matmul_dx": matmul_dx,
    "matmul_dw": matmul_dw,
    "matmul_db": matmul_db,
    "embed": embed,
    "embed_dw": embed_dw,
    "rmsnorm": rmsnorm,
    "rmsnorm_dx": rmsnorm_dx,
    "rmsnorm_dw": rmsnorm_dw,
    "rope": rope,
    "attention": attention,
    "attention_backward": attention_backward,
    "swiglu": swiglu,
    "swiglu_backward": swiglu_backward,
    "add": add,
    "cast": cast,
    "logprob_backward": logprob_backward,
    "centre": centre,
}
FLOAT32: dict[str, Callable[[Kernels, torch.dtype], Visits]] = {
    "logprob": logprob,
    "draw": draw,
    "noise": noise,
    "exp": exp,
    "log": log,
    "sum": partial(sums, "sum"),
    "sum_squares": partial(sums, "sum_squares"),
    "adamw": adamw,
}
NOTHING_STARTED = ("pack", "unpack")  # a packed weight is the weight
PRODUCTS = ("matmul", "matmul_dx", "attention", "attention_backward")  # these alone differ between the profiles


def tour(kernels: Kernels, ops: Sequence[str], about: Callable[[Use], None]) -> None:
    """Call those ops on CPU tensors, saying before each call what it is."""
    for visits, dtypes in ((STORED, DTYPES), (FLOAT32, DTYPES[:1])):
        for op in (op for op in visits if op in ops):
            for dtype in dtypes:
                for shape, size, call in visits[op](kernels, dtype):
                    about(Use(op, str(dtype)[6:], shape, size))
                    call()
