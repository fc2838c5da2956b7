"""Runs that other studies have trained already.

A digest covers what a run's bits follow from (`recipes.digest_of` says what it does not see), so a run of equal digest
elsewhere is the same run. What is taken is its numbers; a run whose rollouts or weights this study keeps is trained
here, and so is one that another process is at.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from vexact.experiments.recipes import RUNS, Job
from vexact.experiments.study import StudyError
from vexact.experiments.worker import done, ended
from vexact.loop.folder import CONFIG, ENVIRONMENT, METRICS, RESULT, draft_of, in_use, remove_folder, write_whole


def reuse(jobs: Sequence[Job], others: Sequence[Path]) -> int:
    """Take what is finished in the folders of other studies into that of this one. How many runs were taken.

    Raises StudyError for a folder that is no study's.
    """
    for other in others:
        if not (other / RUNS).is_dir():
            raise StudyError(f"--reuse: {other} is not the folder of a study: it has no {RUNS}/")
    wanted = {job.digest: job for job in jobs if not (job.keeps or job.keeps_model or done(job) or in_use(job.folder))}
    found = [(job, other / RUNS / job.digest) for job in wanted.values() for other in others]
    taken = {job.digest: (job, folder) for job, folder in found if ended(folder, job.recipe.steps)}
    for job, folder in taken.values():
        _take(job, folder)
    return len(taken)


def _take(job: Job, folder: Path) -> None:
    """A run that was begun here gives way to the whole one."""
    draft = draft_of(job.folder)
    draft.mkdir(parents=True)
    for name in (ENVIRONMENT, METRICS, RESULT):
        shutil.copy2(folder / name, draft / name)
    write_whole(draft / CONFIG, job.recipe.to_yaml())
    remove_folder(job.folder)
    draft.rename(job.folder)
