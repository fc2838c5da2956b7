"""The specification: every op of the contract, on whole tensors, in the order and with the roundings that are written.

Outputs are computed side by side; a summed index is always a Python loop (`float32.chain`) or a halving tree
(`float32.tree`). Slow on purpose. It runs in the caller's floating-point environment, so do not call it under
`torch.set_flush_denormal(True)`: the compiled kernels shield themselves, Python cannot.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vexact_kernels import float32
from vexact_kernels.arguments import bounded
from vexact_kernels.contract import CPU, PAGE, PORTABLE, ZERO, Chunks, Packed, Segments, Softmax, Stream, grad_dtype
from vexact_kernels.float32 import chain, fma, scalar, tree, widen
from vexact_kernels.philox import draw_bits as draw_bits  # exported: tasks make their questions of them
from vexact_kernels.philox import noise_words, pick
from vexact_kernels.philox import philox as philox


class Reference:
    """The arithmetic as `kernels/README.md` states it; the interface is `contract.Kernels`."""

    name = "reference"
    device, profile = CPU, PORTABLE

    def pack(self, weight: Tensor) -> Packed:
        rows, columns = weight.shape
        return Packed(rows, columns, weight.dtype, weight.detach().clone(), min_exponent(weight))

    def unpack(self, packed: Packed) -> Tensor:
        return packed.data.clone()

    def matmul(self, x: Tensor, w: Packed, bias: Tensor | None = None, *, logits: bool = False) -> Tensor:
        y = chain(widen(x)[:, None, :], widen(w.data)[None, :, :])
        if bias is not None:
            y = y + widen(bias) + 0.0
        return y if logits else y.to(x.dtype)

    def matmul_dx(self, dy: Tensor, w: Packed) -> Tensor:
        return chain(widen(dy)[:, None, :], widen(w.data).T[None, :, :]).to(dy.dtype)

    def matmul_dw(self, dy: Tensor, x: Tensor, segments: Segments, stream: Stream) -> None:
        if stream.lane_is_zero:
            stream.lane.zero_()
        if stream.total_is_zero:
            stream.total.zero_()
        fold = segments.fold.tolist()
        stream.lane_is_zero &= all(fold[-1:])  # an open lane has begun
        stream.total_is_zero &= not any(fold)

        def add_token(m: int) -> None:
            stream.lane.copy_(fma(widen(dy[m])[:, None], widen(x[m])[None, :], stream.lane))

        _fold_tokens(segments, stream, add_token)

    def matmul_db(self, dy: Tensor, segments: Segments, stream: Stream) -> None:
        def add_token(m: int) -> None:
            stream.lane.copy_(fma(widen(dy[m]), scalar(1.0), stream.lane))

        _fold_tokens(segments, stream, add_token)

    def embed(self, ids: Tensor, w: Packed) -> Tensor:
        outside = (ids < 0) | (ids >= w.rows)
        if outside.any():
            raise IndexError(f"token id {ids[outside][0].item()} is outside 0 … {w.rows - 1}")
        return w.data[ids]

    def embed_dw(self, ids: Tensor, dy: Tensor, segments: Segments, stream: Stream) -> None:
        assert stream.touched is not None, "an embedding's stream has touched rows"
        touched = stream.touched

        def add_token(m: int) -> None:
            row = ids[m]
            stream.lane[row] = stream.lane[row] + widen(dy[m])
            touched[row] = 1

        _fold_tokens(segments, stream, add_token)

    def rmsnorm(self, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x32 = widen(x)
        mean_square = tree(x32 * x32) / float(x.shape[-1])
        rstd = torch.div(scalar(1.0), float32.sqrt(mean_square + eps))
        n = (x32 * rstd[..., None]).to(x.dtype)
        return (widen(w) * widen(n)).to(x.dtype), rstd

    def rmsnorm_dx(self, x: Tensor, w: Tensor, rstd: Tensor, dy: Tensor, residual: Tensor | None) -> Tensor:
        rstd = rstd[..., None]
        g = widen(dy) * widen(w)
        h = widen(x) * rstd
        c = tree(g * h)[..., None] / float(x.shape[-1])
        dx = rstd * (g - h * c)
        if residual is not None:
            dx = widen(residual) + dx
        return dx.to(dy.dtype)

    def rmsnorm_dw(self, x: Tensor, rstd: Tensor, dy: Tensor, segments: Segments, stream: Stream) -> None:
        n = widen((widen(x) * rstd[..., None]).to(x.dtype)).reshape(len(x), -1, x.shape[-1])
        dy32 = widen(dy).reshape(n.shape)

        def add_token(m: int) -> None:
            for row in range(n.shape[1]):
                stream.lane.copy_(fma(dy32[m, row], n[m, row], stream.lane))

        _fold_tokens(segments, stream, add_token)

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        x1, x2 = widen(x).chunk(2, dim=-1)
        c, s = cos[positions][:, None, :], sin[positions][:, None, :]
        if inverse:
            y1, y2 = x1 * c + x2 * s, x2 * c - x1 * s
        else:
            y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
        return torch.cat((y1, y2), dim=-1).to(x.dtype)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, key_pages: Tensor, value_pages: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        y = torch.zeros(q.shape, dtype=q.dtype)
        lse = torch.zeros(q.shape[:2], dtype=torch.float32)
        starts, table_starts = chunks.start.tolist(), chunks.table_start.tolist()
        for s, prefix in enumerate(chunks.prefix.tolist()):
            begin, end = starts[s], starts[s + 1]
            table = chunks.table[table_starts[s] : table_starts[s + 1]].tolist()
            for token in range(begin, end):
                page, place = divmod(prefix + token - begin, PAGE)
                key_pages[table[page], :, :, place] = k[token]
                value_pages[table[page], :, place, :] = v[token]
            if end > begin:
                y[begin:end], lse[begin:end] = _attend(q[begin:end], prefix, table, key_pages, value_pages, scale)
        return y, lse

    def attention_backward(
        self, q: Tensor, k: Tensor, v: Tensor, y: Tensor, dy: Tensor, lse: Tensor, chunks: Chunks, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if chunks.prefix.any():
            raise ValueError("attention_backward needs whole sequences: a prefix is not empty")
        dq, dk, dv = (torch.zeros(t.shape, dtype=dy.dtype) for t in (q, k, v))
        for begin, end in zip(chunks.start[:-1].tolist(), chunks.start[1:].tolist(), strict=True):
            one = slice(begin, end)
            dq[one], dk[one], dv[one] = _attend_backward(q[one], k[one], v[one], y[one], dy[one], lse[one], scale)
        return dq, dk, dv

    def swiglu(self, gate_up: Tensor) -> Tensor:
        g, u = widen(gate_up).chunk(2, dim=-1)
        s = float32.silu(g).to(gate_up.dtype)
        return (widen(s) * u).to(gate_up.dtype)

    def swiglu_backward(self, gate_up: Tensor, dy: Tensor) -> Tensor:
        g, u = widen(gate_up).chunk(2, dim=-1)
        dy32, sigma = widen(dy), float32.sigmoid(g)
        s = float32.silu(g).to(gate_up.dtype)
        du = dy32 * widen(s)
        dg = (dy32 * u) * (sigma * fma(g, 1.0 - sigma, scalar(1.0)))
        return torch.cat((dg, du), dim=-1).to(dy.dtype)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return (widen(a) + widen(b)).to(a.dtype)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return widen(x).to(dtype, copy=True)

    def logprob(
        self, logits: Tensor, ids: Tensor, temperature: Tensor, *, entropy: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        z = _tempered(logits, temperature)
        max_, finite = _finite_max(z)
        shifted = z - max_[:, None]
        e = float32.exp(shifted)
        sum_ = tree(e)
        log_sum = float32.log(sum_)
        logprob = shifted.gather(1, ids[:, None])[:, 0] - log_sum
        mean_shift = tree(torch.where(e == 0, 0.0, e * shifted)) / sum_
        return logprob, log_sum - mean_shift if entropy else None, max_, sum_, finite

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
        shifted = _tempered(logits, temperature) - max_[:, None]
        p = float32.exp(shifted) / sum_[:, None]
        chosen = torch.arange(logits.shape[1]) == ids[:, None]
        at_id = torch.where(chosen, d_logprob[:, None], 0.0)
        d = at_id - d_logprob[:, None] * p
        if d_entropy is not None:
            assert entropy is not None, "a gradient of the entropy needs the entropy"
            surprise = (shifted - float32.log(sum_)[:, None]) + entropy[:, None]
            d = d - (d_entropy[:, None] * p) * surprise
        d = torch.where(p == 0, at_id, d)
        absent = d_logprob == 0 if d_entropy is None else (d_logprob == 0) & (d_entropy == 0)
        d = torch.where(absent[:, None], 0.0, d)  # whatever the logits, NaN among them
        return (d / _divisor(temperature) + 0.0).to(grad_dtype(dtype))

    def draw(
        self, logits: Tensor, temperature: Tensor, seed: Tensor, request: Tensor, sample: Tensor, position: Tensor
    ) -> Tensor:
        z = _tempered(logits, temperature)
        max_, finite = _finite_max(z)
        ids = torch.full((len(z),), -1, dtype=torch.int64)
        for row in range(len(z)):
            if not finite[row]:
                continue
            if temperature[row] == 0:
                ids[row] = (z[row] == max_[row]).nonzero()[0, 0]
                continue
            weights = (float32.exp(z[row] - max_[row]) * 2.0**40).to(torch.int64)  # truncates
            ids[row] = pick(weights, draw_bits(*(int(t[row]) for t in (seed, request, sample, position))))
        return ids

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
        bounds = bounded(base, low, high, outside)
        if base is None or bounds is None:
            given = (sampler.logits, ids, temperature, sampler.max, sampler.sum)
            ones = torch.ones_like(d_logprob)
            return self.logprob_backward(*given, None, d_logprob, None, dtype), ones, ones.clone()
        (x, p), (y, _), (_, q) = (_softmax(rows, temperature) for rows in (policy, base, sampler))
        log_ratio = (x - float32.log(policy.sum)[:, None]) - (y - float32.log(base.sum)[:, None])
        log_ratio = torch.where((x == -torch.inf) & (y == -torch.inf), 0.0, log_ratio)
        ratio = float32.exp(torch.where(log_ratio > float32.EXP_HIGHEST, float32.EXP_HIGHEST, log_ratio))
        below, above = ratio < bounds[0][:, None], ratio > bounds[1][:, None]
        nearest = (0.0, 0.0) if outside == ZERO else (bounds[0][:, None], bounds[1][:, None])
        w = torch.where(below, nearest[0], torch.where(above, nearest[1], ratio))
        weighted = torch.where(q == 0, 0.0, q * w)
        w_id, total = w.gather(1, ids[:, None])[:, 0], tree(weighted)
        c = torch.where(p == 0, weighted, fma((w_id - total)[:, None], p, weighted))
        chosen = torch.arange(c.shape[1]) == ids[:, None]
        d = torch.where(chosen, (d_logprob * w_id)[:, None], 0.0) - d_logprob[:, None] * c
        d = torch.where((d_logprob == 0)[:, None], 0.0, d)  # whatever the logits, NaN among them
        return (d / _divisor(temperature) + 0.0).to(grad_dtype(dtype)), w_id, total

    def noise(self, key: Tensor, columns: int) -> Tensor:
        return float32.normal(noise_words(key, torch.arange(columns)))

    def exp(self, x: Tensor) -> Tensor:
        return float32.exp(x)

    def log(self, x: Tensor) -> Tensor:
        return float32.log(x)

    def sum(self, x: Tensor) -> Tensor:
        return tree(x.flatten())

    def sum_squares(self, x: Tensor) -> Tensor:
        return tree((x * x).flatten())

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
        g = grad * scalar(clip)
        first.copy_(fma(scalar(beta1), first, scalar(1.0 - beta1) * g))
        second.copy_(fma(scalar(beta2), second, (scalar(1.0 - beta2) * g) * g))
        d = fma(float32.sqrt(second), scalar(rsqrt_correction2), scalar(eps))
        master.copy_(fma(-scalar(step), first / d, master * scalar(decay)))


def min_exponent(weight: Tensor) -> int:
    """Smallest exponent of a non-zero weight, and -1000 where a subnormal or a value that is not finite is met."""
    exponent = (widen(weight).view(torch.int32) >> 23) & 255
    exponent = exponent[weight != 0]
    if exponent.numel() == 0:
        return 0
    if (exponent == 0).any() or (exponent == 255).any():
        return -1000
    return int(exponent.min()) - 127


def _divisor(temperature: Tensor) -> Tensor:
    """Temperature [N] → [N, 1], with 1 for 0: greedy log-probabilities are the untempered model's."""
    return torch.where(temperature == 0, 1.0, temperature)[:, None]


