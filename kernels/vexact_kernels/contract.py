"""The interface that every implementation of the arithmetic keeps: tensors to tensors, no autograd.

`kernels/README.md` states for each op what is summed, in which order, and rounded where. Letters: N tokens,
S sequences, P pages, D width, H query heads, G key/value heads, K head size, F feed-forward width, V vocabulary.

*dtype* is the storage type of weights and activations (float32, bfloat16, float16); *grad* is the storage type of
gradients between ops: dtype, except that float16 keeps float32. Rows may be strided (`tensor.stride(0)`), the last
dimension is contiguous or is copied.

All tensors of a call live on `Kernels.device`, except those of `Chunks` and `Segments`: the schedule is made on the
host and stays there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

CONTRACT_VERSION = 1
PAGE = 64  # positions a page holds: the unit of memory and of summation
LANES = 8  # parts of a step whose parameter gradients are summed one after the other
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PORTABLE, TENSORCORE = "portable", "tensorcore"  # the same bits on every device; matrix units, exact on one type of GPU
PROFILES = (PORTABLE, TENSORCORE)
CPU = torch.device("cpu")
CLAMP, ZERO = "clamp", "zero"  # what a ratio outside its bounds counts as: the nearest bound, or nothing
OUTSIDE = (CLAMP, ZERO)


def grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """Storage type of gradients between ops: `dtype`, except that float16 keeps float32."""
    return torch.float32 if dtype == torch.float16 else dtype


@dataclass(frozen=True)
class Packed:
    """A weight [rows, columns] in an implementation's own layout. `data` is opaque to everyone else."""

    rows: int
    columns: int
    dtype: torch.dtype
    data: Any
    min_exponent: int  # smallest exponent of a non-zero weight; -1000 where a subnormal or no finite exponent is met


@dataclass(frozen=True)
class Segments:
    """How the tokens of a batch fall into lanes, on the host.

    ends: int64 [n], ascending, the last one is the number of tokens. fold: uint8 [n], 1 where the lane ends behind that
    segment (total += lane, lane = +0). Two segments never share a lane inside one batch.
    """

    ends: Tensor
    fold: Tensor


@dataclass
class Stream:
    """The two buffers of one parameter's gradient: the running lane and the sum of the finished ones, float32.

    `exact` is the state of the bf16 instruction guard (True while the running lane has taken the float32 path).
    `lane_is_zero`, `total_is_zero`: the buffer counts as +0 whatever its memory holds. Only matmul_dw knows of them: it
    takes the first back when it leaves a lane open and the second when a lane ends.
    `touched` marks the rows of an embedding that the running lane has met (uint8 [V]) and is None elsewhere.
    """

    lane: Tensor
    total: Tensor
    exact: bool = False
    lane_is_zero: bool = False
    total_is_zero: bool = False
    touched: Tensor | None = None


@dataclass(frozen=True)
class Chunks:
    """The ragged batch as attention sees it, int64 each, on the host.

    start [S + 1]: sequence s owns tokens start[s] … start[s + 1]. prefix [S]: how many of its tokens are in pages
    already. table_start [S + 1], table: the pages of sequence s are table[table_start[s] … table_start[s + 1]].
    """

    start: Tensor
    prefix: Tensor
    table_start: Tensor
    table: Tensor


@dataclass(frozen=True)
class Softmax:
    """Rows of logits with what `logprob` found of them at the temperature of the call.

    logits float32 [N, V] (rows strided); max, sum float32 [N].
    """

    logits: Tensor
    max: Tensor
    sum: Tensor


