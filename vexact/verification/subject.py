"""The model under verification: sampled, re-scored, cut and differentiated in any way that must change nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vexact.model.batch import Batch, Chunk
from vexact.model.gradients import Gradients
from vexact.model.ops import Ops
from vexact.model.origin import EMPTY, Origin, rolled
from vexact.model.pages import Pages, pages_for
from vexact.model.policy import Policy, Scored
from vexact.model.rollout import Rollout
from vexact.ranks import Ranks
from vexact.recipe import OptimizerSection
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.training.shards import Shards, lane_ranges
from vexact.training.trainer import Trainer
from vexact_kernels import Kernels

TEMPERATURES = (1.0, 0.6, 1.7, 0.0)
PROMPT_LENGTHS = (5, 33, 64, 17, 3, 90, 12, 50)
LEARNING_RATE = 1e-3  # large enough that every weight moves, in bfloat16 as well
ALL = 1 << 30  # tokens at once: the whole step in one micro-batch


@dataclass(frozen=True)
class Sizes:
    """How much is compared. requests × samples × tokens are sampled; `few` requests serve the variants, which are
    given their first `few_tokens` tokens only.

    sequences × length tokens are cut into chunks of each size; trained rollouts have their gradients taken, of up to
    `trained_tokens` sampled tokens each.
    """

    requests: int
    samples: int
    tokens: int
    few: int
    sequences: int
    length: int
    few_tokens: int = ALL
    trained: int = 10
    trained_tokens: int = 12


@dataclass(frozen=True)
class Stepped:
    """What an optimizer step left: the next policy, and the float32 first moments.

    The first moments keep every bit of a gradient, of which AdamW's first step leaves hardly more than the sign.
    """

    policy: Policy
    moments: dict[str, Tensor]


def itself(policy: Policy) -> Policy:
    """The view of an exact engine."""
    return policy


class Subject:
    """A policy that samples and one that scores (the same, unless a mutant says otherwise), and what they gave.

    view: what is verified in the place of any weights, by default they themselves; `clean` is what it looks at.
    """

    def __init__(
        self,
        policy: Policy,
        sizes: Sizes,
        sampling: Policy | None = None,
        view: Callable[[Policy], Policy] = itself,
    ) -> None:
        self.clean, self.view, self.policy, self.sizes = policy, view, view(policy), sizes
        self.sampling = sampling or self.policy

    @property
    def kernels(self) -> Kernels:
        return self.policy.ops.kernels

    @cached_property
    def requests(self) -> list[Request]:
        sizes = self.sizes
        return [
            Request(
                id=i,
                prompt=self.tokens(self.fitting(PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)], sizes.tokens), salt=i),
                n=sizes.samples,
                temperature=TEMPERATURES[(i + i // len(PROMPT_LENGTHS)) % len(TEMPERATURES)],
                seed=7,
                max_tokens=sizes.tokens,
            )
            for i in range(sizes.requests)
        ]

    @cached_property
    def rollouts(self) -> list[Rollout]:
        """Sampled with the sampler's own schedule."""
        return self.sample(self.requests)

    @cached_property
    def few(self) -> list[Rollout]:
        """The rollouts of the first few requests, as far as those go: a draw does not know how many follow it."""
        most = self.sizes.few_tokens
        return [
            replace(rollout, completion=rollout.completion[:most], logprobs=rollout.logprobs[:most])
            for rollout in self.rollouts
            if rollout.request < self.sizes.few
        ]

    @property
    def few_requests(self) -> list[Request]:
        most = min(self.sizes.tokens, self.sizes.few_tokens)
        return [replace(request, max_tokens=most) for request in self.requests[: self.sizes.few]]

    @cached_property
    def sequences(self) -> list[list[int]]:
        return self.random_sequences(salt=1000)

    def random_sequences(self, salt: int) -> list[list[int]]:
        length = self.fitting(self.sizes.length, 0)
        return [self.tokens(length, salt + i) for i in range(self.sizes.sequences)]

    @cached_property
    def whole(self) -> Tensor:
        """Logits [sequences · length, V] of the sequences, each in one chunk."""
        return self.logits_in_cuts(self.sequences, ALL)

    @cached_property
    def trained(self) -> list[Scored]:
        """Short rollouts in the order of their ids. More than there are lanes, so that a lane holds several."""
        shortest = sorted(self.rollouts, key=lambda rollout: len(rollout.prompt))[: self.sizes.trained]
        scored = [rollout.scored for rollout in sorted(shortest, key=lambda rollout: rollout.id) if rollout.completion]
        return [replace(each, tokens=each.tokens[: each.first + self.sizes.trained_tokens]) for each in scored]

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """Of the trained rollouts in one micro-batch."""
        return self.gradients_of(self.trained, ALL)

    @cached_property
    def stepped(self) -> Stepped | None:
        """After an optimizer step on the few rollouts in their own order, None where nothing was trained."""
        return self.stepped_on(range(len(self.few)), tokens_at_once=4096)

    def stepped_on(self, order: Sequence[int], tokens_at_once: int, ranks: Ranks | None = None) -> Stepped | None:
        """The same on rollouts that arrive in another order, in other micro-batches, or as one of several ranks, whose
        moments are then those of the stacks that it owns.
        """
        self.__dict__.pop("gradients", None)  # Make room: as large as the masters, and a trainer is five times that.
        stacked = self.clean.transformer.parameters.stacked(self.kernels)
        shards = self.shards(ranks or Ranks())
        masters = {name: tensor.to(torch.float32, copy=True) for name, tensor in stacked.items() if shards.owns(name)}
        del stacked
        section = OptimizerSection(lr=LEARNING_RATE, tokens_at_once=tokens_at_once)
        trainer = Trainer(self.clean, masters, optimizer=section)
        trainer.shards, trainer.view, trainer.accepts = shards, self.view, {self.policy.digest}
        advantages = torch.tensor([(-1.0) ** i * (1 + i % 3) / 2 for i in order])
        trainer.step(self.arriving(order), advantages)
        if trainer.policy.version == self.policy.version:
            return None
        return Stepped(self.view(trainer.policy), trainer.optimizer.first)

    def shards(self, ranks: Ranks) -> Shards:
        return Shards(self.policy.config, self.kernels, ranks)

    def arriving(self, order: Sequence[int]) -> list[Rollout]:
        """The few rollouts as the trainer is handed them."""
        return [self.few[i] for i in order]

    def tokens(self, count: int, salt: int) -> list[int]:
        """Random token ids, the same in every run."""
        rng = random.Random(salt)
        return [rng.randrange(self.policy.config.vocab_size) for _ in range(count)]

    def fitting(self, length: int, further: int) -> int:
        """`length`, or as much of it as leaves room for `further` tokens among the model's positions."""
        return max(1, min(length, self.policy.config.max_positions - further))

    def sampler(self, pages: int, policy: Policy | None = None, **schedule: Any) -> Sampler:
        return Sampler(policy or self.sampling, pages=pages, **schedule)

    def sample(
        self,
        requests: Sequence[Request],
        policy: Policy | None = None,
        fill: float | None = None,
        shuffled: bool = False,
        **schedule: Any,
    ) -> list[Rollout]:
        """Rollouts by another schedule, page layout (`shuffled`) or memory content (`fill`)."""
        longest = max(len(request.prompt) + request.max_tokens for request in requests)
        most = min(schedule.get("running", 64), sum(request.n for request in requests))
        sampler = self.sampler(2 * (most + 1) * pages_for(longest), policy, **schedule)
        if fill is not None:
            sampler.pages.fill(min(fill, torch.finfo(self.policy.dtype).max))
        if shuffled:
            taken = sampler.pages.take(sampler.pages.count)
            random.Random(5).shuffle(taken)
            sampler.pages.give_back(taken)
        return sampler.run(requests)

    def rescore(self, rollouts: Sequence[Rollout], tokens_at_once: int = 4096, policy: Policy | None = None) -> Tensor:
        """float32 [completion tokens of all rollouts]: what training computes."""
        return (policy or self.policy).logprobs([rollout.scored for rollout in rollouts], tokens_at_once).logprob

    def logits_in_cuts(
        self,
        sequences: Sequence[Sequence[int]],
        size: int,
        policy: Policy | None = None,
        ops: Ops | None = None,
        fill: float | None = None,
    ) -> Tensor:
        """Logits float32 [tokens, V], sequences behind one another, computed in chunks of `size` over one pool."""
        policy = policy or self.policy
        ops = ops or policy.ops
        longest = max(map(len, sequences))
        pages = Pages(policy.config, len(sequences) * pages_for(longest), policy.dtype, policy.device)
        if fill is not None:
            pages.fill(min(fill, torch.finfo(policy.dtype).max))
        tables = [pages.take(pages_for(longest)) for _ in sequences]
        parts: list[list[Tensor]] = [[] for _ in sequences]
        for first in range(0, longest, size):
            members = [i for i, tokens in enumerate(sequences) if first < len(tokens)]
            cut = [
                Chunk(tokens[first : first + size], first, tables[i], Origin(state=rolled(EMPTY, tokens[:first])))
                for i, tokens in ((i, sequences[i]) for i in members)
            ]
            batch = Batch.of(cut, policy.device)
            over = ops.over(batch)
            logits = over.logits(policy.transformer.forward(batch, pages, over), policy.transformer.head)
            for i, rows in zip(members, logits.split(batch.chunks.start.diff().tolist()), strict=True):
                parts[i].append(rows)
        return torch.cat([rows for part in parts for rows in part])

    def published(self, policy: Policy) -> Policy:
        """What the sampler is handed when the trainer publishes: that policy itself."""
        return policy

    def direction(self, sequences: Sequence[Scored], scale: float = 1.0) -> Tensor:
        """A fixed gradient of the log-probabilities and entropies: float32 [2, scored tokens] on the host."""
        rows = sum(sequence.rows for sequence in sequences)
        return torch.randn(2, rows, generator=torch.Generator().manual_seed(3)) * scale

    def gradients_of(
        self,
        sequences: Sequence[Scored],
        tokens_at_once: int,
        direction: Tensor | None = None,
        policy: Policy | None = None,
        recompute: bool = False,
    ) -> dict[str, Tensor]:
        """Gradient of every stack, in micro-batches of that many tokens."""
        policy = policy or self.policy
        given = (self.direction(sequences) if direction is None else direction).to(policy.device)
        gradients = Gradients(policy.config, policy.ops.kernels)
        for part, logprobs in policy.gradient_passes(sequences, gradients, tokens_at_once, recompute=recompute):
            torch.autograd.backward([logprobs.logprob, logprobs.entropy], [*given[:, part]])
        return gradients.totals()

    def gradients_by_lane(self, sequences: Sequence[Scored]) -> dict[str, Tensor]:
        """Gradient of every stack, each lane on its own, as a rank computes it, and then added as its owner does."""
        gradients, shards = Gradients(self.policy.config, self.kernels), self.shards(Ranks())
        given = self.direction(sequences).to(self.policy.device)
        row = 0
        for lane, members in lane_ranges(len(sequences)).items():
            gradients.clear()
            part = sequences[members.start : members.stop]
            for rows, logprobs in self.policy.gradient_passes(part, gradients, ALL, one_lane=True):
                rows = slice(row + rows.start, row + rows.stop)
                torch.autograd.backward([logprobs.logprob, logprobs.entropy], [*given[:, rows]])
            row += sum(sequence.rows for sequence in part)
            shards.fold(gradients, [lane])
        return shards.gradients()


class Replaced(Ops):
    """Ops to whom the embedding's rows are given, so that a check decides what enters the model."""

    def __init__(self, kernels: Kernels, rows: Tensor) -> None:
        super().__init__(kernels)
        self._rows = rows

    def embed(self, tokens: Tensor, weight: Any) -> Tensor:
        return self._rows
