"""The arithmetic digest: what a rollout was computed with, as far as bits can tell.

It covers the contract's version and constants, the dtype, the profile, and the bits of a fixed probe through every op.
In the portable profile all machines, instruction sets and devices that keep the contract agree on it; the tensorcore
profile names its type of GPU. A comment edit does not change it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from vexact_kernels import CONTRACT_VERSION, LANES, PAGE, Chunks, Kernels, Segments, Softmax, Stream, grad_dtype

_ROWS, _WIDTH, _OUT, _HEADS, _KV_HEADS, _HEAD = 5, 33, 35, 4, 2, 16


@lru_cache
def arithmetic_digest(kernels: Kernels, dtype: torch.dtype) -> str:
    """Sixteen hexadecimal digits, computed once for each implementation and dtype."""
    digest = hashlib.sha256(f"{CONTRACT_VERSION} {PAGE} {LANES} {kernels.profile} {dtype}".encode())
    for tensor in _probe(kernels, dtype):
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _numbers(k: Kernels, *shape: int, salt: int) -> Tensor:
    """float32 in (-2, 2) from integer arithmetic alone on the host, hence the same everywhere."""
    count = 1
    for size in shape:
        count *= size
    n = torch.arange(count, dtype=torch.int64) + 7919 * salt
    n = (n * 2654435761 + 12345) % 4294967291
    n = (n * 40503 + (n >> 15)) % 65521
    return ((n - 32760).to(torch.float32) / 16384).reshape(shape).to(k.device)


def _probe(k: Kernels, dtype: torch.dtype) -> Iterator[Tensor]:
    """The results of every op of `Kernels`; whatever an op may branch on is met once."""
    yield from _matmul(k, dtype)
    yield from _embed(k, dtype)
    yield from _rmsnorm(k, dtype)
    yield from _rope(k, dtype)
    yield from _attention(k, dtype)
    yield from _swiglu(k, dtype)
    yield from _logprob(k, dtype)
    yield from _elementwise(k, dtype)
    yield from _adamw(k)
    yield from _centre(k, dtype)
    yield k.noise(torch.arange(_ROWS, device=k.device) - 2, 1100)


def _lanes() -> Segments:
    """Of five tokens: one lane of two, and a second one that stays open."""
    return Segments(torch.tensor([2, _ROWS]), torch.tensor([1, 0], dtype=torch.uint8))


def _stream(k: Kernels, *shape: int, touched: Tensor | None = None) -> Stream:
    lane, total = torch.zeros(2, *shape, dtype=torch.float32, device=k.device)
    return Stream(lane, total, touched=touched)


def _matmul(k: Kernels, dtype: torch.dtype) -> Iterator[Tensor]:
    x = k.cast(_numbers(k, _ROWS, _WIDTH, salt=1), dtype)
    w = k.pack(k.cast(_numbers(k, _OUT, _WIDTH, salt=2), dtype))
    bias = k.cast(_numbers(k, _OUT, salt=3), dtype)
    dy = k.cast(_numbers(k, _ROWS, _OUT, salt=4), grad_dtype(dtype))
    weight, vector = _stream(k, _OUT, _WIDTH), _stream(k, _OUT)
    k.matmul_dw(dy, x, _lanes(), weight)
    k.matmul_db(dy, _lanes(), vector)
    yield from (k.unpack(w), k.matmul(x, w), k.matmul(x, w, bias), k.matmul(x, w, logits=True), k.matmul_dx(dy, w))
    yield from (weight.lane, weight.total, vector.lane, vector.total)


def _embed(k: Kernels, dtype: torch.dtype) -> Iterator[Tensor]:
    ids = torch.tensor([3, 0, 3, 32, 3]).to(k.device)
    w = k.pack(k.cast(_numbers(k, 33, _WIDTH, salt=5), dtype))
    dy = k.cast(_numbers(k, _ROWS, _WIDTH, salt=6), grad_dtype(dtype))
    stream = _stream(k, 33, _WIDTH, touched=torch.zeros(33, dtype=torch.uint8, device=k.device))
    k.embed_dw(ids, dy, _lanes(), stream)
    yield from (k.embed(ids, w), stream.lane, stream.total)


def _rmsnorm(k: Kernels, dtype: torch.dtype) -> Iterator[Tensor]:
    for shape in ((_ROWS, 2, _WIDTH), (_ROWS, 1100)):  # heads of a token; a row of more than one block
        x, w = k.cast(_numbers(k, *shape, salt=7), dtype), k.cast(_numbers(k, shape[-1], salt=8), dtype)
        dy, residual = (k.cast(_numbers(k, *shape, salt=salt), grad_dtype(dtype)) for salt in (9, 10))
        y, rstd = k.rmsnorm(x, w, 1e-5)
        stream = _stream(k, shape[-1])
        k.rmsnorm_dw(x, rstd, dy, _lanes(), stream)
        yield from (y, rstd, k.rmsnorm_dx(x, w, rstd, dy, None), k.rmsnorm_dx(x, w, rstd, dy, residual))
        yield from (stream.lane, stream.total)


def _rope(k: Kernels, dtype: torch.dtype) -> Iterator[Tensor]:
    x = k.cast(_numbers(k, _ROWS, _HEADS, _HEAD, salt=11), dtype)
    cos, sin = (_numbers(k, _ROWS, _HEAD // 2, salt=salt) for salt in (12, 13))
    positions = torch.arange(_ROWS, device=k.device).flip(0)
    yield k.rope(x, positions, cos, sin)
    yield k.rope(x, positions, cos, sin, inverse=True)


def _attention(k: Kernels, dtype: torch.dtype) -> Iterator[Tensor]:
    """One sequence whose second page raises the maximum of the first, so that what was summed is scaled."""
    n = PAGE + _ROWS
    q = k.cast(_numbers(k, n, _HEADS, _HEAD, salt=14), dtype)
    keys, value = _numbers(k, n, _KV_HEADS, _HEAD, salt=15), k.cast(_numbers(k, n, _KV_HEADS, _HEAD, salt=16), dtype)
    keys[PAGE:] *= 4.0
    key = k.cast(keys, dtype)
    dy = k.cast(_numbers(k, n, _HEADS, _HEAD, salt=17), grad_dtype(dtype))
    chunks = Chunks(torch.tensor([0, n]), torch.tensor([0]), torch.tensor([0, 2]), torch.tensor([1, 0]))
    key_pages = torch.zeros(2, _KV_HEADS, _HEAD, PAGE, dtype=dtype, device=k.device)
    value_pages = torch.zeros(2, _KV_HEADS, PAGE, _HEAD, dtype=dtype, device=k.device)
    y, lse = k.attention(q, key, value, chunks, key_pages, value_pages, 0.25)
    yield from (y, lse, key_pages, value_pages)
    yield from k.attention_backward(q, key, value, y, dy, lse, chunks, 0.25)


def _swiglu(k: Kernels, dtype: torch.dtype) -> Iterator[Tensor]:
    x = k.cast(_numbers(k, _ROWS, 2 * _OUT, salt=18), dtype)
    yield from (k.swiglu(x), k.swiglu_backward(x, k.cast(_numbers(k, _ROWS, _OUT, salt=19), grad_dtype(dtype))))


def _logprob(k: Kernels, dtype: torch.dtype) -> Iterator[Tensor]:
    logits = _numbers(k, _ROWS, 1500, salt=20)
    ids = torch.arange(_ROWS, device=k.device) * 7
    temperature = torch.tensor([1.0, 0.5, 0.7, 0.0, 2.0], dtype=torch.float32).to(k.device)
    logprob, entropy, max_, sum_, finite = k.logprob(logits, ids, temperature)
    assert entropy is not None
    yield from (logprob, entropy, max_, sum_, finite)
    given = (logits, ids, temperature, max_, sum_, entropy, _numbers(k, _ROWS, salt=21))
    yield k.logprob_backward(*given, None, dtype)
    yield k.logprob_backward(*given, _numbers(k, _ROWS, salt=22), dtype)
    yield k.draw(logits, temperature, ids, ids, ids, ids)


def _centre(k: Kernels, dtype: torch.dtype) -> Iterator[Tensor]:
    """With both ways of treating a ratio that is out of its bounds, and without a base."""
    ids = torch.arange(_ROWS, device=k.device) * 7
    temperature = torch.tensor([1.0, 0.5, 0.7, 0.0, 2.0], dtype=torch.float32).to(k.device)
    rows = (_numbers(k, _ROWS, 1500, salt=salt) for salt in (26, 27, 28))
    policy, sampler, base = (Softmax(x, *k.logprob(x, ids, temperature, entropy=False)[2:4]) for x in rows)
    g, low = _numbers(k, _ROWS, salt=29), 0.25 * torch.ones(_ROWS, dtype=torch.float32, device=k.device)
    given = (policy, sampler, base, ids, temperature, g, low, 8.0 * low)
    yield from k.centre(*given, "clamp", dtype)
    yield from k.centre(*given, "zero", dtype)
    yield from k.centre(policy, sampler, None, ids, temperature, g, None, None, "clamp", dtype)


def _elementwise(k: Kernels, dtype: torch.dtype) -> Iterator[Tensor]:
    x = _numbers(k, 1100, salt=23)
    stored = k.cast(x, dtype)
    yield from (stored, k.cast(stored, torch.float32), k.add(stored, stored.flip(0)))
    yield from (k.exp(8.0 * x), k.log(x.abs()), k.sum(x), k.sum_squares(x))


def _adamw(k: Kernels) -> Iterator[Tensor]:
    """Two steps: the moments are not zero any more in the second."""
    master, grad, first, second = (
        _numbers(k, _WIDTH, salt=24),
        _numbers(k, _WIDTH, salt=25),
        *torch.zeros(2, _WIDTH, dtype=torch.float32, device=k.device),
    )
    for step in (0.01, 0.005):
        k.adamw(
            master, grad, first, second,
            clip=0.75, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.99, step=step, rsqrt_correction2=31.6,
        )  # fmt: skip
    yield from (master, first, second)
