"""A really different engine: `torch`, the operations of torch.nn.functional in the compute dtype.

Products by `linear`, norms and rotations as Hugging Face's Llama writes them (tables and products rounded to the
compute dtype), attention by `scaled_dot_product_attention` over the gathered pages of each sequence, `silu`, logits
rounded to the compute dtype, `log_softmax` of them in float32 at the temperature. Its bits depend on shapes, threads
and machine, so on the schedule: scoring does not find a sampler's again. Tokens are drawn by the exact engine's
addressed draw, from these logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from vexact.model.draws import Draws
from vexact.model.law import divisor
from vexact.model.ops import Edit, Logprobs, Ops
from vexact.model.parameters import Matrix, Vector
from vexact.model.policy import Policy
from vexact.recipe import MismatchSection
from vexact.study.causes.caused import OtherHead
from vexact.study.causes.sums import projections
from vexact_kernels import Chunks


def torch_engine(policy: Policy, section: MismatchSection) -> Policy:
    kernels, transformer = policy.ops.kernels, policy.transformer
    matrices = [*projections(transformer), transformer.head]
    weights = {matrix.name: kernels.unpack(matrix.packed) for matrix in matrices}
    return replace(policy, ops=TorchEngine(policy.ops, f"torch/{torch.__version__}", weights))


class TorchEngine(OtherHead):
    """weights: plain, by name."""

    def __init__(self, inner: Ops, label: str, weights: Mapping[str, Tensor]) -> None:
        super().__init__(inner, label)
        self.weights = weights

    def matmul(self, x: Tensor, weight: Matrix) -> Tensor:
        y = functional.linear(x, self.weights[weight.name], weight.bias)
        return self.inner.stand_in(self.inner.matmul(x, weight), y)

    def rmsnorm(self, x: Tensor, weight: Vector, eps: float) -> Tensor:
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        y = weight.value * normed.to(x.dtype)
        return self.inner.stand_in(self.inner.rmsnorm(x, weight, eps), y)

    def rope(self, x: Tensor, positions: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = (torch.cat([table[positions]] * 2, dim=-1).to(x.dtype)[:, None] for table in tables)
        first, second = x.chunk(2, dim=-1)
        y = x * cos + torch.cat([-second, first], dim=-1) * sin
        return self.inner.stand_in(self.inner.rope(x, positions, tables), y)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, pages: tuple[Tensor, Tensor], scale: float
    ) -> Tensor:
        exact = self.inner.attention(q, k, v, chunks, pages, scale)
        bounds, prefixes = list(pairwise(chunks.start.tolist())), chunks.prefix.tolist()
        tables = [chunks.table[begin:end] for begin, end in pairwise(chunks.table_start.tolist())]
        parts = [
            attended(q[begin:end], table, before, pages, scale)
            for (begin, end), before, table in zip(bounds, prefixes, tables, strict=True)
        ]
        return self.inner.stand_in(exact, torch.cat(parts))

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.inner.stand_in(self.inner.swiglu(gate_up), functional.silu(gate) * up)

    def product(self, hidden: Tensor, head: Matrix) -> Tensor:
        return functional.linear(hidden, self.weights[head.name], head.bias).to(torch.float32)

    def draw(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        ids, _, finite = self.inner.draw(logits, draws)
        return ids, log_softmax(logits, ids, draws.temperature), finite

    def logprobs(
        self, hidden: Tensor, rows: Tensor, head: Matrix, ids: Tensor, temperature: Tensor, edit: Edit | None = None
    ) -> Logprobs:
        chosen: list[Tensor] = []

        def kept(logits: Tensor, part: Tensor) -> Tensor:
            logits = logits if edit is None else edit(logits, part)
            places = torch.searchsorted(rows, part).to(ids.device)
            chosen.append(log_softmax(logits, ids[places], temperature[places]))
            return logits

        result = super().logprobs(hidden, rows, head, ids, temperature, kept)
        if not chosen:
            return result
        found = torch.cat(chosen)  # each part once: a recording asks again only on the way back
        return replace(result, logprob=self.inner.stand_in(result.logprob, found))


def attended(q: Tensor, table: Tensor, before: int, pages: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """q [M, H, K] behind `before` positions → [M, H K]."""
    keys, values = (memory[table.to(memory.device)] for memory in pages)
    end = before + len(q)
    key = keys.permute(1, 0, 3, 2).flatten(1, 2)[:, :end]  # [G, positions, K]
    value = values.permute(1, 0, 2, 3).flatten(1, 2)[:, :end]
    places = torch.arange(end, device=q.device)
    mask = places <= places[before:, None]
    group = q.shape[1] // key.shape[0]
    y = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        key.repeat_interleave(group, dim=0)[None],
        value.repeat_interleave(group, dim=0)[None],
        attn_mask=mask,
        scale=scale,
    )
    return y[0].transpose(0, 1).flatten(1)


def log_softmax(logits: Tensor, ids: Tensor, temperature: Tensor) -> Tensor:
    """float32 [R]."""
    scaled = logits / divisor(temperature)[:, None]
    return functional.log_softmax(scaled, dim=-1).gather(1, ids[:, None])[:, 0]
