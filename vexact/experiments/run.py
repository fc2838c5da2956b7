"""Runs a study: what is done already is found again, what was begun is taken up, the rest is trained."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vexact.experiments.distance import Distance, distances
from vexact.experiments.pool import Pool
from vexact.experiments.progress import Watch, duration
from vexact.experiments.recipes import Job, plan
from vexact.experiments.results import RESULTS, STUDY, TABLE, collect, write
from vexact.experiments.reuse import reuse
from vexact.experiments.statistics import median
from vexact.experiments.study import Study, StudyError
from vexact.experiments.worker import Computing, attempt, done
from vexact.loop.folder import METRICS, read_lines, write_whole
from vexact.recipe import RunSection
from vexact_kernels import Kernels

PROBE = 3  # steps that a dry run trains to see how long one takes


@dataclass(frozen=True)
class Outcome:
    """results: the content of results.json. failed: a line a run that failed."""

    folder: Path
    results: Mapping[str, Any]
    failed: Sequence[str]


def run_study(
    study: Study, root: Path, *, computing: Computing, jobs: int, console: Console, others: Sequence[Path] = ()
) -> Outcome:
    """Train all runs of a study under `root`, `jobs` at a time, and judge its claims. others: the folders of studies
    whose runs are taken where they are the same.

    An interrupt, or the end of this process, leaves finished runs whole; the next call goes on from there. A run that
    fails is said and left out of the results; the others go on. Raises BadInput where the study cannot be begun.
    """
    kernels = computing.kernels()
    starts, runs = plan(study, root, kernels)
    root.mkdir(parents=True, exist_ok=True)
    write_whole(root / STUDY, study.to_yaml())
    if others:
        console.print(f"{reuse(runs, others)} runs taken from other studies", highlight=False)
    failed: dict[str, str] = {}
    with Pool(jobs, computing) as pool:
        failed |= _trained(pool, starts, console)
        broken = {str(job.folder / "checkpoint"): failed[job.digest] for job in starts if job.digest in failed}
        # Without the start that it begins with a run cannot be had.
        failed |= {
            job.digest: f"its warm start failed: {broken[job.recipe.model.path]}"
            for job in runs
            if job.recipe.model.path in broken
        }
        notes = list(fallen_short(starts))
        for note in notes:
            console.print(note, soft_wrap=True, highlight=False, markup=False)
        failed |= _trained(pool, [job for job in runs if job.digest not in failed], console)
    results = {**collect(study, runs, failed, root, _away(study, runs, kernels)), "notes": notes}
    write(results, root)
    said = [f"{job.arm}, seed {job.seed}: {failed[job.digest]}" for job in runs if job.digest in failed]
    return Outcome(root, results, said)


def dry_run(study: Study, root: Path, *, computing: Computing, jobs: int, console: Console) -> None:
    """Say which runs there are, which are done, and how long the others may take: from runs that are done, or else from
    a few steps of the first arm, on the model that the study begins with."""
    kernels = computing.kernels()
    starts, runs = plan(study, root, kernels)
    unique = {job.digest: job for job in runs}
    left = [job for job in unique.values() if not done(job)]
    table = Table("arm", "role", "seeds", "done", "overrides", title=study.title, title_justify="left")
    for arm in study.arms:
        mine = [job for job in runs if job.arm == arm.name]
        overrides = ", ".join(f"{key} = {value}" for key, value in arm.overrides.items())
        table.add_row(arm.name, arm.role, str(len(mine)), str(sum(map(done, mine))), overrides)
    console.print(table)
    finished = [job for job in unique.values() if done(job)]
    if finished:
        rate = median([_seconds(job.folder) / max(1, job.recipe.steps) for job in finished])
    else:
        rate = _probed(study, computing)
    seconds = rate * sum(job.recipe.steps for job in left) / jobs
    console.print(
        f"{len(unique)} runs and {len(starts)} warm starts, {len(left)} runs left: about {duration(seconds)} for them "
        f"with {jobs} at a time ({rate:.3g} s a step)",
        soft_wrap=True,
        highlight=False,
    )


def verdicts(results: Mapping[str, Any]) -> Table:
    """The claims of a study in a few rows; their rules and numbers are in results.json."""
    table = Table("claim", "", "verdict", title=results["title"], title_justify="left")
    for claim in results["claims"]:
        table.add_row(claim["id"], claim["claim"], claim["verdict"])
    return table


def fallen_short(starts: Sequence[Job]) -> Iterator[str]:
    """A line for each warm start that ended below the success that it was to reach: what follows begins elsewhere than
    its recipe says."""
    for job in starts:
        wanted = job.recipe.warm_start.until
        for line in read_lines(job.folder / METRICS)[:1]:
            reached = line.get("eval_success", wanted)
            if reached < wanted:
                yield (
                    f"warm start, seed {job.seed}: a success of {reached:.3g} behind {line['warm_start_steps']} steps, "
                    f"and not the {wanted:g} of warm_start.until: raise warm_start.steps"
                )


def _trained(pool: Pool, jobs: Sequence[Job], console: Console) -> dict[str, str]:
    unique = {job.digest: job for job in jobs}
    left = [job for job in unique.values() if not done(job)]
    if not left:
        return {}
    with Watch(console, left, len(unique)) as watch:
        return dict(pool.run(left, watch.ended, watch.tick))


def _away(study: Study, runs: Sequence[Job], kernels: Kernels) -> Mapping[str, Distance]:
    """Distances to on-policy training, where the study keeps models: of each run to the exact arm that it is beside."""
    found: dict[str, Distance] = {}
    if not study.keep_models:
        return found
    exact = {arm.name: study.reference(arm) for arm in study.arms}
    for name in dict.fromkeys(exact.values()):
        own = [job for job in runs if job.arm == name]
        found = {**distances(own, [job for job in runs if exact[job.arm] == name], kernels), **found}
    return found


def _seconds(folder: Path) -> float:
    """That a run took, evaluations included."""
    lines = read_lines(folder / METRICS)
    return sum(line.get("seconds", 0.0) + line.get("eval_seconds", 0.0) for line in lines)


def _probed(study: Study, computing: Computing) -> float:
    """Seconds a step of the first arm, the first one left out: it compiles and warms up."""
    recipe = study.recipe(study.arms[0], study.seeds[0])
    with tempfile.TemporaryDirectory() as folder:
        recipe = replace(
            recipe,
            name="probe",
            steps=PROBE,
            warm_start=replace(recipe.warm_start, steps=0),
            eval=replace(recipe.eval, every=0, best=False),
            run=RunSection(folder=str(Path(folder) / "run"), checkpoint=False, rollouts="never"),
        )
        job = Job(study.arms[0].name, study.seeds[0], 0, "probe", recipe)
        fault = attempt(job, computing.kernels())
        lines = read_lines(job.folder / METRICS)
    if fault:
        raise StudyError(f"{study.file}: the first arm, {job.arm}: {fault}")
    steps = [line["seconds"] for line in lines if line["step"] >= 1]
    looks = [line["eval_seconds"] for line in lines if "eval_seconds" in line]
    every = study.recipe().eval.every
    return median(steps) + (median(looks) / every if looks and every else 0.0)


__all__ = ["RESULTS", "TABLE", "Outcome", "dry_run", "fallen_short", "run_study", "verdicts"]
