"""The processes of one run, as `torchrun` starts them. Numbers travel between them as bytes; none is added on the way.

A library's all-reduce adds in an order of its own, so none is used: a tensor is sent, received or broadcast, and what
has to be added is added by the receiver, with the kernels, in the written order.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from vexact.errors import BadInput

SIZES = (1, 2, 4, 8)  # divisors of the 8 lanes: a rank owns whole ones
PATIENCE = timedelta(hours=6)  # for a rank that scores or evaluates meanwhile; one that died is noticed at once
T = TypeVar("T")


class RankError(BadInput):
    """Ranks that cannot go on together. One line naming the rank."""


class LostRank(RankError):
    """Another rank has ended."""

    abrupt = True  # at an ordinary end the library's threads, whose connection is broken, may abort the process


class Ranks:
    """A run of one process. With more, every rank makes the same calls in the same order.

    rank: of this process, from 0. size: how many there are.
    """

    rank = 0
    size = 1

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all: it alone writes files and to the terminal."""
        return self.rank == 0

    def send(self, tensor: Tensor, to: int) -> None:
        """Any dtype, contiguous."""
        raise RankError("one rank has nobody to send to")

    def receive(self, tensor: Tensor, source: int) -> None:
        """Overwrites `tensor`, contiguous and of the shape and dtype that are sent."""
        raise RankError("one rank has nobody to receive from")

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """The bits of the source's `tensor`, contiguous, into everyone's."""

    def gather(self, item: T) -> list[T]:
        """What every rank gave, ascending, on every rank. It is pickled."""
        return [item]

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, once, for all. What it raises is raised on every rank, on the others as RankError."""
        made: list[Any] = [None, None]
        failure: Exception | None = None
        if self.first:
            try:
                made[0] = make()
            except Exception as error:
                failure, made[1] = error, f"rank 0: {_line(error)}"
        result, broken = self.gather(made)[0] if self.size > 1 else made
        if failure is not None:
            raise failure
        if broken is not None:
            raise RankError(broken)
        return result

    def part(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's share: every size-th."""
        return items[self.rank :: self.size]

    def joined(self, items: Sequence[T]) -> list[T]:
        """All ranks' items, rank by rank."""
        return [item for each in self.gather(list(items)) for item in each]

    def agree(self, what: str, value: object) -> None:
        """Raises RankError unless every rank has the same value."""
        for rank, other in enumerate(self.gather(value)):
            if other != value:
                raise RankError(f"rank {self.rank}: its {what} {value} is not rank {rank}'s {other}")

    def close(self) -> None:
        """Part from the others."""


class Torchrun(Ranks):
    """The processes that `torchrun` started, over gloo for the host's tensors and NCCL for a GPU's."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """Meets the others. device: where kernels compute; a GPU is the one that is current."""
        if size not in SIZES:
            raise RankError(f"WORLD_SIZE is {size}, must be 1, 2, 4 or 8: a rank owns whole ones of the 8 lanes")
        self.rank, self.size = rank, size
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with self._heard():
            torch.distributed.init_process_group(backend, rank=rank, world_size=size, timeout=PATIENCE)

    def send(self, tensor: Tensor, to: int) -> None:
        with self._heard():
            torch.distributed.send(_bytes(tensor), to)

    def receive(self, tensor: Tensor, source: int) -> None:
        with self._heard():
            torch.distributed.recv(_bytes(tensor), source)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        with self._heard():
            torch.distributed.broadcast(_bytes(tensor), source)

    def gather(self, item: T) -> list[T]:
        items: list[Any] = [None] * self.size
        with self._heard():
            torch.distributed.all_gather_object(items, item)
        return items

    def close(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        """What torch says when a connection breaks, in one line that says what it means."""
        try:
            yield
        except RuntimeError as error:
            raise LostRank(f"rank {self.rank}: another rank has ended, so this one ends too ({_line(error)})") from None


def ranks_of(environment: Mapping[str, str], device: str) -> Ranks:
    """As torchrun describes them; one process where it did not. device: `cpu` or `cuda`, whose current GPU is set.

    Raises RankError where there are too few GPUs or no possible number of ranks.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    if device == "cuda":
        local = int(environment.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise RankError(
                f"LOCAL_RANK is {local} and there are {torch.cuda.device_count()} GPUs: one a rank is needed"
            )
        torch.cuda.set_device(local)
    return Torchrun(int(environment["RANK"]), size, torch.device(device))


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory. Bytes, because not every backend carries every dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


def _line(error: BaseException) -> str:
    """The first sentence of what an exception says, without the place in a library's source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return re.sub(r"^\[[^]]*\.(cc|cpp):\d+\] *", "", lines[0]).partition(". ")[0]
