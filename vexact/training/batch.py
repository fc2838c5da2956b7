"""The rollouts that a step trains, and what their tokens need, in order of their ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from vexact.model.law import Laws
from vexact.model.policy import Scored


@dataclass(frozen=True)
class TrainingBatch:
    """sequences: whole ones, in order of their ids, each with a scored token. The rest are columns over their tokens,
    [tokens] on the device, sequences behind one another; None where nothing asks for one.

    behaviour, old, reference: float32 logprobs, as the sampler recorded them, under the trainer's policy at the start
    of the step, and under the reference policy. source: those at the weights that sampled, in the trainer's arithmetic,
    where these are older; None where they are `old`. advantage: float32. weight, mask: a remedy's answer, float32 and
    bool.

    laws: what each sequence was drawn from, by request and sample, where rollouts kept it; whatever is chosen of the
    batch, they are found by name.
    """

    sequences: Sequence[Scored]
    behaviour: Tensor
    advantage: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None
    source: Tensor | None = None
    weight: Tensor | None = None
    mask: Tensor | None = None
    laws: Laws = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        return [sequence.rows for sequence in self.sequences]

    @property
    def cuts(self) -> list[slice]:
        """The rows of each sequence."""
        ends = list(accumulate(self.lengths))
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    @property
    def counts(self) -> list[int]:
        """Trained tokens of each sequence. Reads the device once where there is a mask."""
        if self.mask is None:
            return self.lengths
        counts: list[int] = torch.stack([self.mask[cut].sum() for cut in self.cuts]).tolist()
        return counts

    def take(self, chosen: Sequence[int]) -> TrainingBatch:
        """Some of the sequences, at least one, ascending."""
        if len(chosen) == len(self.sequences):
            return self
        cuts = self.cuts
        columns: dict[str, Any] = {
            column.name: torch.cat([getattr(self, column.name)[cuts[index]] for index in chosen])
            for column in fields(self)
            if isinstance(getattr(self, column.name), Tensor)
        }
        return replace(self, sequences=[self.sequences[index] for index in chosen], **columns)

    def mini_batches(self, count: int) -> list[TrainingBatch]:
        """Consecutive sequences, so that groups stay together, in parts of sizes as equal as can be; none is empty."""
        total = len(self.sequences)
        bounds = [index * total // count for index in range(count + 1)]
        return [self.take(range(begin, end)) for begin, end in pairwise(bounds) if begin < end]

    def within(self, rows: slice) -> list[slice]:
        """The sequences of a micro-batch, as rows of it."""
        return [
            slice(cut.start - rows.start, cut.stop - rows.start)
            for cut in self.cuts
            if rows.start <= cut.start and cut.stop <= rows.stop
        ]
