"""Which tokens are computed next, and in which pages.

Requests join and leave at any step. A sequence knows how many of its tokens are computed; the scheduler hands out the
next ones in chunks. One uncomputed token or a hundred make no difference here: a prompt, the last drawn token and a
sequence that lost its pages are the same case. The schedule can change no bit, only the time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from vexact.errors import BadInput
from vexact.model.batch import Chunk
from vexact.model.draws import Address
from vexact.model.law import Law
from vexact.model.origin import EMPTY, Origin, rolled
from vexact.model.pages import OutOfPages, Pages, pages_for
from vexact.rollout.request import Request
from vexact_kernels import PAGE


@dataclass(eq=False)  # two sequences are never the same one, however alike
class Sequence:
    """Prompt and completion so far. `computed` tokens have keys and values in `pages`."""

    request: Request
    sample: int
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    laws: list[Law] = field(default_factory=list)  # of one row each, where they are wanted
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    siblings: int = 0  # further samples of the request that begin when the prompt is computed
    state: int = EMPTY  # rolling hash of the computed tokens

    @property
    def completion(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def next_draw(self) -> Address:
        request = self.request
        return Address(request.seed, request.id, self.sample, len(self.tokens), request.temperature)


class Planned(NamedTuple):
    """A chunk of a sequence for the next forward."""

    sequence: Sequence
    length: int

    @property
    def chunk(self) -> Chunk:
        sequence, request = self.sequence, self.sequence.request
        first = sequence.computed
        origin = Origin(request.id, sequence.sample, len(request.prompt), sequence.state)
        return Chunk(sequence.tokens[first : first + self.length], first, sequence.pages, origin)


class Scheduler:
    """Waiting and running sequences over one pool of pages.

    tokens_per_step: most tokens of one forward; chunk: most tokens of one sequence in it; running: most sequences that
    hold pages.
    """

    def __init__(self, pages: Pages, tokens_per_step: int, chunk: int, running: int) -> None:
        if min(tokens_per_step, chunk, running) < 1:
            raise BadInput("tokens_per_step, chunk and running must be at least 1")
        self.pages = pages
        self._tokens_per_step, self._chunk, self._limit = tokens_per_step, chunk, running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        """Raises BadInput where the request could not finish even alone."""
        needed = pages_for(len(request.prompt) + request.max_tokens)
        if needed > self.pages.count:
            raise BadInput(f"request {request.id}: needs {needed} pages, the pool has {self.pages.count}")
        self.waiting.append(Sequence(request, 0, list(request.prompt), siblings=request.n - 1))

    def plan(self) -> list[Planned]:
        """Chunks of the next forward, their pages taken. Sequences with the least left to compute go first."""
        self._admit()
        planned: list[Planned] = []
        budget, preemptions = self._tokens_per_step, self.preemptions
        for sequence in sorted(self.running, key=lambda s: len(s.tokens) - s.computed):
            if budget == 0:
                break
            if self.preemptions > preemptions and sequence not in self.running:
                continue  # it lost its pages to one planned before it
            length = min(len(sequence.tokens) - sequence.computed, self._chunk, budget)
            if self._reserve(sequence, sequence.computed + length, planned):
                planned.append(Planned(sequence, length))
                budget -= length
        return planned

    def computed(self, planned: Planned) -> None:
        """The chunk's keys and values are in pages now."""
        sequence, end = planned.sequence, planned.sequence.computed + planned.length
        sequence.state = rolled(sequence.state, sequence.tokens[sequence.computed : end])
        sequence.computed = end

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """The siblings of a sequence whose prompt is computed, sharing its full pages."""
        siblings = []
        for sample in range(1, sequence.siblings + 1):
            sibling = Sequence(sequence.request, sample, list(sequence.tokens))
            if len(self.running) < self._limit and self._share_pages(sequence, sibling):
                self.running.append(sibling)
            else:
                self.waiting.appendleft(sibling)
            siblings.append(sibling)
        sequence.siblings = 0
        return siblings

    def finish(self, sequence: Sequence) -> None:
        """Give the sequence's pages back and forget it."""
        self.pages.give_back(sequence.pages)
        sequence.pages = []
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def _admit(self) -> None:
        """Let sequences run, with room for the siblings that will fork from each once its prompt is computed."""
        taken = sum(1 + sequence.siblings for sequence in self.running)
        while self.waiting and (not self.running or taken + 1 + self.waiting[0].siblings <= self._limit):
            first_chunk = min(len(self.waiting[0].tokens), self._chunk)
            if pages_for(first_chunk) > self.pages.free and self.running:
                return
            taken += 1 + self.waiting[0].siblings
            self.running.append(self.waiting.popleft())

    def _reserve(self, sequence: Sequence, tokens: int, planned: list[Planned]) -> bool:
        """Pages for that many tokens; where none is free, the youngest sequence not planned goes back to wait."""
        missing = pages_for(tokens) - len(sequence.pages)
        while missing > self.pages.free:
            keep = [sequence, *(other.sequence for other in planned)]
            victim = next((other for other in reversed(self.running) if other not in keep), None)
            if victim is None:
                return False
            self._preempt(victim)
        if missing > 0:
            sequence.pages.extend(self.pages.take(missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.pages.give_back(sequence.pages)
        sequence.pages, sequence.computed, sequence.cached, sequence.state = [], 0, 0, EMPTY
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)

    def _share_pages(self, sequence: Sequence, sibling: Sequence) -> bool:
        """Full pages are shared; the last, unfinished one is copied, because both will write to it."""
        full, unfinished = divmod(sequence.computed, PAGE)
        try:
            own = [self.pages.copy(sequence.pages[full])] if unfinished else []
        except OutOfPages:
            return False
        sibling.pages = self.pages.share(sequence.pages[:full]) + own
        sibling.computed = sibling.cached = sequence.computed
        sibling.state = sequence.state
        return True
