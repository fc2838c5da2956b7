"""Dose and response: held-out success against the K3 that was reached.

An arm whose noise both sides share has no mismatch and so no K3 of its own: it stands where its twin stands, the arm
with the same settings but for the side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from vexact.report.by_step import K3, success_at_end
from vexact.report.curve import spread
from vexact.report.figure import SHAPES, Axis, Mark, Panel, Points, Rule
from vexact.report.number import written
from vexact.report.study import ARM, Arm, Group, Study

SIDE = "mismatch.side"
SHARED = "both-shared"
OFF = (None, "", "none", "off", 0, 0.0)
COLLAPSE, PEAK = "collapse_step", "peak_trainer"  # endpoints: a step, none where it did not happen; what it needs


@dataclass(frozen=True)
class Response:
    """What is drawn against the dose. note: how its marks are read."""

    y: Axis
    note: str


SUCCESS = Response(Axis("success at the end", low=0.0, high=1.0), "Bars: range of seeds. Dashed: the exact arm.")
COLLAPSED = Response(Axis("step of collapse", low=0.0, never="never"), "Top lane: no collapse.")


def panels(study: Study) -> tuple[list[Panel], str]:
    """The charts, those of one exact arm together, and what is missing where there is none."""
    drawn = [panel for number, group in enumerate(study.groups, 1) for panel in _group(study, group, number)]
    return drawn, "" if drawn else "it needs two arms or more with held-out success and a K3 above zero"


def _group(study: Study, group: Group, number: int) -> list[Panel]:
    reached = {i: _k3(study.arms[i]) for i in group.arms if study.arms[i].role == ARM}
    doses = {i: _dose(i, study, reached) for i in reached if _success(study.arms[i])}
    doses = {i: dose for i, dose in doses.items() if dose > 0}
    if len(doses) < 2:
        return []
    more = "" if number == 1 else f"-{number}"
    title = study.titled("Success against K3", group)
    ends = {i: _success(study.arms[i]) for i in doses}
    drawn = [_panel(study, doses, "dose" + more, title, ends, SUCCESS, group.exact)]
    collapses = {i: steps for i in doses if (steps := [s for s in collapse(study.arms[i]) if not math.isnan(s)])}
    if any(math.isfinite(step) for steps in collapses.values() for step in steps):
        doses = {i: dose for i, dose in doses.items() if i in collapses}
        title = study.titled("Collapse against K3", group)
        drawn.append(_panel(study, doses, "dose-collapse" + more, title, collapses, COLLAPSED))
    return drawn


def collapse(arm: Arm) -> list[float]:
    """The step of each run's collapse, infinity where it did not; empty where the study does not measure it."""
    return reached_steps(arm, COLLAPSE, PEAK)


def reached_steps(arm: Arm, name: str, needs: str) -> list[float]:
    """An endpoint that is a step: infinity where it was not reached; NaN where the endpoint `needs` is not there
    either, so nothing was measured."""
    steps = arm.endpoints.get(name, ())
    measured = arm.endpoints.get(needs) or (0.0,) * len(steps)
    return [
        math.nan if math.isnan(what) and math.isnan(step) else math.inf if math.isnan(step) else step
        for step, what in zip(steps, measured, strict=False)
    ]


def _panel(
    study: Study, doses: Mapping[int, float], id: str, title: str, values: Any, kind: Response, exact: Arm | None = None
) -> Panel:
    """values: of each arm, what kind says. exact: an arm whose success is drawn beside the others'."""
    marks: list[Mark] = []
    told = []
    for i, dose in sorted(doses.items(), key=lambda pair: pair[1]):
        arm, shared = study.arms[i], shares(study.arms[i])
        low, middle, high = spread(values[i])
        if any(math.isinf(v) for v in values[i]) and sum(map(math.isinf, values[i])) * 2 > len(values[i]):
            low, middle, high = min(values[i]), math.inf, math.inf
        tip = f"{arm.label}: K3 {written(dose)}, {kind.y.label} {written(middle)} ({written(low)} to {written(high)})"
        shape = SHAPES[1] if shared else SHAPES[0]
        least, most = ((low,), (high,)) if low < high else ((), ())
        marks.append(Points(i, arm.label, (dose,), (middle,), least, most, shape, shared, tips=(tip,)))
        told.append(tip)
    if exact is not None and _success(exact):
        marks.append(Rule("the exact arm's median", y=spread(_success(exact))[1]))
    note = "Filled: mismatch between the sides. Hollow squares: both sides under the same noise, at the K3 of the arm "
    note += f"with the same settings otherwise. {kind.note}"
    return Panel(id, title, f"{title}. {'; '.join(told)}.", Axis("K3 reached, median of steps", log=True), kind.y,
                 tuple(marks), note)  # fmt: skip


def shares(arm: Arm) -> bool:
    return bool(arm.settings.get(SIDE) == SHARED)


def _success(arm: Arm) -> list[float]:
    return [value for value in success_at_end(arm) if math.isfinite(value)]


def _k3(arm: Arm) -> float:
    """The median over steps and seeds, of the steps that have any. 0 where none has, NaN where it was not measured."""
    values = [value for curve in arm.curves(K3) for value in curve.values]
    positive = [value for value in values if value > 0]
    return median(positive) if positive else (0.0 if values else math.nan)


def _dose(i: int, study: Study, reached: Mapping[int, float]) -> float:
    if not shares(study.arms[i]):
        return reached[i]
    own = _kind(study.arms[i])
    twins = [k for k in reached if k != i and not shares(study.arms[k]) and _kind(study.arms[k]) == own]
    if twins:
        return max(reached[k] for k in twins)
    nominal = study.arms[i].settings.get("mismatch.k3")
    return float(nominal) if isinstance(nominal, int | float) else math.nan


def _kind(arm: Arm) -> dict[str, Any]:
    """What an arm does, without the side that it does it to and what is switched off."""
    return {
        key: value for key, value in arm.settings.items()
        if key != SIDE and value not in OFF and key not in ("seed", "name", "run.folder")
    }  # fmt: skip
