"""How far a study is, and how long it will take: a bar on a terminal, a line a run elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from vexact.experiments.recipes import Job
from vexact.experiments.worker import lines_done


class Watch:
    """jobs: all that remain. total: how many runs the study has, the finished ones included."""

    def __init__(self, console: Console, jobs: Sequence[Job], total: int) -> None:
        self._console, self._total = console, total
        self._steps = {job.digest: max(1, job.recipe.steps) for job in jobs}
        self._over = total - len(jobs)
        self._began, self._first = monotonic(), {job.digest: lines_done(job.folder) for job in jobs}
        self._reached = dict.fromkeys(self._steps, 0)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._bar.add_task(self._said(), total=sum(self._steps.values()))

    def __enter__(self) -> Watch:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def tick(self, running: Sequence[Job]) -> None:
        for job in running:
            # A run that was taken up behind its newest state has cut its log first.
            steps = lines_done(job.folder) - min(self._first[job.digest], lines_done(job.folder))
            self._reached[job.digest] = min(steps, self._steps[job.digest])
        self._bar.update(self._task, completed=sum(self._reached.values()), description=self._said())

    def ended(self, job: Job, fault: str) -> None:
        self._over += 1
        self._reached[job.digest] = self._steps[job.digest]
        said = f"failed: {fault}" if fault else f"{job.recipe.steps} steps"
        self._console.print(
            f"{self._over}/{self._total}  {job.arm}, seed {job.seed}: {said}{self._left()}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )

    def _said(self) -> str:
        return f"{self._over}/{self._total} runs{self._left()}"

    def _left(self) -> str:
        reached, total = sum(self._reached.values()), sum(self._steps.values())
        if not reached or reached == total:
            return ""
        return f"  {duration((monotonic() - self._began) / reached * (total - reached))} left"


def duration(seconds: float) -> str:
    """40 s, 12 min, 3 h 05 min."""
    minutes = round(seconds / 60.0)
    if seconds < 90.0:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
