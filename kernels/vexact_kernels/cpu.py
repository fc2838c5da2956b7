"""The C++ kernels of one instruction set behind the interface of `contract.py`, by ctypes.

A decoded token makes some three hundred calls, so a method does what its checks and one call need and no more. Every
method may be called from several threads at once.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch
from torch import Tensor

from vexact_kernels import arguments
from vexact_kernels.arguments import CODES, buffer, dense, indices, require, rows
from vexact_kernels.contract import CPU, PAGE, PORTABLE, Chunks, Packed, Segments, Stream, grad_dtype
from vexact_kernels.cpu_logits import CpuLogits
from vexact_kernels.library import FloatBits, available, operations

ALIGNMENT = 64  # bytes, of packed weights


def _aligned(size: int) -> Tensor:
    """Fresh memory of `size` bytes at a multiple of 64."""
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    begin = -memory.data_ptr() % ALIGNMENT
    return memory[begin : begin + size]


def _three(x: Tensor) -> tuple[int, int, int]:
    """N, R, D of x [N, D] or [N, R, D]."""
    if x.dim() == 2:
        return x.size(0), 1, x.size(1)
    if x.dim() == 3:
        return x.size(0), x.size(1), x.size(2)
    raise ValueError(f"x of rmsnorm is {list(x.shape)}, needed is [N, D] or [N, R, D]")


def _half(name: str, width: int) -> int:
    if width % 2:
        raise ValueError(f"{name} is {width} wide and has no halves")
    return width // 2


class _Scratch(threading.local):
    """Memory that matmul_dx works in, one a thread: it grows on demand, and nothing in it outlives a call."""

    def __init__(self) -> None:
        self.memory = _aligned(0)

    def address(self, size: int) -> int:
        if self.memory.numel() < size:
            self.memory = _aligned(size)
        return self.memory.data_ptr()


class Cpu(CpuLogits):
    """The kernels of one instruction set: "baseline", "avx2", "avx512" or "avx512bf16"."""

    device, profile = CPU, PORTABLE

    def __init__(self, isa: str) -> None:
        if isa not in available():
            raise ValueError(f"instruction set {isa!r} is not one that this machine has: {', '.join(available())}")
        self.name = f"cpu:{isa}"
        self._c: Any = operations(isa)
        self._scratch = _Scratch()
        self._checked: tuple[Chunks | None, int, int] = (None, 0, 0)  # spares every layer but the first the check

    def pack(self, weight: Tensor) -> Packed:
        n, k = weight.shape
        code, weight = CODES[weight.dtype], rows(weight.detach())
        data = _aligned(self._c.matmul_packed_bytes(code, n, k))
        least = ctypes.c_int32()
        self._c.matmul_pack(code, n, k, weight.data_ptr(), weight.stride(0), data.data_ptr(), ctypes.addressof(least))
        return Packed(n, k, weight.dtype, data, least.value)

    def unpack(self, packed: Packed) -> Tensor:
        w = torch.empty(packed.rows, packed.columns, dtype=packed.dtype)
        code = CODES[packed.dtype]
        self._c.matmul_unpack(code, packed.rows, packed.columns, packed.data.data_ptr(), w.data_ptr(), packed.columns)
        return w

    def matmul(self, x: Tensor, w: Packed, bias: Tensor | None = None, *, logits: bool = False) -> Tensor:
        m, n, k, dtype = x.size(0), w.rows, w.columns, w.dtype
        require("x of matmul", x, dtype, (m, k))
        x = rows(x)
        if bias is not None:
            bias = dense("bias", bias, dtype, (n,))
        y = torch.empty(m, n, dtype=torch.float32 if logits else dtype)
        self._c.matmul(
            CODES[dtype], m, n, k, x.data_ptr(), x.stride(0), w.data.data_ptr(), w.min_exponent,
            None if bias is None else bias.data_ptr(), logits, y.data_ptr(), n,
        )  # fmt: skip
        return y

    def matmul_dx(self, dy: Tensor, w: Packed) -> Tensor:
        m, n, k = dy.size(0), w.rows, w.columns
        grad, code = grad_dtype(w.dtype), CODES[w.dtype]
        require("dy of matmul", dy, grad, (m, n))
        dy = rows(dy)
        dx = torch.empty(m, k, dtype=grad)
        scratch = self._scratch.address(self._c.matmul_dx_bytes(code, n, k))
        self._c.matmul_dx(
            code, m, n, k, dy.data_ptr(), dy.stride(0), w.data.data_ptr(), w.min_exponent, scratch, dx.data_ptr(), k
        )
        return dx

    def matmul_dw(self, dy: Tensor, x: Tensor, segments: Segments, stream: Stream) -> None:
        m, n, k = x.size(0), dy.size(1), x.size(1)
        require("dy of matmul", dy, grad_dtype(x.dtype), (m, n))
        lane, total = buffer("lane", stream.lane, (n, k)), buffer("total", stream.total, (n, k))
        parts, ends, fold = arguments.segments(segments, m)
        dy, x = rows(dy), rows(x)
        state = self._c.matmul_dw(
            CODES[x.dtype], m, n, k, dy.data_ptr(), dy.stride(0), x.data_ptr(), x.stride(0),
            parts, ends.data_ptr(), fold.data_ptr(), lane, total, arguments.state_of(stream),
        )  # fmt: skip
        arguments.keep_state(stream, state)

    def matmul_db(self, dy: Tensor, segments: Segments, stream: Stream) -> None:
        m, n = dy.shape
        require("dy of matmul", dy, grad_dtype(dy.dtype), (m, n))
        lane, total = buffer("lane", stream.lane, (n,)), buffer("total", stream.total, (n,))
        parts, ends, fold = arguments.segments(segments, m)
        dy = rows(dy)
        # Gradients of float16 lie in float32, like those of float32: their own storage type says how to read them.
        self._c.matmul_db(
            CODES[dy.dtype], m, n, dy.data_ptr(), dy.stride(0), parts, ends.data_ptr(), fold.data_ptr(), lane, total
        )

    def embed(self, ids: Tensor, w: Packed) -> Tensor:
        n, width = ids.size(0), w.columns
        ids = indices("token id", ids, n, w.rows)
        y = torch.empty(n, width, dtype=w.dtype)
        self._c.embed(CODES[w.dtype], n, w.rows, width, ids.data_ptr(), w.data.data_ptr(), y.data_ptr(), width)
        return y

    def embed_dw(self, ids: Tensor, dy: Tensor, segments: Segments, stream: Stream) -> None:
        n, (vocabulary, width) = ids.size(0), stream.lane.shape
        if stream.touched is None:
            raise ValueError("the stream of an embedding needs its touched rows")
        ids = indices("token id", ids, n, vocabulary)
        require("dy of embed", dy, grad_dtype(dy.dtype), (n, width))
        lane = buffer("lane", stream.lane, (vocabulary, width))
        total = buffer("total", stream.total, (vocabulary, width))
        touched = buffer("touched", stream.touched, (vocabulary,), torch.uint8)
        parts, ends, fold = arguments.segments(segments, n)
        dy = rows(dy)
        self._c.embed_dw(
            CODES[dy.dtype], n, vocabulary, width, ids.data_ptr(), dy.data_ptr(), dy.stride(0),
            parts, ends.data_ptr(), fold.data_ptr(), lane, total, touched,
        )  # fmt: skip

    def rmsnorm(self, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        (n, r, d), shape, dtype = _three(x), x.shape, x.dtype
        x, w = rows(x), dense("weight of rmsnorm", w, dtype, (d,))
        y = torch.empty(*shape, dtype=dtype)
        rstd = torch.empty(*shape[:-1], dtype=torch.float32)
        self._c.rmsnorm(
            CODES[dtype], n, r, d, x.data_ptr(), x.stride(0), w.data_ptr(), eps, y.data_ptr(), r * d,
            rstd.data_ptr(),
        )  # fmt: skip
        return y, rstd

    def rmsnorm_dx(self, x: Tensor, w: Tensor, rstd: Tensor, dy: Tensor, residual: Tensor | None) -> Tensor:
        (n, r, d), shape, dtype, grad = _three(x), x.shape, x.dtype, grad_dtype(x.dtype)
        require("dy of rmsnorm", dy, grad, shape)
        if residual is not None:
            require("residual of rmsnorm", residual, grad, shape)
            residual = rows(residual)
        x, dy, w = rows(x), rows(dy), dense("weight of rmsnorm", w, dtype, (d,))
        rstd = dense("rstd", rstd, torch.float32, shape[:-1])
        dx = torch.empty(*shape, dtype=grad)
        met, met_stride = (None, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
        self._c.rmsnorm_dx(
            CODES[dtype], n, r, d, x.data_ptr(), x.stride(0), w.data_ptr(), rstd.data_ptr(),
            dy.data_ptr(), dy.stride(0), met, met_stride, dx.data_ptr(), r * d,
        )  # fmt: skip
        return dx

    def rmsnorm_dw(self, x: Tensor, rstd: Tensor, dy: Tensor, segments: Segments, stream: Stream) -> None:
        (n, r, d), shape = _three(x), x.shape
        require("dy of rmsnorm", dy, grad_dtype(x.dtype), shape)
        lane, total = buffer("lane", stream.lane, (d,)), buffer("total", stream.total, (d,))
        parts, ends, fold = arguments.segments(segments, n)
        x, dy, rstd = rows(x), rows(dy), dense("rstd", rstd, torch.float32, shape[:-1])
        self._c.rmsnorm_dw(
            CODES[x.dtype], n, r, d, x.data_ptr(), x.stride(0), rstd.data_ptr(), dy.data_ptr(), dy.stride(0),
            parts, ends.data_ptr(), fold.data_ptr(), lane, total,
        )  # fmt: skip

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        n, heads, size = x.shape
        limit, half = cos.size(0), _half("a head", size)
        cos = dense("cos", cos, torch.float32, (limit, half))
        sin = dense("sin", sin, torch.float32, (limit, half))
        positions, x = indices("position", positions, n, limit), rows(x)
        y = torch.empty(n, heads, size, dtype=x.dtype)
        self._c.rope(
            CODES[x.dtype], inverse, n, heads, size, x.data_ptr(), x.stride(0), positions.data_ptr(),
            cos.data_ptr(), sin.data_ptr(), y.data_ptr(), heads * size,
        )  # fmt: skip
        return y

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, key_pages: Tensor, value_pages: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        (n, heads, size), groups, dtype = q.shape, k.size(1), q.dtype
        limit = key_pages.size(0)
        arguments.heads(heads, groups, size)
        require("k of attention", k, dtype, (n, groups, size))
        require("v of attention", v, dtype, (n, groups, size))
        keys = buffer("key_pages", key_pages, (limit, groups, size, PAGE), dtype)
        values = buffer("value_pages", value_pages, (limit, groups, PAGE, size), dtype)
        checked, tokens, pages = self._checked
        if checked is not chunks or tokens != n or pages != limit:
            arguments.pages(chunks, n, limit)
            self._checked = (chunks, n, limit)
        q, k, v = rows(q), rows(k), rows(v)
        y = torch.empty(n, heads, size, dtype=dtype)
        lse = torch.empty(n, heads, dtype=torch.float32)
        self._c.attention(
            CODES[dtype], chunks.prefix.size(0), chunks.start.data_ptr(), chunks.prefix.data_ptr(),
            chunks.table_start.data_ptr(), chunks.table.data_ptr(), heads, groups, size,
            q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
            keys, values, scale, y.data_ptr(), heads * size, lse.data_ptr(),
        )  # fmt: skip
        return y, lse

    def attention_backward(
        self, q: Tensor, k: Tensor, v: Tensor, y: Tensor, dy: Tensor, lse: Tensor, chunks: Chunks, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        (n, heads, size), groups, dtype = q.shape, k.size(1), q.dtype
        if chunks.prefix.any():
            raise ValueError("attention_backward needs whole sequences: a prefix is not empty")
        arguments.starts(chunks, n)
        arguments.heads(heads, groups, size)
        grad = grad_dtype(dtype)
        for name, x, kind, count in (("k", k, dtype, groups), ("v", v, dtype, groups), ("y", y, dtype, heads)):
            require(f"{name} of attention", x, kind, (n, count, size))
        require("dy of attention", dy, grad, (n, heads, size))
        lse, start = dense("lse", lse, torch.float32, (n, heads)), chunks.start.contiguous()
        q, k, v, y, dy = rows(q), rows(k), rows(v), rows(y), rows(dy)
        dq = torch.empty(n, heads, size, dtype=grad)
        dk, dv = torch.empty(2, n, groups, size, dtype=grad)
        self._c.attention_backward(
            CODES[dtype], chunks.prefix.size(0), start.data_ptr(), heads, groups, size,
            q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), y.data_ptr(), y.stride(0),
            dy.data_ptr(), dy.stride(0), lse.data_ptr(), scale,
            dq.data_ptr(), heads * size, dk.data_ptr(), groups * size, dv.data_ptr(), groups * size,
        )  # fmt: skip
        return dq, dk, dv

    def swiglu(self, gate_up: Tensor) -> Tensor:
        n, f = gate_up.size(0), _half("gate_up", gate_up.size(1))
        x = rows(gate_up)
        y = torch.empty(n, f, dtype=x.dtype)
        self._c.swiglu(CODES[x.dtype], n, f, x.data_ptr(), x.stride(0), y.data_ptr(), f)
        return y

    def swiglu_backward(self, gate_up: Tensor, dy: Tensor) -> Tensor:
        n, f = gate_up.size(0), _half("gate_up", gate_up.size(1))
        grad = grad_dtype(gate_up.dtype)
        require("dy of swiglu", dy, grad, (n, f))
        x, dy = rows(gate_up), rows(dy)
        dx = torch.empty(n, 2 * f, dtype=grad)
        self._c.swiglu_backward(
            CODES[x.dtype], n, f, x.data_ptr(), x.stride(0), dy.data_ptr(), dy.stride(0), dx.data_ptr(), 2 * f
        )
        return dx

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        b = dense("the second addend", b, a.dtype, a.shape)
        a = rows(a).contiguous()
        y = torch.empty_like(a)
        self._c.add(CODES[a.dtype], y.numel(), a.data_ptr(), b.data_ptr(), y.data_ptr())
        return y

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        source = rows(x).contiguous()
        y = torch.empty_like(source, dtype=dtype)
        self._c.cast(CODES[x.dtype], CODES[dtype], y.numel(), source.data_ptr(), y.data_ptr())
        return y

    def exp(self, x: Tensor) -> Tensor:
        source = dense("x of exp", x, torch.float32, x.shape)
        y = torch.empty_like(source)
        self._c.exp(y.numel(), source.data_ptr(), y.data_ptr())
        return y

    def log(self, x: Tensor) -> Tensor:
        source = dense("x of log", x, torch.float32, x.shape)
        y = torch.empty_like(source)
        self._c.log(y.numel(), source.data_ptr(), y.data_ptr())
        return y

    def sum(self, x: Tensor) -> Tensor:
        source = dense("x of sum", x, torch.float32, x.shape)
        return _tensor(self._c.sum(x.numel(), source.data_ptr()))

    def sum_squares(self, x: Tensor) -> Tensor:
        source = dense("x of sum_squares", x, torch.float32, x.shape)
        return _tensor(self._c.sum_squares(x.numel(), source.data_ptr()))

    def adamw(
        self,
        master: Tensor,
        grad: Tensor,
        first: Tensor,
        second: Tensor,
        *,
        clip: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
        step: float,
        rsqrt_correction2: float,
    ) -> None:
        shape = master.shape
        grad = dense("grad", grad, torch.float32, shape)
        p, m, v = buffer("master", master, shape), buffer("first", first, shape), buffer("second", second, shape)
        self._c.adamw(
            master.numel(), p, grad.data_ptr(), m, v, clip, beta1, beta2, 1.0 - beta1, 1.0 - beta2, eps, decay, step,
            rsqrt_correction2,
        )  # fmt: skip


def _tensor(bits: FloatBits) -> Tensor:
    """The returned float as a tensor []."""
    return torch.frombuffer(bits, dtype=torch.float32).reshape(())
