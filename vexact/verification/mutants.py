"""Deliberately broken variants. Each must be noticed by the check that exists for its fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from vexact.model.batch import Batch
from vexact.model.gradients import Gradients
from vexact.model.ops import Ops
from vexact.model.pages import Pages
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.ranks import Ranks
from vexact.rollout.sampler import Sampler
from vexact.testing import Comparison, bits
from vexact.training.shards import Shards
from vexact.verification import checks, updates
from vexact.verification.subject import Sizes, Subject
from vexact_kernels import PAGE, PORTABLE, Chunks, Kernels, Packed, Segments, Stream


class Broken:
    """Kernels that do everything right except what a subclass does wrong."""

    name = "mutant"

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)


class OneBit(Broken):
    """The last bit of the first log-probability it ever computes."""

    spent = False

    def logprob(self, *args: Any, **options: Any) -> Any:
        logprob, *rest = self.kernels.logprob(*args, **options)
        if not self.spent:
            logprob.view(torch.int32)[0] ^= 1
            self.spent = True
        return logprob, *rest


class ReversedSum(Broken):
    """The sum of each logit runs from the last column to the first."""

    def matmul(self, x: Tensor, w: Packed, bias: Tensor | None = None, *, logits: bool = False) -> Tensor:
        if logits:
            x, w = x.flip(-1), self.kernels.pack(self.kernels.unpack(w).flip(-1).contiguous())
        return self.kernels.matmul(x, w, bias, logits=logits)


class SplitSum(Broken):
    """The sum of each logit is cut in two where `when` says so of the input."""

    def __init__(self, kernels: Kernels, when: Callable[[Tensor], bool]) -> None:
        super().__init__(kernels)
        self.when = when

    def matmul(self, x: Tensor, w: Packed, bias: Tensor | None = None, *, logits: bool = False) -> Tensor:
        if not (logits and self.when(x)):
            return self.kernels.matmul(x, w, bias, logits=logits)
        weight, half = self.kernels.unpack(w), w.columns // 2
        parts = [
            self.kernels.matmul(x[:, cut].contiguous(), self.kernels.pack(weight[:, cut].contiguous()), logits=True)
            for cut in (slice(None, half), slice(half, None))
        ]
        return self.kernels.add(*parts)


class Flushing(Broken):
    """Results pass through arithmetic in the caller's floating-point mode."""

    def matmul(self, x: Tensor, w: Packed, bias: Tensor | None = None, *, logits: bool = False) -> Tensor:
        return self.kernels.matmul(x, w, bias, logits=logits) * 1.0

    def matmul_dx(self, dy: Tensor, w: Packed) -> Tensor:
        return self.kernels.matmul_dx(dy, w) * 1.0


class WrongPage(Broken):
    """Where a chunk follows more than a page of prefix, the first two pages are taken for each other."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, *rest: Any) -> Any:
        table = chunks.table.clone()
        for first, prefix in zip(chunks.table_start.tolist(), chunks.prefix.tolist(), strict=False):
            if prefix > PAGE:
                table[first : first + 2] = table[first : first + 2].flip(0)
        return self.kernels.attention(q, k, v, replace(chunks, table=table), *rest)


class ReadsUnused(Broken):
    """Masked is multiplied by zero instead of being absent."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, *pages_and_scale: Any) -> Any:
        y, lse = self.kernels.attention(q, k, v, chunks, *pages_and_scale)
        values = pages_and_scale[1]
        return y + 0.0 * values[int(chunks.table[-1]), 0, -1, 0], lse


class Leaking(Broken):
    """A row hears of its batch: zero times the largest activation is added."""

    def matmul(self, x: Tensor, w: Packed, bias: Tensor | None = None, *, logits: bool = False) -> Tensor:
        y = self.kernels.matmul(x, w, bias, logits=logits)
        return y + (0.0 * x.amax()).to(y.dtype)


class ForgetfulLane(Broken):
    """A lane ends with each micro-batch, and does not go on in the next."""

    def matmul_dw(self, dy: Tensor, x: Tensor, segments: Segments, stream: Stream) -> None:
        folds = Segments(segments.ends, torch.ones_like(segments.fold))
        self.kernels.matmul_dw(dy, x, folds, stream)


