"""Where parameter gradients are summed: a running lane and a total for each stack.

The step's rollouts, in the order of their ids, are cut into 8 lanes of consecutive rollouts. Inside a lane one chain
runs over tokens and continues across micro-batches; finished lanes are added in order. So the gradient does not know
how the step was cut into micro-batches, how those were packed, or in which order rollouts arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from vexact.model.checkpoint import shapes
from vexact.model.config import ModelConfig
from vexact.model.parameters import EMBEDDING, stacks
from vexact_kernels import LANES, Kernels, Segments, Stream

EMBEDDING_STREAM = "embedding"  # apart from the head's stream of a tied weight until one final add


def lanes_of(count: int, lanes: int = LANES) -> list[int]:
    """The lane of each of `count` rollouts: consecutive ones, sizes as equal as can be."""
    return [index * lanes // count for index in range(count)]


def segments_of(lengths: Sequence[int], lane_of: Sequence[int], following_lane: int | None) -> Segments:
    """Lane cuts of one micro-batch.

    lengths: tokens of each rollout in it, in order of ids; lane_of: their lanes, ascending. following_lane: the lane of
    the first rollout behind this micro-batch, None at the end of the step: the last segment's lane ends here unless
    that rollout continues it.
    """
    ends, fold = [], []
    bounds = list(accumulate(lengths))
    for i, end in enumerate(bounds):
        following = lane_of[i + 1] if i + 1 < len(bounds) else following_lane
        if following != lane_of[i]:
            ends.append(end)
            fold.append(1)
        elif i + 1 == len(bounds):
            ends.append(end)
            fold.append(0)
    return Segments(torch.tensor(ends, dtype=torch.int64), torch.tensor(fold, dtype=torch.uint8))


def rows_in(segments: Segments, rows: Tensor) -> Segments:
    """The same lanes counted over some rows (int64 [R], ascending, on the host) of the batch."""
    return Segments(torch.searchsorted(rows, segments.ends), segments.fold)


def part_of(segments: Segments, part: slice) -> Segments:
    """The same lanes over rows part.start … part.stop, when all parts are taken in order. Every lane has rows."""
    first, last = int(part.start), int(part.stop)
    ends, fold = [], []
    begin = 0
    for end, folds in zip(segments.ends.tolist(), segments.fold.tolist(), strict=True):
        if max(begin, first) < min(end, last):
            ends.append(min(end, last) - first)
            fold.append(folds if end <= last else 0)
        begin = end
    return Segments(torch.tensor(ends, dtype=torch.int64), torch.tensor(fold, dtype=torch.uint8))


class Gradients:
    """The gradient of one step for every stack of a model, float32, on the kernels' device."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        self.config, self.kernels = config, kernels
        self._streams: dict[str, Stream] = {}

    def stream(self, name: str, shape: tuple[int, ...], *, embedding: bool = False) -> Stream:
        """The stream of a stack, made on first use. `embedding`: that of the lookup, apart from the head's."""
        key = EMBEDDING_STREAM if embedding else name
        if key not in self._streams:
            device = self.kernels.device
            lane, total = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
            touched = torch.empty(shape[0], dtype=torch.uint8, device=device) if embedding else None
            self._streams[key] = Stream(lane, total, touched=touched)
            self._clear(self._streams[key])
        return self._streams[key]

    def clear(self) -> None:
        """Begin a new step: every lane and total is +0 again."""
        for stream in self._streams.values():
            self._clear(stream)

    @staticmethod
    def _clear(stream: Stream) -> None:
        stream.exact = False
        if stream.lane.ndim == 2 and stream.touched is None:  # of a product: nobody will read what lies there now
            stream.lane_is_zero = stream.total_is_zero = True
            return
        stream.lane.zero_()
        stream.total.zero_()
        if stream.touched is not None:
            stream.touched.zero_()

    def totals(self) -> dict[str, Tensor]:
        """Gradient of every stack. Raises RuntimeError where a parameter met no backward pass."""
        return stack_totals(self.config, {name: self.total(name) for name in stream_shapes(self.config)}, self.kernels)

    def total(self, name: str) -> Tensor:
        """The finished lanes of one stream, added up. Raises RuntimeError where it met no backward pass."""
        if name not in self._streams or self._streams[name].total_is_zero:
            raise RuntimeError(f"no gradient reached {name}: run the step's backward passes first")
        return self._streams[name].total


def stream_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every stream of a model: one a stack, and that of the embedding's lookup, which an untied embedding has alone."""
    of_tensors = shapes(config)
    streams: dict[str, tuple[int, ...]] = {}
    for name, parts in stacks(config).items():
        rows = sum(of_tensors[part][0] for part in parts)
        streams[name] = (rows, *of_tensors[parts[0]][1:])
    streams[EMBEDDING_STREAM] = streams[EMBEDDING]
    if not config.tie_word_embeddings:
        del streams[EMBEDDING]
    return streams


def stack_of(stream: str) -> str:
    """The stack whose gradient a stream is part of."""
    return EMBEDDING if stream == EMBEDDING_STREAM else stream


def stack_totals(config: ModelConfig, totals: Mapping[str, Tensor], kernels: Kernels) -> dict[str, Tensor]:
    """Gradients of stacks from the totals of all their streams: a tied weight's two are added, once."""
    gradients = {name: total for name, total in totals.items() if name != EMBEDDING_STREAM}
    if EMBEDDING_STREAM in totals:
        lookup = totals[EMBEDDING_STREAM]
        tied = config.tie_word_embeddings
        gradients[EMBEDDING] = kernels.add(totals[EMBEDDING], lookup) if tied else lookup
    return gradients
