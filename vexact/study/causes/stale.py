"""A sampler with weights of the step before.

- `missed-sync`: every `degree`-th publish is lost (that of each step whose number is a multiple of it): in that step
  the sampler has the weights that it had in the step before, while its rollouts name the new version. With degree 1 it
  is always one step behind. With `delay` the weights are older on both sides of the loss.
- `stale-prefix`: keys and values of prompts come from the weights of the step before, as a prefix cache that was not
  flushed leaves them; all else is computed with the new weights. The last token of a prompt is not from the cache: an
  engine has to compute it for its logits. A prompt's tokens follow from the prompt alone, so no schedule moves a bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vexact.model.batch import Batch, Chunk
from vexact.model.ops import Ops
from vexact.model.pages import Pages
from vexact.model.policy import Policy
from vexact.model.transformer import Transformer
from vexact.recipe import MismatchSection
from vexact.study.causes.caused import Caused, labelled
from vexact_kernels import Chunks


def missed_sync(policy: Policy, before: Policy, section: MismatchSection, step: int) -> Policy:
    lost = step > 0 and step % section.degree == 0
    return replace(labelled(before, "missed-sync"), version=policy.version) if lost else policy


def stale_prefix(policy: Policy, before: Policy, section: MismatchSection, step: int) -> Policy:
    if before.transformer is policy.transformer:
        return policy
    transformer = StaleTransformer(policy.transformer, before.transformer)
    return Policy(transformer, labelled(policy, "stale-prefix").ops, policy.version)


class StaleTransformer(Transformer):
    """The new weights, over keys and values of prompts that the old ones computed. Without gradients.

    Layer by layer: first the old weights' layer for the tokens of prompts, over pages that hold what old weights wrote
    of those prompts before; then the new ones' for all tokens, writing the old keys and values where a prompt is.
    """

    def __init__(self, new: Transformer, old: Transformer) -> None:
        self.__dict__.update(new.__dict__)
        self.old = old

    def forward(self, batch: Batch, pages: Pages, ops: Ops) -> Tensor:
        rows, part = cached(batch)
        if part is None:
            return super().forward(batch, pages, ops)
        config, tables = self.config, self.rotary.upto(batch.longest)
        ops, others = ops.over(batch), ops.over(part)
        x, y = ops.embed(batch.tokens, self.embedding), others.embed(part.tokens, self.old.embedding)
        for layer, old in zip(self.layers, self.old.layers, strict=True):
            seen = Kept(others)
            y = old.forward(part, pages, tables, y, seen)
            x = layer.forward(batch, pages, tables, x, Replaced(ops, rows, seen.keys, seen.values))
        return ops.rmsnorm(x, self.norm, config.rms_norm_eps)


class Kept(Caused):
    """Keeps the keys and values that attention is given."""

    keys: Tensor
    values: Tensor

    def __init__(self, inner: Ops) -> None:
        super().__init__(inner, "kept")

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, pages: tuple[Tensor, Tensor], scale: float
    ) -> Tensor:
        self.keys, self.values = k, v
        return self.inner.attention(q, k, v, chunks, pages, scale)


class Replaced(Caused):
    """Gives attention those keys and values [n, G, K] at those rows [n]."""

    def __init__(self, inner: Ops, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        super().__init__(inner, "replaced")
        self.rows, self.keys, self.values = rows, keys, values

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, pages: tuple[Tensor, Tensor], scale: float
    ) -> Tensor:
        k, v = k.clone(), v.clone()
        k[self.rows], v[self.rows] = self.keys, self.values
        return self.inner.attention(q, k, v, chunks, pages, scale)


def cached(batch: Batch) -> tuple[Tensor, Batch | None]:
    """Rows of a batch's prompts but for the last token of each, int64 [n], and the batch of them alone, if any."""
    chunks = batch.chunks
    start, prefix, bounds = (x.tolist() for x in (chunks.start, chunks.prefix, chunks.table_start))
    tokens, table = batch.tokens.tolist(), chunks.table.tolist()
    rows: list[int] = []
    parts: list[Chunk] = []
    for index, origin in enumerate(batch.origins):
        count = min(origin.prompt - 1 - prefix[index], start[index + 1] - start[index])
        if count < 1:
            continue
        here = range(start[index], start[index] + count)
        rows.extend(here)
        pages = table[bounds[index] : bounds[index + 1]]
        parts.append(Chunk([tokens[row] for row in here], prefix[index], pages, origin))
    device = batch.tokens.device
    return torch.tensor(rows, dtype=torch.int64, device=device), Batch.of(parts, device) if parts else None