class Forgetful(Broken):
    """What is computed from the same numbers a second time differs in a bit."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self.seen: set[bytes] = set()

    def swiglu(self, gate_up: Tensor) -> Tensor:
        y, numbers = self.kernels.swiglu(gate_up), bits(gate_up).cpu().numpy().tobytes()
        if numbers in self.seen:
            bits(y)[0, 0] ^= 1
        self.seen.add(numbers)
        return y


class Untempered(Broken):
    """What is recorded is the log-probability at temperature 1."""

    def logprob(self, logits: Tensor, ids: Tensor, temperature: Tensor, **options: Any) -> Any:
        return self.kernels.logprob(logits, ids, torch.ones_like(temperature), **options)


class CoarseKeys(Broken):
    """Keys are cut to four bits fewer than the dtype holds."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, *rest: Any) -> Any:
        return self.kernels.attention(q, (bits(k) & -16).view(k.dtype), v, chunks, *rest)


class Positions(Ops):
    """Positions are counted from the chunk's first token."""

    prefix = torch.empty(0, dtype=torch.int64)

    def over(self, batch: Batch) -> Ops:
        mine = Positions(self.kernels)
        prefix = batch.chunks.prefix.repeat_interleave(batch.chunks.start.diff())
        mine.prefix = prefix.to(batch.positions.device)
        return mine

    def rope(self, x: Tensor, positions: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        return super().rope(x, positions - self.prefix, tables)


class SharedPages(Pages):
    """Siblings write to one and the same unfinished page."""

    def copy(self, page: int) -> int:
        return self.share([page])[0]


class Sharing(Subject):
    """A sampler over such pages."""

    def sampler(self, pages: int, policy: Policy | None = None, **schedule: Any) -> Sampler:
        sampler = super().sampler(pages, policy, **schedule)
        shared = SharedPages(self.policy.config, pages, self.policy.dtype, self.policy.device)
        sampler.pages = sampler.scheduler.pages = shared
        return sampler


class Stale(Subject):
    """A sampler that is handed the old weights under the new version's number."""

    def published(self, policy: Policy) -> Policy:
        return replace(self.policy, version=policy.version)


class Unpublished(Subject):
    """A sampler that keeps the old weights and their version."""

    def published(self, policy: Policy) -> Policy:
        return self.policy


class Renumbered(Subject):
    """Rollouts that are numbered as they arrive, so that a trainer cannot know their order."""

    def arriving(self, order: Sequence[int]) -> list[Rollout]:
        return [replace(rollout, request=i, sample=0) for i, rollout in enumerate(super().arriving(order))]


class Reduced(Shards):
    """Every other round is added up apart, and both sums at the end: as ranks do that add up their own lanes first."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._apart: dict[str, Tensor] = {}

    def fold(self, gradients: Gradients, lanes: Sequence[int]) -> None:
        self._totals, self._apart = self._apart, self._totals
        super().fold(gradients, lanes)

    def gradients(self) -> dict[str, Tensor]:
        for name, other in self._apart.items():
            self._totals[name] = self.kernels.add(self._totals[name], other)
        return super().gradients()


class Reducing(Subject):
    """Ranks that do so."""

    def shards(self, ranks: Ranks) -> Shards:
        return Reduced(self.policy.config, self.kernels, ranks)


@dataclass(frozen=True)
class Mutant:
    """How a subject is broken, and the check that must notice. applies: whether these kernels have that check."""

    name: str
    check: str
    run: Callable[[Subject], Comparison]
    make: Callable[[Policy, Sizes], Subject]
    applies: bool = True


def everywhere(policy: Policy, sizes: Sizes, wrap: Callable[[Kernels], Broken]) -> Subject:
    return Subject(computing_with(policy, wrap), sizes)


def sampler_only(policy: Policy, sizes: Sizes, wrap: Callable[[Kernels], Broken]) -> Subject:
    return Subject(policy, sizes, sampling=computing_with(policy, wrap))


def computing_with(policy: Policy, wrap: Callable[[Kernels], Broken]) -> Policy:
    return replace(policy, ops=Ops(cast(Kernels, wrap(policy.ops.kernels))))


def sampler_from_chunk_starts(policy: Policy, sizes: Sizes) -> Subject:
    return Subject(policy, sizes, sampling=replace(policy, ops=Positions(policy.ops.kernels)))


def mutants(kernels: Kernels) -> list[Mutant]:
    """Every mutant that has a check. kernels: the honest ones."""
    return [mutant for mutant in _every(kernels) if mutant.applies]


def _every(kernels: Kernels) -> list[Mutant]:
    theorem = partial(checks.sampler_is_scorer, temperature=1.0)
    tempered = partial(checks.sampler_is_scorer, temperature=0.6)
    at_one, published = "sampler = re-scoring, temperature 1", "after an optimizer step and a publish"
    honest = partial(checks.implementation, other=kernels)
    on_cpu = not checks.absence(kernels)
    implementation = "instruction set" if on_cpu else "as on a CPU"
    by_batch = partial(SplitSum, when=lambda x: x.shape[0] > 4)
    by_step = partial(SplitSum, when=lambda x: x.shape[0] > 20)
    by_threads = partial(SplitSum, when=lambda x: torch.get_num_threads() == 3)
    lanes = "gradients, a lane at a time as on 8 ranks"
    return [
        Mutant("one bit of one logprob in the sampler", at_one, theorem, partial(sampler_only, wrap=OneBit)),
        Mutant(
            "a log-probability recorded at temperature 1",
            "sampler = re-scoring, temperature 0.6",
            tempered,
            partial(sampler_only, wrap=Untempered),
        ),
        Mutant("positions counted from the chunk's start", at_one, theorem, sampler_from_chunk_starts),
        Mutant("siblings that share an unfinished page", at_one, theorem, Sharing),
        Mutant("keys cut short in the sampler's pages", at_one, theorem, partial(sampler_only, wrap=CoarseKeys)),
        Mutant(
            "a sum in reverse order",
            implementation,
            honest,
            partial(everywhere, wrap=ReversedSum),
            applies=kernels.profile == PORTABLE,
        ),
        Mutant("a sum split by batch size", "batch of one", checks.batch_of_one, partial(everywhere, wrap=by_batch)),
        Mutant(
            "a sum split by micro-batch",
            "micro-batches of log-probabilities",
            checks.micro_batches,
            partial(everywhere, wrap=by_step),
        ),
        Mutant(
            "a sum split by thread count",
            "threads 3",
            partial(checks.threads, count=3),
            partial(everywhere, wrap=by_threads),
            applies=on_cpu,
        ),
        Mutant(
            "a page off by one",
            "prompts of 63, 64, 65, 127, 128, 129",
            checks.page_edges,
            partial(everywhere, wrap=WrongPage),
        ),
        Mutant(
            "unused memory times zero",
            "pages full of NaN",
            partial(checks.filled_pages, value=float("nan")),
            partial(everywhere, wrap=ReadsUnused),
        ),
        Mutant(
            "a batch mate times zero",
            "NaN batch mates",
            partial(checks.mates, value=float("nan")),
            partial(everywhere, wrap=Leaking),
        ),
        Mutant(
            "subnormals flushed as the caller does",
            "flush-denormal: subnormal gradients",
            updates.flushed_gradients,
            partial(everywhere, wrap=Flushing),
            applies=on_cpu,
        ),
        Mutant(
            "a lane that ends with its micro-batch",
            "gradients, micro-batches of one",
            partial(updates.gradients, tokens_at_once=1),
            partial(everywhere, wrap=ForgetfulLane),
        ),
        Mutant(
            "a layer that is another one when computed again",
            "gradients, layers computed again",
            updates.recomputed,
            partial(everywhere, wrap=Forgetful),
        ),
        Mutant("ranks that add up their own lanes first", lanes, updates.lane_by_lane, Reducing),
        Mutant("old weights after a publish", published, updates.after_publish, Stale),
        Mutant("a step in order of arrival", "shuffled arrival, then a step", updates.shuffled_arrival, Renumbered),
        Mutant("no publish", published, updates.after_publish, Unpublished),
    ]
