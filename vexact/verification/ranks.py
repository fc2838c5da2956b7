"""Ranks in one process, a thread each, so that `verify` can ask whether a step knows how many share it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, Queue
from typing import Any, TypeVar

import torch
from torch import Tensor

from vexact.ranks import RankError, Ranks

T = TypeVar("T")
PATIENCE = 600.0  # seconds for a message


class ThreadRank(Ranks):
    """One of several. mail: the queues of all pairs (from, to)."""

    def __init__(self, rank: int, size: int, mail: dict[tuple[int, int], Queue[Any]]) -> None:
        self.rank, self.size, self.mail = rank, size, mail

    def send(self, tensor: Tensor, to: int) -> None:
        self.mail[self.rank, to].put(tensor.detach().clone())

    def receive(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self._next(source).view(tensor.shape))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        if self.rank != source:
            self.receive(tensor, source)
            return
        for other in range(self.size):
            if other != source:
                self.send(tensor, other)

    def gather(self, item: T) -> list[T]:
        for other in range(self.size):
            self.mail[self.rank, other].put(item)
        return [self._next(source) for source in range(self.size)]

    def _next(self, source: int) -> Any:
        try:
            return self.mail[source, self.rank].get(timeout=PATIENCE)
        except Empty:
            raise RankError(f"rank {self.rank}: rank {source} sent nothing") from None


def on_ranks(size: int, run: Callable[[Ranks], T], kind: type[ThreadRank] = ThreadRank) -> list[T]:
    """What `run` returns on each of `size` ranks. What it raises on one is raised here."""
    mail: dict[tuple[int, int], Queue[Any]] = {(a, b): Queue() for a in range(size) for b in range(size)}
    results: list[Any] = [None] * size
    failures: list[BaseException] = []
    threads = torch.get_num_threads()

    def work(rank: int) -> None:
        try:
            torch.set_num_threads(max(1, threads // size))
            results[rank] = run(kind(rank, size, mail))
        except BaseException as error:
            failures.append(error)
            for other in range(size):
                mail[rank, other].put(None)  # whoever waits goes on, and fails

    workers: Sequence[threading.Thread] = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return results
