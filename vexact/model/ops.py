"""The functions a policy computes with. These are exact and record nothing; `recording.py` adds gradients.

Ops hold no numerics of their own: each hands its tensors to one kernel. A batch is known to ops through `over`, which
exact ops answer with themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vexact.model.batch import Batch
from vexact.model.draws import Draws
from vexact.model.parameters import Matrix, Vector
from vexact_kernels import Chunks, Kernels

LOGITS_AT_ONCE = 1 << 23  # elements of [tokens, vocabulary] that stand in memory at once (32 MB)

Edit = Callable[[Tensor, Tensor], Tensor]  # logits float32 [R, V] and their rows of the batch → logits


@dataclass(frozen=True)
class Logprobs:
    """Of one row each: logprob and entropy in nats (float32 [R]), finite (bool [R]): were all of its logits finite."""

    logprob: Tensor
    entropy: Tensor
    finite: Tensor


class Ops:
    """Exact operations without gradients."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def over(self, batch: Batch) -> Ops:
        """These ops, knowing which batch they compute."""
        return self

    def digest(self, arithmetic: str) -> str:
        """What these ops are known by, from the digest of the arithmetic below them."""
        return arithmetic

    def around(self, inner: Ops) -> Ops:
        """What these ops add, added to others: exact ones add nothing."""
        return inner

    def stand_in(self, x: Tensor, value: Tensor) -> Tensor:
        """value in the place of x, of the same shape and dtype: gradients pass through it as if it were x."""
        return value

    def block(self, run: Callable[[Tensor, Ops], Tensor], x: Tensor) -> Tensor:
        """run(x, ops): a part of the forward that follows from x [N, D] alone, so that it can be computed again."""
        return run(x, self)

    def embed(self, tokens: Tensor, weight: Matrix) -> Tensor:
        """tokens int64 [N] → [N, D]."""
        return self.kernels.embed(tokens, weight.packed)

    def matmul(self, x: Tensor, weight: Matrix) -> Tensor:
        """x [N, columns] → [N, rows]."""
        return self.kernels.matmul(x, weight.packed, weight.bias)

    def add(self, residual: Tensor, branch: Tensor) -> Tensor:
        """[N, D] + [N, D], rounded once."""
        return self.kernels.add(residual, branch)

    def rmsnorm(self, x: Tensor, weight: Vector, eps: float) -> Tensor:
        """x [N, D] or heads [N, R, K], normalised over the last dimension."""
        return self.kernels.rmsnorm(x, weight.value, eps)[0]

    def split_heads(self, qkv: Tensor, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [N, (H + 2G) K] → views q [N, H, K], k [N, G, K], v [N, G, K]."""
        rows = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim)
        return rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]

    def rope(self, x: Tensor, positions: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """x [N, heads, K] rotated by its positions int64 [N]."""
        return self.kernels.rope(x, positions, *tables)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, pages: tuple[Tensor, Tensor], scale: float
    ) -> Tensor:
        """Write k and v into pages, fold the pages → [N, H K]."""
        return self.kernels.attention(q, k, v, chunks, *pages, scale)[0].flatten(1)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """gate_up [N, 2F] → [N, F]."""
        return self.kernels.swiglu(gate_up)

    def logits(self, hidden: Tensor, head: Matrix, rows: Tensor | None = None) -> Tensor:
        """hidden [R, D] → float32 [R, V], never rounded. rows: which rows of the batch these are, int64 [R] on the
        host; by default all of them."""
        return self.kernels.matmul(hidden, head.packed, head.bias, logits=True)

    def draw(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        """logits float32 [R, V] → ids int64 [R], logprob float32 [R] of the distribution drawn from, finite bool [R].

        Where a row is not finite its id and logprob mean nothing.
        """
        drawn = self.kernels.draw(logits, draws.temperature, draws.seed, draws.request, draws.sample, draws.position)
        ids = drawn.clamp(min=0)
        logprob, _, _, _, finite = self.kernels.logprob(logits, ids, draws.temperature, entropy=False)
        return ids, logprob, finite

    def drawn_from(self, logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """Logits float32 [R, V] and temperatures float32 [R] whose law it is that `draw` draws from, given these."""
        return logits, temperature

    def logprobs(
        self, hidden: Tensor, rows: Tensor, head: Matrix, ids: Tensor, temperature: Tensor, edit: Edit | None = None
    ) -> Logprobs:
        """Log-probability of ids int64 [R] at rows int64 [R] of hidden [N, D], temperature float32 [R].

        The rows, ascending, are part of the schedule and on the host. edit: what is done to logits before anything
        reads them; gradients pass through it unchanged.
        """
        at = rows.to(hidden.device, non_blocking=True)
        parts = [
            self.kernels.logprob(
                edited(self.logits(hidden[at[part]], head), rows[part], edit), ids[part], temperature[part]
            )
            for part in token_parts(rows.shape[0], head.packed.rows)
        ]
        return gather_logprobs(parts, hidden.device)


def edited(logits: Tensor, rows: Tensor, edit: Edit | None) -> Tensor:
    """logits float32 [R, V] of those rows of the batch."""
    return logits if edit is None else edit(logits, rows)


def then(first: Edit, second: Edit | None) -> Edit:
    """One edit of logits behind the other."""
    if second is None:
        return first
    return lambda logits, rows: second(first(logits, rows), rows)


def token_parts(rows: int, vocabulary: int) -> list[slice]:
    """Cuts of the rows so that [rows, vocabulary] never stands in memory whole."""
    step = max(1, LOGITS_AT_ONCE // vocabulary)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def gather_logprobs(parts: list[Any], device: torch.device) -> Logprobs:
    """Join what `Kernels.logprob` gave on a device for consecutive rows."""
    if not parts:
        nothing = torch.empty(0, dtype=torch.float32, device=device)
        return Logprobs(nothing, nothing, torch.empty(0, dtype=torch.bool, device=device))
    logprob, entropy, _, _, finite = (torch.cat(column) for column in zip(*parts, strict=True))
    return Logprobs(logprob, entropy, finite)
