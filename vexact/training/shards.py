"""Data parallelism: which rank computes a lane, and which rank holds the float32 state of a stack.

Lane k of a step belongs to rank k mod size, so every rank computes one lane of a round, and rounds follow each other in
the order of lanes. Behind a round each stack's finished lanes go to the stack's *owner*, which adds them to its total
in ascending order: total = ((lane 0 + lane 1) + lane 2) + …, the fold of one process, in every bit. (Lanes cut in
halves, 0 to 3 and 4 to 7, would have to wait for each other or be kept: the fold is one chain over all of them.)

The owner alone keeps the stack's total, master and moments, updates it, and hands out what the weights are: the master
rounded once to the compute dtype. This is the sharding of optimizer state that ZeRO calls stage 1 (arXiv 1910.02054),
by whole stacks. FSDP2 (`fully_shard`) is not used: it shards `nn.Parameter`s, gathers them before a module's forward
and reduces their gradients with a sum whose order is the library's; here the forward reads packed weights, and the
order is the contract's. What it would save beyond this are the weights in their compute dtype, which every rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from vexact.model.config import ModelConfig
from vexact.model.gradients import Gradients, lanes_of, stack_of, stack_totals, stream_shapes
from vexact.model.parameters import stacks, unstack
from vexact.model.policy import Policy
from vexact.model.rotary import RotaryTables
from vexact.ranks import Ranks
from vexact.training.optimizer import norm_of, squares_of
from vexact_kernels import LANES, Kernels

TOGETHER = 1 << 22  # numbers of small streams that travel in one message (16 MB)


class Shards:
    """The state of a trainer's stacks, over ranks. Every rank makes the same calls in the same order."""

    def __init__(self, config: ModelConfig, kernels: Kernels, ranks: Ranks) -> None:
        self.config, self.kernels, self.ranks = config, kernels, ranks
        self.owners = owners(config, ranks.size)
        self._rotary = RotaryTables.of(config, kernels.device)  # of all versions: of a small model they take longest
        self._shapes = stream_shapes(config)
        self._bundles = bundles(self._shapes, self.owners)
        self._totals: dict[str, Tensor] = {}

    @property
    def alone(self) -> bool:
        """Whether this process computes every lane: then the kernels fold them, and nothing travels."""
        return self.ranks.size == 1

    def owns(self, stack: str) -> bool:
        return self.owners[stack] == self.ranks.rank

    def clear(self) -> None:
        """Begin a new update."""
        self._totals = {}

    def rounds(self, count: int) -> Iterator[tuple[list[int], range | None]]:
        """Of `count` sequences: the lanes of each round that hold any, and which sequences are this rank's in it.

        Alone there is one round of everything.
        """
        if self.alone:
            yield list(lane_ranges(count)), range(count)
            return
        lanes = lane_ranges(count)
        for first in range(0, LANES, self.ranks.size):
            filled = [lane for lane in range(first, first + self.ranks.size) if lane in lanes]
            if filled:
                yield filled, lanes.get(first + self.ranks.rank)

    def fold(self, gradients: Gradients, lanes: Sequence[int]) -> None:
        """Add a round's lanes to the totals of their owners. gradients: this rank's lane, finished."""
        for owner, names in self._bundles:
            for lane in lanes:
                source = lane % self.ranks.size
                if self.ranks.rank == source:
                    mine = [gradients.total(name) for name in names]
                    if owner == source:
                        self._add(names, mine)
                    else:
                        self.ranks.send(_packed(mine), owner)
                elif self.ranks.rank == owner:
                    self._add(names, self._received(names, source))

    def _received(self, names: Sequence[str], source: int) -> list[Tensor]:
        sizes = [math.prod(self._shapes[name]) for name in names]
        message = torch.empty(sum(sizes), dtype=torch.float32, device=self.kernels.device)
        self.ranks.receive(message, source)
        return [part.view(self._shapes[name]) for name, part in zip(names, message.split(sizes), strict=True)]

    def _add(self, names: Sequence[str], lane: Sequence[Tensor]) -> None:
        for name, part in zip(names, lane, strict=True):
            total = self._totals.get(name)
            self._totals[name] = part.clone() if total is None else self.kernels.add(total, part)

    def gradients(self) -> dict[str, Tensor]:
        """Gradient of every stack that this rank owns."""
        return stack_totals(self.config, self._totals, self.kernels)

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """The 2-norm over all ranks' tensors. gradients: of the stacks that this rank owns."""
        mine = squares_of(unstack(self.config, gradients, partly=True), self.kernels)
        if self.alone:
            return norm_of(mine, self.kernels)
        squares: dict[str, Tensor] = {}
        for each in self.ranks.gather({name: square.cpu() for name, square in mine.items()}):
            squares.update({name: square.to(self.kernels.device) for name, square in each.items()})
        return norm_of(squares, self.kernels)

    def published(self, masters: Mapping[str, Tensor], dtype: torch.dtype, version: int) -> Policy:
        """The policy of all ranks' masters, rounded once. It shares no memory with them."""

        def weights(name: str) -> Tensor:
            if self.alone:
                return masters[name]
            if self.owns(name):
                tensor = self.kernels.cast(masters[name], dtype)
            else:
                tensor = torch.empty(stack_shape(self._shapes, name), dtype=dtype, device=self.kernels.device)
            self.ranks.broadcast(tensor, self.owners[name])
            return tensor

        return Policy.build(self.config, weights, self.kernels, dtype, version, self._rotary)

    def collected(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All ranks' stacks, float32, on rank 0; the others get their own back. Alone: the very same tensors."""
        whole = dict(tensors)
        for name, owner in self.owners.items():
            if owner == 0:
                continue
            if self.owns(name):
                self.ranks.send(tensors[name], 0)
            elif self.ranks.first:
                shape = stack_shape(self._shapes, name)
                whole[name] = torch.empty(shape, dtype=torch.float32, device=self.kernels.device)
                self.ranks.receive(whole[name], owner)
        return whole

    def share(self, columns: Sequence[Tensor], lengths: Sequence[int]) -> None:
        """Rows that the ranks of the lanes computed, into everyone's columns: [tokens], float32 or bool.

        lengths: rows of each sequence.
        """
        if self.alone:
            return
        ends = [0, *accumulate(lengths)]
        for lane, sequences in lane_ranges(len(lengths)).items():
            rows = slice(ends[sequences.start], ends[sequences.stop])
            message = torch.stack([column[rows].to(torch.float32) for column in columns])
            self.ranks.broadcast(message, lane % self.ranks.size)
            for column, part in zip(columns, message, strict=True):
                column[rows] = part.to(column.dtype)


def owners(config: ModelConfig, size: int) -> dict[str, int]:
    """The rank of every stack: largest first, each to the rank that has least so far."""
    shapes = stream_shapes(config)
    loads = [0] * size
    found: dict[str, int] = {}
    by_size = sorted(stacks(config), key=lambda name: -math.prod(stack_shape(shapes, name)))
    for name in by_size:
        rank = loads.index(min(loads))
        found[name] = rank
        loads[rank] += math.prod(stack_shape(shapes, name))
    return {name: found[name] for name in stacks(config)}


def stack_shape(shapes: Mapping[str, tuple[int, ...]], stack: str) -> tuple[int, ...]:
    """shapes: of all streams."""
    return next(shape for stream, shape in shapes.items() if stack_of(stream) == stack)


def bundles(shapes: Mapping[str, tuple[int, ...]], owner_of: Mapping[str, int]) -> list[tuple[int, list[str]]]:
    """(owner, streams) of each message: small streams of one owner go together."""
    found: list[tuple[int, list[str]]] = []
    for owner in sorted(set(owner_of.values())):
        names: list[str] = []
        size = 0
        for name in (name for name in shapes if owner_of[stack_of(name)] == owner):
            count = math.prod(shapes[name])
            if names and size + count > TOGETHER:
                found.append((owner, names))
                names, size = [], 0
            names.append(name)
            size += count
        found.append((owner, names))
    return found


def lane_ranges(count: int) -> dict[int, range]:
    """The sequences of each lane that has any, lanes ascending."""
    ranges: dict[int, range] = {}
    for index, lane in enumerate(lanes_of(count)):
        ranges[lane] = range(ranges[lane].start if lane in ranges else index, index + 1)
    return ranges


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
