"""Ops around other ops: what they do not change, the inner ones do."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vexact.model.batch import Batch
from vexact.model.draws import Draws
from vexact.model.ops import Edit, Logprobs, Ops
from vexact.model.parameters import Matrix, Vector
from vexact_kernels import Chunks


class Wrapped(Ops):
    """A subclass says what it adds (`around`, `digest`) and overrides the operations that it changes.

    batch: the one that is computed, None before `over` says it.
    """

    def __init__(self, inner: Ops, batch: Batch | None = None) -> None:
        super().__init__(inner.kernels)
        self.inner, self.batch = inner, batch

    def around(self, inner: Ops, batch: Batch | None = None) -> Wrapped:
        raise NotImplementedError

    def digest(self, arithmetic: str) -> str:
        raise NotImplementedError

    def over(self, batch: Batch) -> Wrapped:
        return self.around(self.inner.over(batch), batch)

    def stand_in(self, x: Tensor, value: Tensor) -> Tensor:
        return self.inner.stand_in(x, value)

    def block(self, run: Callable[[Tensor, Ops], Tensor], x: Tensor) -> Tensor:
        return self.inner.block(lambda given, ops: run(given, self.around(ops, self.batch)), x)

    def embed(self, tokens: Tensor, weight: Matrix) -> Tensor:
        return self.inner.embed(tokens, weight)

    def matmul(self, x: Tensor, weight: Matrix) -> Tensor:
        return self.inner.matmul(x, weight)

    def add(self, residual: Tensor, branch: Tensor) -> Tensor:
        return self.inner.add(residual, branch)

    def rmsnorm(self, x: Tensor, weight: Vector, eps: float) -> Tensor:
        return self.inner.rmsnorm(x, weight, eps)

    def split_heads(self, qkv: Tensor, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner.split_heads(qkv, heads, kv_heads, head_dim)

    def rope(self, x: Tensor, positions: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        return self.inner.rope(x, positions, tables)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, pages: tuple[Tensor, Tensor], scale: float
    ) -> Tensor:
        return self.inner.attention(q, k, v, chunks, pages, scale)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return self.inner.swiglu(gate_up)

    def logits(self, hidden: Tensor, head: Matrix, rows: Tensor | None = None) -> Tensor:
        return self.inner.logits(hidden, head, rows)

    def draw(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner.draw(logits, draws)

    def drawn_from(self, logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.drawn_from(logits, temperature)

    def logprobs(
        self, hidden: Tensor, rows: Tensor, head: Matrix, ids: Tensor, temperature: Tensor, edit: Edit | None = None
    ) -> Logprobs:
        return self.inner.logprobs(hidden, rows, head, ids, temperature, edit)


class Labelled(Wrapped):
    """Changes no operation: a name for weights that are not those that were published."""

    def __init__(self, inner: Ops, label: str, batch: Batch | None = None) -> None:
        super().__init__(inner, batch)
        self.label = label

    def around(self, inner: Ops, batch: Batch | None = None) -> Labelled:
        return Labelled(inner, self.label, batch)

    def digest(self, arithmetic: str) -> str:
        return f"{self.inner.digest(arithmetic)}~{self.label}"
