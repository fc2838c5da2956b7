"""Worker processes that share out runs. One that dies takes its run with it and no other."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from vexact.experiments.recipes import Job
from vexact.experiments.worker import Computing, serve

TICK = 1.0  # seconds between looks at how far runs are


@dataclass
class Worker:
    """A process, the line to it, and what it is at."""

    process: SpawnProcess
    line: Connection
    job: Job | None = None


class Pool:
    """Context manager: its processes end with it, whatever they are at. size: how many run at a time."""

    def __init__(self, size: int, computing: Computing) -> None:
        self.size, self.computing = size, computing
        self._workers: list[Worker] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()
        self._workers = []

    def run(
        self,
        jobs: Sequence[Job],
        ended: Callable[[Job, str], None],
        tick: Callable[[Sequence[Job]], None],
    ) -> Mapping[str, str]:
        """Train all of them, in their order. Digest → what went wrong, of those that failed.

        ended: hears of each when it is over, and of its fault. tick: hears about once a second of those that run.
        """
        waiting, failed = deque(jobs), {}
        while waiting or any(worker.job for worker in self._workers):
            self._hand_out(waiting)
            for worker in self._heard():
                job, worker.job = worker.job, None
                fault = self._answer(worker)
                if job is None:
                    continue
                if fault:
                    failed[job.digest] = fault
                ended(job, fault)
            tick([worker.job for worker in self._workers if worker.job])
        return failed

    def _hand_out(self, waiting: deque[Job]) -> None:
        while len(self._workers) < min(self.size, len(waiting) + len(self._workers)) and waiting:
            self._workers.append(self._started())
            if not self._give(self._workers[-1], waiting):
                break
        for worker in self._workers:
            if worker.job is None and waiting:
                self._give(worker, waiting)

    def _give(self, worker: Worker, waiting: deque[Job]) -> bool:
        worker.job = waiting.popleft()
        try:
            worker.line.send(worker.job)
        except OSError:  # it is dead: `_answer` will say so
            return False
        return True

    def _started(self) -> Worker:
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self.computing, os.getpid()), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours)

    def _heard(self) -> list[Worker]:
        """The workers that answered or died within a tick."""
        by_line = {worker.line: worker for worker in self._workers}
        return [by_line[line] for line in wait(list(by_line), TICK) if line in by_line]

    def _answer(self, worker: Worker) -> str:
        try:
            return str(worker.line.recv())
        except (EOFError, OSError):
            worker.process.join()
            self._workers.remove(worker)
            code = worker.process.exitcode
            return f"its process ended with {code}" + (", as one that was killed" if code and code < 0 else "")
