"""The arithmetic digest: what a rollout was computed with, as far as bits can tell.

It covers the contract's version and constants, the dtype, the profile, and the bits of a fixed probe through every op.
Machines and instruction sets that keep the contract agree on it; a comment edit does not change it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from vexact_kernels import CONTRACT_VERSION, LANES, PAGE, Chunks, Kernels, Segments, Stream, grad_dtype

PROFILE = "portable"
_ROWS, _WIDTH, _HEADS, _KV_HEADS, _HEAD = 5, 96, 4, 2, 16


@lru_cache
def arithmetic_digest(kernels: Kernels, dtype: torch.dtype) -> str:
    """Sixteen hexadecimal digits, computed once for each implementation and dtype."""
    digest = hashlib.sha256(f"{CONTRACT_VERSION} {PAGE} {LANES} {PROFILE} {dtype}".encode())
    for tensor in _probe(kernels, dtype):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _numbers(*shape: int, salt: int) -> Tensor:
    """float32 in (-2, 2) from integer arithmetic alone, hence the same everywhere."""
    count = 1
    for size in shape:
        count *= size
    n = torch.arange(count, dtype=torch.int64) + 7919 * salt
    n = (n * 2654435761 + 12345) % 4294967291
    n = (n * 40503 + (n >> 15)) % 65521
    return ((n - 32760).to(torch.float32) / 16384).reshape(shape)


def _probe(k: Kernels, dtype: torch.dtype) -> Iterator[Tensor]:
    grad = grad_dtype(dtype)
    segments = Segments(torch.tensor([2, _ROWS]), torch.tensor([1, 0], dtype=torch.uint8))
    x = k.cast(_numbers(_ROWS, _WIDTH, salt=1), dtype)
    w = k.pack(k.cast(_numbers(_WIDTH, _WIDTH, salt=2), dtype))
    dy = k.cast(_numbers(_ROWS, _WIDTH, salt=3), grad)
    norm = k.cast(_numbers(_WIDTH, salt=4), dtype)
    stream = Stream(torch.zeros(_WIDTH, _WIDTH), torch.zeros(_WIDTH, _WIDTH))
    k.matmul_dw(dy, x, segments, stream)
    y, rstd = k.rmsnorm(x, norm, 1e-5)
    yield from (k.matmul(x, w), k.matmul_dx(dy, w), stream.lane, stream.total)
    yield from (y, rstd, k.rmsnorm_dx(x, norm, rstd, dy, dy), k.swiglu(x), k.add(x, x))
    qkv = x.view(_ROWS, 6, _HEAD)
    q, key, value = qkv[:, :_HEADS], qkv[:, 2:4], qkv[:, _HEADS:]
    positions = torch.arange(_ROWS)
    tables = _numbers(_ROWS, _HEAD // 2, salt=5), _numbers(_ROWS, _HEAD // 2, salt=6)
    chunks = Chunks(torch.tensor([0, _ROWS]), torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([0]))
    pages = torch.zeros(1, _KV_HEADS, _HEAD, PAGE, dtype=dtype), torch.zeros(1, _KV_HEADS, PAGE, _HEAD, dtype=dtype)
    out, lse = k.attention(q, key, value, chunks, *pages, 0.25)
    d_out = k.cast(_numbers(_ROWS, _HEADS, _HEAD, salt=7), grad)
    yield from (k.rope(q, positions, *tables), out, lse)
    yield from k.attention_backward(q, key, value, out, d_out, lse, chunks, 0.25)
    logits = _numbers(_ROWS, 1500, salt=8)
    ids, temperature = torch.arange(_ROWS) * 7, torch.tensor([1.0, 0.5, 0.7, 0.0, 2.0])
    logprob, entropy, max_, sum_, _ = k.logprob(logits, ids, temperature)
    assert entropy is not None
    yield from (logprob, entropy)
    yield k.logprob_backward(logits, ids, temperature, max_, sum_, entropy, logprob, None, dtype)
    yield k.draw(logits, temperature, ids, ids, ids, ids)
