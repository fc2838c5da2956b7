"""The table of arms: of each endpoint the median over seeds, with its range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median_low

from vexact.report.by_step import K3, METRICS, SUCCESS
from vexact.report.curve import spread
from vexact.report.dose import COLLAPSE, PEAK, reached_steps
from vexact.report.gaps import BELOW, LEAST
from vexact.report.number import NOTHING, written
from vexact.report.study import Arm, Study

# Of plain runs, which have no endpoints: the ends of these metrics.
ENDS = {"success at the end": SUCCESS, "K3 at the end": K3} | {
    f"{metric.title.lower()} at the end": metric.names for metric in METRICS if metric.id in ("entropy", "reward")
}
# Endpoints that are a step, and the endpoint that tells whether they were measured.
STEPS = {
    COLLAPSE: PEAK, BELOW: LEAST, "parted": "", "first_sync": "syncs", "k3_leaves": "k3_start", "success_falls": PEAK,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    number: int
    label: str
    name: str
    role: str
    seeds: int
    cells: tuple[tuple[str, str], ...]  # median, range


def table(study: Study) -> tuple[list[str], list[Row]]:
    """Names of the columns, and a row an arm."""
    names = list(dict.fromkeys(name for arm in study.arms for name in arm.endpoints))
    names = [
        name for name in names if any(not math.isnan(v) for arm in study.arms for v in arm.endpoints.get(name, ()))
    ]
    if not names:
        names = [name for name, metric in ENDS.items() if any(arm.curves(metric) for arm in study.arms)]
    rows = [
        Row(i, arm.label, arm.name, arm.role, len(arm.runs), tuple(_cell(arm, name) for name in names))
        for i, arm in enumerate(study.arms)
    ]
    return names, rows


def _cell(arm: Arm, name: str) -> tuple[str, str]:
    if name in STEPS:
        return _step_cell(reached_steps(arm, name, STEPS[name]))
    values = list(arm.endpoints[name]) if name in arm.endpoints else arm.ends(ENDS.get(name, ()))
    low, middle, high = spread(values)
    return written(middle), f"{written(low)} … {written(high)}" if low < high else ""


def _step_cell(steps: list[float]) -> tuple[str, str]:
    """A step that was not reached is later than any other, in the median too."""
    known = sorted(step for step in steps if not math.isnan(step))
    if not known:
        return NOTHING, ""
    told = [written(step).replace("∞", "never") for step in (known[0], median_low(known), known[-1])]
    return told[1], f"{told[0]} … {told[2]}" if known[0] < known[-1] else ""
