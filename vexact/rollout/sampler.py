"""Requests in, rollouts out: plan, forward, draw, until nobody is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from vexact.errors import BadInput
from vexact.model.batch import Batch
from vexact.model.config import ModelConfig
from vexact.model.draws import Draws
from vexact.model.law import Law
from vexact.model.ops import Ops, token_parts
from vexact.model.pages import Pages
from vexact.model.policy import Policy
from vexact.model.rollout import Finish, Rollout
from vexact.rollout.request import Request
from vexact.rollout.scheduler import Scheduler, Sequence
from vexact_kernels import CPU, PAGE

POOL_BYTES = 2 << 30  # address space of the default pool; only pages in use take memory
POOL_PAGES = 4096


class _Drawn(NamedTuple):
    sequence: Sequence
    token: int
    logprob: float
    finite: bool
    law: Law | None


class Sampler:
    """Samples from one policy at a time with continuous batching over pages.

    pages: size of the pool, by default up to 2 GiB; tokens_per_step, chunk, running: see Scheduler. None of them can
    change a token or a log-probability.
    """

    def __init__(
        self,
        policy: Policy,
        pages: int | None = None,
        tokens_per_step: int = 512,
        chunk: int = 256,
        running: int = 64,
    ) -> None:
        self.policy, self.laws = policy, False
        self.pages = Pages(
            policy.config, pages or default_pages(policy.config, policy.dtype), policy.dtype, policy.device
        )
        self.scheduler = Scheduler(self.pages, tokens_per_step, chunk, running)

    def adopt(self, policy: Policy, laws: bool = False) -> None:
        """Sample from other weights from now on. Raises RuntimeError while sequences of the old ones are unfinished.

        laws: whether rollouts keep the law that each token was drawn from; at the beginning they do not.
        No page outlives its sequence, so nothing computed with old weights can be read with new ones.
        """
        if not self.scheduler.idle:
            raise RuntimeError("requests are unfinished: run them to their end before adopting other weights")
        shape, dtype, device = policy.config, policy.dtype, policy.device
        if (shape, dtype, device) != (self.policy.config, self.policy.dtype, self.policy.device):
            raise BadInput("the sampler's pages fit only policies of the same shape and dtype on the same device")
        self.policy, self.laws = policy, laws

    def add(self, request: Request) -> None:
        """Queue a request. Raises BadInput naming it where it can never be served."""
        limit = self.policy.config.max_positions
        if len(request.prompt) + request.max_tokens > limit:
            raise BadInput(
                f"request {request.id}: prompt of {len(request.prompt)} tokens and max_tokens {request.max_tokens} "
                f"exceed the model's {limit} positions"
            )
        vocabulary = self.policy.config.vocab_size
        unknown = next((token for token in request.prompt if not 0 <= token < vocabulary), None)
        if unknown is not None:
            raise BadInput(f"request {request.id}: token id {unknown} is outside the vocabulary of {vocabulary}")
        self.scheduler.add(request)

    def step(self) -> list[Rollout]:
        """One forward over the planned chunks, and a draw for every sequence that is computed to its end."""
        unasked = [s for s in self.scheduler.waiting if s.request.max_tokens == 0]
        if unasked:
            return [rollout for sequence in unasked for rollout in self._finish_unasked(sequence)]
        planned = self.scheduler.plan()
        if not planned:
            return []
        policy = self.policy
        batch = Batch.of([item.chunk for item in planned], policy.device)
        ops = policy.ops.over(batch)
        hidden = policy.transformer.forward(batch, self.pages, ops)
        for item in planned:
            self.scheduler.computed(item)
        ends = [
            (row, item.sequence)
            for row, item in zip(batch.last_rows().tolist(), planned, strict=True)
            if item.sequence.computed == len(item.sequence.tokens)
        ]
        return [rollout for drawn in self._draw(ops, hidden, ends) for rollout in self._accept(drawn)]

    def run(self, requests: Iterable[Request], progress: Callable[[int], None] | None = None) -> list[Rollout]:
        """All rollouts of the requests, sorted by (request, sample). progress hears of every finished rollout."""
        rollouts: list[Rollout] = []
        for request in requests:
            self.add(request)
        while not self.scheduler.idle:
            finished = self.step()
            rollouts.extend(finished)
            if progress is not None and finished:
                progress(len(finished))
        return sorted(rollouts, key=lambda rollout: rollout.id)

    def _draw(self, ops: Ops, hidden: Tensor, ends: list[tuple[int, Sequence]]) -> list[_Drawn]:
        rows: list[int] = []
        sequences: list[Sequence] = []
        for row, sequence in ends:
            family = [sequence, *self.scheduler.fork(sequence)]
            rows.extend([row] * len(family))
            sequences.extend(family)
        drawn: list[_Drawn] = []
        for part in token_parts(len(rows), self.policy.config.vocab_size):
            drawn.extend(self._draw_part(ops, hidden, rows[part], sequences[part]))
        return drawn

    def _draw_part(self, ops: Ops, hidden: Tensor, rows: list[int], sequences: list[Sequence]) -> Iterable[_Drawn]:
        device = self.policy.device
        place = {row: i for i, row in enumerate(dict.fromkeys(rows))}  # of families that share a row
        distinct = torch.tensor(list(place))
        at = distinct.to(device, non_blocking=True)
        logits = ops.logits(hidden[at], self.policy.transformer.head, distinct)
        if len(place) < len(rows):
            logits = logits[torch.tensor([place[row] for row in rows]).to(device, non_blocking=True)]
        draws = Draws.at([sequence.next_draw for sequence in sequences], device)
        ids, logprobs, finite = ops.draw(logits, draws)
        laws: Iterable[Law | None] = _laws(ops, logits, draws, ids) if self.laws else repeat(None)
        return map(_Drawn, sequences, ids.tolist(), logprobs.tolist(), finite.tolist(), laws)

    def _accept(self, drawn: _Drawn) -> list[Rollout]:
        """Append the token; the rollout if that ends the sequence."""
        sequence, request = drawn.sequence, drawn.sequence.request
        if not drawn.finite:
            return [self._finish(sequence, "nonfinite")]
        sequence.tokens.append(drawn.token)
        sequence.logprobs.append(drawn.logprob)
        if drawn.law is not None:
            sequence.laws.append(drawn.law)
        if drawn.token in request.stop_ids:
            return [self._finish(sequence, "stop")]
        if len(sequence.tokens) - len(request.prompt) == request.max_tokens:
            return [self._finish(sequence, "length")]
        return []

    def _finish_unasked(self, sequence: Sequence) -> list[Rollout]:
        family = [sequence, *self.scheduler.fork(sequence)]
        return [self._finish(member, "length") for member in family]

    def _finish(self, sequence: Sequence, reason: Finish) -> Rollout:
        self.scheduler.finish(sequence)
        return Rollout(
            request=sequence.request.id,
            sample=sequence.sample,
            prompt=tuple(sequence.request.prompt),
            completion=tuple(sequence.completion),
            logprobs=torch.tensor(sequence.logprobs, dtype=torch.float32),
            finish=reason,
            temperature=sequence.request.temperature,
            version=self.policy.version,
            digest=self.policy.digest,
            cached_tokens=min(sequence.cached, len(sequence.request.prompt)),
            law=Law.joined(sequence.laws) if sequence.laws else None,
        )


def _laws(ops: Ops, logits: Tensor, draws: Draws, ids: Tensor) -> Iterator[Law]:
    """What each row was drawn from, on the host."""
    law = Law.of(ops.kernels, *ops.drawn_from(logits, draws.temperature), ids).to(CPU)
    return (law.at(slice(row, row + 1)) for row in range(law.rows))


def default_pages(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of the pool, unless a caller says otherwise."""
    return max(64, min(POOL_PAGES, POOL_BYTES // page_bytes(config, dtype)))


def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of one page with the keys and values of all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * PAGE * dtype.itemsize
