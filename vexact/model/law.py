"""The law that tokens were drawn from, kept with a rollout where scoring would not find it again.

A sampler's law is mostly recomputed from its weights, bit for bit, and need not be kept. That of a sampler whose bits
follow from its schedule is what only the draw itself knows.

Kept are the logits that were drawn from, and not their log-probabilities: with the largest and the sum that the kernels
found of them they give the very bits that a recomputed softmax gives, at any temperature. A vocabulary of up to `WHOLE`
ids is kept whole. Of a larger one the `KEPT` greatest are, the drawn id always among them, and the mass of all others,
which is spread evenly over them: the flat reading of a tail, ours. What is kept has the probability that it has in the
whole law, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from vexact.model.batch import Batch
from vexact_kernels import Kernels, Softmax

WHOLE = 1024  # ids of a vocabulary that is kept whole
KEPT = 128  # ids of a larger one


@dataclass(frozen=True)
class Law:
    """Of tokens one behind the other, a row each; of one rollout they lie on the host.

    logits: float32 [rows, K], −inf where nothing is drawn; max, sum: float32 [rows], of the whole vocabulary at
    `temperature`, as `Kernels.logprob` finds them; temperature: float32 [rows] that was drawn at, where 0 means 1. ids:
    int32 [rows, K], ascending, which ids those are; tail: float32 [rows], natural log of the mass of all others; both
    None where K is the vocabulary.
    """

    vocabulary: int
    logits: Tensor
    max: Tensor
    sum: Tensor
    temperature: Tensor
    ids: Tensor | None = None
    tail: Tensor | None = None

    @staticmethod
    def of(kernels: Kernels, logits: Tensor, temperature: Tensor, drawn: Tensor) -> Law:
        """logits: float32 [rows, V] whose softmax at temperature float32 [rows] was drawn from; drawn: int64 [rows].

        A row that is not finite gives one that means nothing.
        """
        vocabulary = logits.shape[1]
        _, _, largest, total, finite = kernels.logprob(logits, drawn, temperature, entropy=False)
        whole = Law(vocabulary, logits, largest, total, temperature)
        if vocabulary <= WHOLE:
            return whole
        kept = greatest(torch.where(finite[:, None], logits, 0.0), drawn, KEPT)
        rest = torch.where(kept, -torch.inf, logits)
        _, _, second, mass, any_left = kernels.logprob(rest, drawn, temperature, entropy=False)
        log = (second - largest) + kernels.log(torch.where(any_left, mass, 1.0)) - kernels.log(total)
        ids = kept.nonzero()[:, 1].view(len(logits), KEPT)
        tail = torch.where(any_left, log, -torch.inf)
        return replace(whole, logits=logits.gather(1, ids), ids=ids.to(torch.int32), tail=tail)

    @staticmethod
    def joined(laws: Sequence[Law]) -> Law:
        """All of their rows, in new memory. At least one law, all of one kind."""
        columns = {name: torch.cat([law._columns[name] for law in laws]) for name in laws[0]._columns}
        return Law(laws[0].vocabulary, **columns)

    @property
    def rows(self) -> int:
        return len(self.max)

    def at(self, rows: Tensor | slice) -> Law:
        """Some of the rows: int64 on the same device."""
        return self._each(lambda column: column[rows])

    def to(self, device: torch.device) -> Law:
        return self._each(lambda column: column.to(device, non_blocking=True))

    def logprobs(self, kernels: Kernels) -> Tensor:
        """Natural logs of its probabilities, float32 [rows, V]."""
        return self._whole(self._shifted, self._others(kernels)) - kernels.log(self.sum)[:, None]

    def softmax(self, kernels: Kernels, temperature: Tensor) -> Softmax:
        """Rows [rows, V] that are this law at another temperature, float32 [rows], where 0 means 1.

        At the temperature that was drawn at these are the logits that were drawn from. At another one a logit is
        T·(z/T′ − max), rounded twice more, and the largest is 0.
        """
        same, factor = self.temperature == temperature, divisor(temperature)
        logits = torch.where(same[:, None], self.logits, self._shifted * factor[:, None])
        largest = torch.where(same, self.max, 0.0)
        return Softmax(self._whole(logits, (self._others(kernels) + largest) * factor), largest, self.sum)

    @property
    def _columns(self) -> dict[str, Tensor]:
        named = ((column.name, getattr(self, column.name)) for column in fields(self))
        return {name: value for name, value in named if isinstance(value, Tensor)}

    @property
    def _shifted(self) -> Tensor:
        """z/T − max of what is kept, in the operations of the kernels."""
        return (self.logits / divisor(self.temperature)[:, None] + 0.0) - self.max[:, None]

    def _each(self, change: Callable[[Tensor], Tensor]) -> Law:
        return Law(self.vocabulary, **{name: change(column) for name, column in self._columns.items()})

    def _others(self, kernels: Kernels) -> Tensor:
        """z/T − max of each id that is not kept: an even share of the tail, float32 [rows]."""
        if self.ids is None or self.tail is None:
            return torch.zeros_like(self.max)
        count = torch.full_like(self.max, float(self.vocabulary - self.ids.shape[1]))
        return (self.tail + kernels.log(self.sum)) - kernels.log(count)

    def _whole(self, kept: Tensor, others: Tensor) -> Tensor:
        """[rows, V] of what is kept, [rows, K], and of each other id, [rows]."""
        if self.ids is None:
            return kept
        return others[:, None].repeat(1, self.vocabulary).scatter_(1, self.ids.long(), kept)


Laws = Mapping[tuple[int, int], Law]  # by request and sample


class Kept:
    """Rows of a batch with the laws of their sequences: in the place of a policy that would compute them."""

    def __init__(self, laws: Laws, batch: Batch, rows: Tensor, kernels: Kernels) -> None:
        """rows: int64 [R] on the host, ascending, of sampled tokens' predecessors. Raises RuntimeError where the law of
        a sequence is not there, or of other length."""
        self.kernels = kernels
        chunk = torch.searchsorted(batch.chunks.start, rows, right=True) - 1
        place = rows - batch.chunks.start[chunk] + batch.chunks.prefix[chunk] + 1  # of the token that is drawn there
        found: list[Law] = []
        for index, count in zip(*(x.tolist() for x in chunk.unique(return_counts=True)), strict=True):
            origin = batch.origins[index]
            law = laws.get((origin.request, origin.sample))
            drawn = place[chunk == index] - origin.prompt
            if law is None or law.rows <= int(drawn.max()):
                has = "no law" if law is None else f"a law of {law.rows} tokens"
                raise RuntimeError(f"rollout {(origin.request, origin.sample)} has {has}, {count} are centred")
            found.append(law.at(drawn))
        self.law = Law.joined(found) if found else None

    def softmax(self, part: slice, ids: Tensor, temperature: Tensor) -> Softmax:
        """Of some of the rows. temperature: of those."""
        if self.law is None:
            raise RuntimeError("there are no rows")
        return self.law.at(part).to(temperature.device).softmax(self.kernels, temperature)


def greatest(logits: Tensor, drawn: Tensor, count: int) -> Tensor:
    """Which ids are the `count` greatest of each row, bool [R, V]; ties by id, the drawn one first. A row is looked at
    by itself, so its batch changes nothing."""
    ranked = logits.scatter(1, drawn[:, None], torch.inf)
    least = ranked.topk(count, dim=1).values[:, -1:]
    above, equal = ranked > least, ranked == least
    wanted = count - above.sum(dim=1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=1) <= wanted))


def row_bytes(vocabulary: int) -> int:
    """Of one token's law."""
    return 4 * (vocabulary + 3) if vocabulary <= WHOLE else 4 * (2 * KEPT + 4)


def divisor(temperature: Tensor) -> Tensor:
    return torch.where(temperature == 0, 1.0, temperature)