@runtime_checkable
class Kernels(Protocol):
    """One implementation of the arithmetic. Every method allocates its result unless it names a buffer."""

    def __hash__(self) -> int: ...  # results of an implementation are cached under it

    name: str  # "reference", "cpu:baseline", "cpu:avx2", "cpu:avx512", "cpu:avx512bf16", "cuda:portable", …
    device: torch.device  # where its tensors live
    profile: str  # what a digest names: "portable", or "tensorcore on " and the type of GPU

    def pack(self, weight: Tensor) -> Packed:
        """Weight [rows, columns] in a storage dtype."""
        ...

    def unpack(self, packed: Packed) -> Tensor:
        """The weight [rows, columns] again, bit for bit."""
        ...

    def matmul(self, x: Tensor, w: Packed, bias: Tensor | None = None, *, logits: bool = False) -> Tensor:
        """x [N, columns] → y [N, rows] in dtype, or in float32 and unrounded if `logits`."""
        ...

    def matmul_dx(self, dy: Tensor, w: Packed) -> Tensor:
        """dy [N, rows] in grad → dx [N, columns] in grad."""
        ...

    def matmul_dw(self, dy: Tensor, x: Tensor, segments: Segments, stream: Stream) -> None:
        """dy [N, rows] in grad, x [N, columns] in dtype; adds into stream [rows, columns]."""
        ...

    def matmul_db(self, dy: Tensor, segments: Segments, stream: Stream) -> None:
        """dy [N, rows] in grad; adds into stream [rows]."""
        ...

    def embed(self, ids: Tensor, w: Packed) -> Tensor:
        """ids int64 [N] → rows [N, D] in dtype. Raises IndexError on an id outside 0 … V - 1."""
        ...

    def embed_dw(self, ids: Tensor, dy: Tensor, segments: Segments, stream: Stream) -> None:
        """dy [N, D] in grad; adds into stream [V, D], whose `touched` is uint8 [V]."""
        ...

    def rmsnorm(self, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x [N, D] or [N, R, D] (stride(1) = D), w [D] → y contiguous like x, rstd float32 [N] or [N, R]."""
        ...

    def rmsnorm_dx(self, x: Tensor, w: Tensor, rstd: Tensor, dy: Tensor, residual: Tensor | None) -> Tensor:
        """dy and residual like y in grad → dx in grad; residual (a gradient that meets it) is added before rounding."""
        ...

    def rmsnorm_dw(self, x: Tensor, rstd: Tensor, dy: Tensor, segments: Segments, stream: Stream) -> None:
        """Adds into stream [D]; segments count tokens N, the R rows of a token run inside."""
        ...

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        """x [N, H, K] (stride(1) = K), positions int64 [N], tables float32 [positions, K/2] → contiguous [N, H, K].

        `inverse` rotates back: the gradient.
        """
        ...

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, key_pages: Tensor, value_pages: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Write the chunks' keys and values into pages, then fold the pages.

        q [N, H, K], k and v [N, G, K] (rows strided), key_pages [P, G, K, 64], value_pages [P, G, 64, K], all dtype
        → y contiguous [N, H, K] in dtype, lse float32 [N, H].
        """
        ...

    def attention_backward(
        self, q: Tensor, k: Tensor, v: Tensor, y: Tensor, dy: Tensor, lse: Tensor, chunks: Chunks, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dy [N, H, K] in grad → dq, dk, dv in grad, contiguous. Prefixes must be empty (ValueError)."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """gate_up [N, 2F] → [N, F]."""
        ...

    def swiglu_backward(self, gate_up: Tensor, dy: Tensor) -> Tensor:
        """dy [N, F] in grad → d gate_up [N, 2F] in grad."""
        ...

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b of one dtype and shape, one rounding."""
        ...

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x in another storage dtype: exact widening or one rounding."""
        ...

    def logprob(
        self, logits: Tensor, ids: Tensor, temperature: Tensor, *, entropy: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """logits float32 [N, V] (rows strided), ids int64 [N], temperature float32 [N] (0 means 1)

        → logprob, entropy or None, max, sum (float32 [N] each), finite (bool [N]).
        """
        ...

    def logprob_backward(
        self,
        logits: Tensor,
        ids: Tensor,
        temperature: Tensor,
        max_: Tensor,
        sum_: Tensor,
        entropy: Tensor | None,
        d_logprob: Tensor,
        d_entropy: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """→ d_logits [N, V] in grad of `dtype`."""
        ...

    def centre(
        self,
        policy: Softmax,
        sampler: Softmax,
        base: Softmax | None,
        ids: Tensor,
        temperature: Tensor,
        d_logprob: Tensor,
        low: Tensor | None,
        high: Tensor | None,
        outside: str,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of score centering: of g·(w_a log p(a) - Σ_v q_v w_v log p(v)) with w and q held fixed.

        p is the policy's distribution over V, q the sampler's. w_v is the ratio p_v / b_v to the base's distribution,
        held by its bounds low ≤ high, float32 [N]: where it lies outside, the nearest bound ("clamp") or 0 ("zero").
        A dead token of the base alone has the largest ratio that exp gives, one of the policy alone 0, one of both 1.
        Without a base every w is 1, low and high are None and the policy's logits are not read: what comes out is
        `logprob_backward` on the sampler's logits, bit for bit.

        ids int64 [N]; temperature float32 [N] (0 means 1), the same for the three; d_logprob float32 [N] is g.
        → d_logits [N, V] of the policy in grad of `dtype`, +0 in rows where g is 0 whatever their logits;
        w_a float32 [N], of the id; W = Σ_v q_v w_v, float32 [N]. Raises ValueError on bounds without a base, a base
        without bounds, another `outside`; IndexError on an id outside 0 … V - 1.
        """
        ...

    def draw(
        self, logits: Tensor, temperature: Tensor, seed: Tensor, request: Tensor, sample: Tensor, position: Tensor
    ) -> Tensor:
        """logits float32 [N, V]; temperature float32 [N] (0: greedy); the rest int64 [N], read as unsigned: seed and
        request 64 bits, sample and position 32 → ids int64 [N], -1 where `logprob` says that the row is not finite.
        """
        ...

    def noise(self, key: Tensor, columns: int) -> Tensor:
        """Standard normal numbers that have addresses: key int64 [N], read as 64 unsigned bits → float32 [N, columns].

        Element (n, v) follows from key[n] and v alone: not from the other rows, and a longer row begins with the same
        numbers. They lie within ±5.42, on 2^24 values, as far to one side as to the other.
        """
        ...

    def exp(self, x: Tensor) -> Tensor:
        """float32, any shape."""
        ...

    def log(self, x: Tensor) -> Tensor:
        """float32, any shape."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """S over the elements of a float32 tensor in logical order → float32 []."""
        ...

    def sum_squares(self, x: Tensor) -> Tensor:
        """S over the squares → float32 []."""
        ...

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
        """One AdamW update in place on contiguous float32 tensors; every scalar is rounded to float32 once."""
        ...
