"""results.json and table.csv: what a study's runs come to.

    {"study", "title", "question",
     "arms": [{"name", "role", "label", "beside", "overrides", "runs": [{"seed", "folder", "digest", "fingerprint"}]}],
     "endpoints": {arm: {endpoint: [a value per run]}},
     "claims": [{"id", "claim", "rule", "verdict", "numbers"}],
     "failed": [{"arm", "seed", "error"}]}

Runs and values are in one order, that of seeds; a run that failed or is not done is in neither. Folders are relative to
the study's.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vexact.experiments.distance import Distance
from vexact.experiments.endpoints import NAMES, STEPS, Endpoints, fingerprints, measure, parted
from vexact.experiments.evidence import ArmEvidence, Evidence
from vexact.experiments.judge import judged
from vexact.experiments.lengths import length_slope
from vexact.experiments.recipes import Job
from vexact.experiments.statistics import median
from vexact.experiments.study import Arm, Study
from vexact.experiments.worker import done
from vexact.loop.folder import METRICS, read_lines, write_whole

RESULTS, TABLE, STUDY = "results.json", "table.csv", "study.yaml"
COLUMNS = ("arm", "role", "endpoint", "median", "min", "max", "n", "not_reached")


def collect(
    study: Study,
    jobs: Sequence[Job],
    failed: Mapping[str, str],
    root: Path,
    away: Mapping[str, Distance] | None = None,
) -> dict[str, Any]:
    """The content of results.json from the folders of the finished runs. failed: digest → what went wrong.

    away: digest → distance to on-policy training, where it was measured.
    """
    by_arm: dict[str, list[Job]] = {arm.name: [] for arm in study.arms}
    for job in jobs:
        if job.digest not in failed and done(job):
            by_arm[job.arm].append(job)
    prints = {job.digest: fingerprints(read_lines(job.folder / METRICS)) for mine in by_arm.values() for job in mine}
    exact = {arm.name: study.reference(arm) for arm in study.arms}
    reference = {(arm, job.seed): prints[job.digest] for arm, mine in by_arm.items() for job in mine}
    found = {
        name: [_endpoints(job, study.tail, prints[job.digest], reference.get((exact[name], job.seed))) for job in mine]
        for name, mine in by_arm.items()
    }
    for name, mine in by_arm.items():
        for job, row in zip(mine, found[name], strict=True):
            far = (away or {}).get(job.digest)
            row |= {"kl_to_exact": None if far is None else far.kl, "js_to_exact": None if far is None else far.js}
    endpoints = {name: {key: [each[key] for each in rows] for key in NAMES} for name, rows in found.items()}
    last = {digest: found[max(found)] if found else "" for digest, found in prints.items()}
    evidence = Evidence(
        {arm.name: _evidence(study, arm, by_arm[arm.name], endpoints[arm.name], last) for arm in study.arms}
    )
    return {
        "study": study.name,
        "title": study.title,
        "question": study.question,
        "arms": [_arm(arm, exact[arm.name], by_arm[arm.name], root, last) for arm in study.arms],
        "endpoints": endpoints,
        "claims": judged(study, evidence),
        "failed": [
            {"arm": job.arm, "seed": job.seed, "error": failed[job.digest]} for job in jobs if job.digest in failed
        ],
    }


def write(results: Mapping[str, Any], folder: Path) -> None:
    """Both files, each whole or as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / RESULTS, json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write_whole(folder / TABLE, table(results))


def table(results: Mapping[str, Any]) -> str:
    """A row an arm and endpoint: median and range over runs, and how many there are; of a step, how many runs did not
    reach it. They count as later than any step, and a median or an end of the range that is one of them is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for arm in results["arms"]:
        for name, values in results["endpoints"][arm["name"]].items():
            known = [float(value) for value in values if value is not None]
            missing = 0
            if name in STEPS:
                told = results["endpoints"][arm["name"]].get(STEPS[name], [0] * len(values))
                missing = sum(v is None and t is not None for v, t in zip(values, told, strict=True))
            known += [math.inf] * missing
            if known:
                numbers = [_short(value) for value in (median(known), min(known), max(known))]
                writer.writerow(
                    [arm["name"], arm["role"], name, *numbers, len(known), missing if name in STEPS else ""]
                )
    return text.getvalue()


def _endpoints(job: Job, tail: int, own: Mapping[int, str], theirs: Mapping[int, str] | None) -> Endpoints:
    """own, theirs: fingerprints by step of the run, and of the exact arm's with the same seed."""
    found = measure(read_lines(job.folder / METRICS), tail)
    if found["length_slope"] is None:
        found["length_slope"] = length_slope(job.folder)
    return {**found, "parted": None if theirs is None else parted(own, theirs)}


def _evidence(
    study: Study, arm: Arm, jobs: Sequence[Job], endpoints: Mapping[str, Sequence[Any]], last: Mapping[str, str]
) -> ArmEvidence:
    return ArmEvidence(
        arm.name,
        arm.role,
        [job.seed for job in jobs],
        endpoints,
        [last[job.digest] for job in jobs],
        {**study.common, **arm.overrides},
        study.reference(arm),
    )


def _arm(arm: Arm, beside: str, jobs: Sequence[Job], root: Path, last: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": arm.name,
        "role": arm.role,
        "label": arm.label or arm.name,
        "beside": beside,
        "overrides": dict(arm.overrides),
        "runs": [
            {
                "seed": job.seed,
                "folder": job.folder.relative_to(root).as_posix(),
                "digest": job.digest,
                "fingerprint": last[job.digest],
            }
            for job in jobs
        ],
    }


def _short(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""
