"""How fast the Triton kernels are beside cuBLAS, SDPA and a plain copy, and the engine in tokens a second.

Pieces of `gpu_check.py`. On a CPU they run at toy size: their figures mean nothing there, that they run does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_golden import SHAPES, tokens
from vexact.model.checkpoint import shapes
from vexact.model.gradients import Gradients
from vexact.model.parameters import stack
from vexact.model.policy import Policy, Scored
from vexact.model.tiny import tiny_config
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact_kernels import PAGE, Chunks, Kernels, Segments, Stream

Figures = dict[str, float]
ROUNDS = 15


def seconds_of(device: torch.device, *calls: Callable[[], object]) -> list[float]:
    """Median seconds of each call, taken in turns. On a GPU by its own events, behind a warm-up."""
    for call in calls:
        for _ in range(3 if device.type == "cuda" else 1):
            call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS if device.type == "cuda" else 1):
        for own, call in zip(times, calls, strict=True):
            own.append(_once(device, call))
    return [statistics.median(own) for own in times]


def _once(device: torch.device, call: Callable[[], object]) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def normal(kernels: Kernels, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(kernels.device).manual_seed(1)
    return torch.randn(shape, generator=generator, device=kernels.device).to(dtype)


def pieces(kernels: Kernels, toy: bool) -> dict[str, Callable[[], Figures]]:
    """What is measured, by name; each measures when it is called."""
    d, f, v, heads, groups, k = (64, 96, 300, 4, 2, 32) if toy else (2048, 6144, 151936, 16, 8, 128)
    rows = 5 if toy else 4096
    few, many = ((1, 3), (20,)) if toy else ((1, 16, 64), (1024, 4096))
    found: dict[str, Callable[[], Figures]] = {}
    for m in (*few, *many):
        for n, columns in ((2 * f, d), (d, f)):
            found[f"matmul {m} × {n} × {columns}"] = partial(product, kernels, m, n, columns)
    for m in many:
        found[f"matmul dw {m} × {d} × {f}"] = partial(weight_gradient, kernels, m, d, f)
    length = 70 if toy else 2048
    found[f"attention 2 × {length}"] = partial(attention, kernels, 2, length, heads, groups, k)
    found[f"rmsnorm {rows} × {d}"] = partial(rmsnorm, kernels, rows, d)
    found[f"swiglu {rows} × {f}"] = partial(swiglu, kernels, rows, f)
    found[f"logprob 64 × {v}"] = partial(logprob, kernels, 3 if toy else 64, v)
    found["engine"] = partial(engine, kernels, "tiny" if toy else "qwen3-1.7b", toy)
    return found


def product(kernels: Kernels, m: int, n: int, k: int) -> Figures:
    """Beside cuBLAS, and beside the time that reading the weight takes at the speed of a copy."""
    x, w = normal(kernels, m, k), normal(kernels, n, k)
    packed = kernels.pack(w)
    own, cublas = seconds_of(kernels.device, lambda: kernels.matmul(x, packed), lambda: x @ w.T)
    moved = 2.0 * (n * k + m * k + m * n)
    return {"ms": own * 1e3, "of cuBLAS": cublas / own, "of bandwidth": moved / own / bandwidth(kernels),
            "TFLOP/s": 2e-12 * m * n * k / own}  # fmt: skip


def weight_gradient(kernels: Kernels, m: int, n: int, k: int) -> Figures:
    dy, x = normal(kernels, m, n), normal(kernels, m, k)
    stream = Stream(torch.zeros(n, k, device=kernels.device), torch.zeros(n, k, device=kernels.device))
    whole = Segments(torch.tensor([m]), torch.ones(1, dtype=torch.uint8))
    own, cublas = seconds_of(kernels.device, lambda: kernels.matmul_dw(dy, x, whole, stream), lambda: dy.T @ x)
    return {"ms": own * 1e3, "of cuBLAS": cublas / own, "TFLOP/s": 2e-12 * m * n * k / own}


def attention(kernels: Kernels, sequences: int, length: int, heads: int, groups: int, size: int) -> Figures:
    """Forward and backward beside SDPA on the same whole sequences."""
    n, device = sequences * length, kernels.device
    q, k, v, dy = (normal(kernels, n, h, size) for h in (heads, groups, groups, heads))
    pages = -(-length // PAGE)
    chunks = Chunks(
        torch.arange(sequences + 1) * length, torch.zeros(sequences, dtype=torch.int64),
        torch.arange(sequences + 1) * pages, torch.arange(sequences * pages),
    )  # fmt: skip
    keys = torch.empty(sequences * pages, groups, size, PAGE, dtype=q.dtype, device=device)
    values = torch.empty(sequences * pages, groups, PAGE, size, dtype=q.dtype, device=device)
    y, lse = kernels.attention(q, k, v, chunks, keys, values, size**-0.5)

    def shaped(x: Tensor) -> Tensor:
        return x.view(sequences, length, -1, size).transpose(1, 2).detach().requires_grad_()

    inputs = shaped(q), shaped(k), shaped(v)
    wanted = dy.view(sequences, length, -1, size).transpose(1, 2)

    def theirs() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

    result = theirs()
    own, sdpa, own_back, sdpa_back = seconds_of(
        device,
        lambda: kernels.attention(q, k, v, chunks, keys, values, size**-0.5),
        theirs,
        lambda: kernels.attention_backward(q, k, v, y, dy, lse, chunks, size**-0.5),
        lambda: torch.autograd.grad(result, inputs, wanted, retain_graph=True),
    )
    return {
        "ms": own * 1e3,
        "of SDPA": sdpa / own,
        "backward ms": own_back * 1e3,
        "backward of SDPA": sdpa_back / own_back,
    }


def rmsnorm(kernels: Kernels, rows: int, width: int) -> Figures:
    x, w = normal(kernels, rows, width), normal(kernels, width)
    (own,) = seconds_of(kernels.device, lambda: kernels.rmsnorm(x, w, 1e-6))
    return _bandwidth(kernels, own, 2 * x.numel() * x.element_size())


def swiglu(kernels: Kernels, rows: int, width: int) -> Figures:
    x = normal(kernels, rows, 2 * width)
    (own,) = seconds_of(kernels.device, lambda: kernels.swiglu(x))
    return _bandwidth(kernels, own, 3 * rows * width * x.element_size())


def logprob(kernels: Kernels, rows: int, vocabulary: int) -> Figures:
    """The logits have to be read twice: for their maximum, and for the sum."""
    logits = normal(kernels, rows, vocabulary, dtype=torch.float32)
    ids, ones = torch.arange(rows, device=kernels.device), torch.ones(rows, device=kernels.device)
    (own,) = seconds_of(kernels.device, lambda: kernels.logprob(logits, ids, ones))
    return _bandwidth(kernels, own, 2 * logits.numel() * 4)


def _bandwidth(kernels: Kernels, seconds: float, moved: float) -> Figures:
    return {"ms": seconds * 1e3, "of copy bandwidth": moved / seconds / bandwidth(kernels)}


def bandwidth(kernels: Kernels) -> float:
    """Bytes a second that a plain copy reads and writes."""
    source = normal(kernels, 1 << (28 if kernels.device.type == "cuda" else 10))
    target = torch.empty_like(source)
    (copy,) = seconds_of(kernels.device, lambda: target.copy_(source))
    return 2.0 * source.numel() * source.element_size() / copy


def engine(kernels: Kernels, shape: str, toy: bool) -> Figures:
    """Decoding at batch 64, prefilling and forward + backward, in tokens a second."""
    policy = random_policy(kernels, shape)
    batch, new, length = (2, 3, 20) if toy else (64, 64, 1024)
    requests = [Request(i, tokens(policy, 2, i), max_tokens=new) for i in range(batch)]
    sequences = [Scored(tokens(policy, length, i), 1) for i in range(2 if toy else 8)]
    gradients = Gradients(policy.config, kernels)

    def train() -> None:
        gradients.clear()
        for _, result in policy.gradient_passes(sequences, gradients):
            result.logprob.sum().backward()

    def timed(work: Callable[[], Any]) -> float:
        work()
        begun = time.perf_counter()
        work()
        if kernels.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    scored = sum(each.rows for each in sequences)
    return {
        "decode tok/s": batch * new / timed(lambda: Sampler(policy, tokens_per_step=4096).run(requests)),
        "prefill tok/s": scored / timed(lambda: policy.logprobs(sequences)),
        "training tok/s": scored / timed(train),
    }


def random_policy(kernels: Kernels, shape: str) -> Policy:
    """Weights from torch's generator on the device: quick to make, and for timing only."""
    family, changes = SHAPES[shape]
    config = tiny_config(family, **changes)
    made: dict[str, Tensor] = {}
    for name, size in shapes(config).items():
        scale = 1.0 if len(size) == 1 else size[1] ** -0.5
        made[name] = normal(kernels, *size) * scale
    return Policy.build(config, lambda name: stack(config, made, name), kernels, torch.bfloat16)