def _tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    return logits / _divisor(temperature) + 0.0


def _softmax(rows: Softmax, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """z - M and the probabilities, [N, V] each."""
    shifted = _tempered(rows.logits, temperature) - rows.max[:, None]
    return shifted, float32.exp(shifted) / rows.sum[:, None]


def _finite_max(z: Tensor) -> tuple[Tensor, Tensor]:
    """The largest z of each row [N] and whether it is finite [N]; NaN where it is not, or where the row holds a NaN.

    A z of -inf beside a finite one is a dead entry: its weight is +0.
    """
    max_ = z.amax(-1)
    finite = torch.isfinite(max_)
    return torch.where(finite, max_, torch.nan), finite


def _fold_tokens(segments: Segments, stream: Stream, add_token: Callable[[int], None]) -> None:
    """Add tokens to the running lane in order; where a lane ends, add it to the total and start it again at +0."""
    begin = 0
    for end, fold in zip(segments.ends.tolist(), segments.fold.tolist(), strict=True):
        for token in range(begin, end):
            add_token(token)
        if fold:
            stream.total.copy_(stream.total + stream.lane)
            stream.lane.zero_()
            if stream.touched is not None:
                stream.touched.zero_()
        begin = end


def _attend(
    q: Tensor, prefix: int, table: list[int], key_pages: Tensor, value_pages: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Queries q [n, H, K] at positions prefix … prefix + n - 1 of one sequence → y [n, H, K], lse [n, H]."""
    n, heads, width = q.shape
    group = heads // key_pages.shape[1]
    positions = prefix + torch.arange(n)
    m = torch.full((n, heads), -torch.inf)
    l = torch.zeros(n, heads)  # noqa: E741 (the contract's letter)
    acc = torch.zeros(n, heads, width)
    for b in range((prefix + n - 1) // PAGE + 1):
        rows = slice(max(0, b * PAGE - prefix), n)  # queries that reach this page
        present = (b * PAGE + torch.arange(PAGE)) <= positions[rows, None]  # [rows, 64]
        keys = widen(key_pages[table[b]]).repeat_interleave(group, 0)  # [H, K, 64]
        values = widen(value_pages[table[b]]).repeat_interleave(group, 0)  # [H, 64, K]
        s = chain(widen(q[rows])[:, :, None, :], keys.transpose(1, 2)) * scale
        s = torch.where(present[:, None, :], s, -torch.inf)
        m_new = torch.maximum(m[rows], s.amax(-1))
        alpha = torch.where(m[rows] == -torch.inf, 0.0, float32.exp(m[rows] - m_new))
        p = torch.where(present[:, None, :], float32.exp(s - m_new[..., None]), 0.0)
        l[rows] = fma(l[rows], alpha, tree(p))
        m[rows] = m_new
        folded = acc[rows] * alpha[..., None]
        for j in range(PAGE):
            folded = torch.where(present[:, j, None, None], fma(p[:, :, j, None], values[:, j], folded), folded)
        acc[rows] = folded
    return ((acc + 0.0) / l[..., None]).to(q.dtype), m + float32.log(l)


def _attend_backward(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, dy: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One whole sequence: q, y, dy [n, H, K], k, v [n, G, K], lse [n, H] → dq, dk, dv in float32."""
    n, heads, _ = q.shape
    group = heads // k.shape[1]
    q, k, v, y, dy = (widen(t).transpose(0, 1) for t in (q, k, v, y, dy))  # heads outside
    keys, values = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    s = chain(q[:, :, None, :], keys[:, None, :, :]) * scale  # [H, n (i), n (j)]
    p = float32.exp(s - lse.T[:, :, None])
    delta = tree(dy * y)
    dp = chain(dy[:, :, None, :], values[:, None, :, :])
    ds = p * (dp - delta[:, :, None])

    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for j in range(n):
        dq[:, j:] = fma(ds[:, j:, j, None], keys[:, j, None, :], dq[:, j:])
    for h in range(heads):
        g = h // group
        for i in range(n):
            dk[g, : i + 1] = fma(ds[h, i, : i + 1, None], q[h, i], dk[g, : i + 1])
            dv[g, : i + 1] = fma(p[h, i, : i + 1, None], dy[h, i], dv[g, : i + 1])
    dq, dk, dv = (dq + 0.0) * scale, (dk + 0.0) * scale, dv + 0.0
    return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)
