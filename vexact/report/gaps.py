"""How far each arm ends from the exact one, beside how far apart arms end that differ in chance alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean as mean

from vexact.report.by_step import ESS, LAG_ESS, success_at_end
from vexact.report.curve import spread
from vexact.report.dose import OFF, collapse, reached_steps
from vexact.report.figure import SHAPES, Axis, Grey, Mark, Panel, Points, Rule
from vexact.report.number import written
from vexact.report.study import NULL, Arm, Group, Study

REMEDY = "loss.remedy."  # before the keys of what mends
BELOW, LEAST = "ess_below_half", "ess_min"  # endpoints
HALF = 0.5  # of ESS, from which on a batch is thought too old


def gap_panels(study: Study) -> tuple[list[Panel], str]:
    """A chart for each exact arm, and what is missing where there is none."""
    drawn = [panel for number, group in enumerate(study.groups, 1) if (panel := _gap_panel(study, group, number))]
    if drawn:
        return drawn, ""
    known = any(group.exact and success_at_end(group.exact) for group in study.groups)
    return [], "it needs an arm beside the exact one" if known else "it needs an exact arm with held-out success"


def _gap_panel(study: Study, group: Group, number: int) -> Panel | None:
    """A row an arm, the farthest below at the top; null arms last. None where there is nothing to compare.

    As the rules of claims have it, a gap is between means over seeds, and the null band reaches from the smallest to
    the greatest gap of a null arm, 0 among them.
    """
    exact = group.exact
    ends = success_at_end(exact) if exact else []
    if exact is None or not ends:
        return None
    reference = mean(ends)
    gaps = {i: [end - reference for end in success_at_end(study.arms[i])] for i in group.arms}
    gaps = {i: values for i, values in gaps.items() if values}
    if not gaps:
        return None
    rows = sorted(gaps, key=lambda i: (study.arms[i].role == NULL, mean(gaps[i])))
    nulls = [mean(gaps[i]) for i in rows if study.arms[i].role == NULL]
    low, high = min([0.0, *nulls]), max([0.0, *nulls])
    marks: list[Mark] = [Rule("the exact arm's mean", x=0.0)]
    if nulls:
        marks.append(Grey("gaps of the null arms", (low, high), (-0.5, -0.5), (len(rows) - 0.5,) * 2))
    told = []
    for row, i in enumerate(rows):
        arm, middle, (least, _, most) = study.arms[i], mean(gaps[i]), spread(gaps[i])
        null = arm.role == NULL
        inside = "inside" if low <= middle <= high else "outside"
        where = "" if null or not nulls else f", {inside} the null band"
        told.append(f"{arm.label}: {written(middle)} ({written(least)} to {written(most)}){where}")
        shape = SHAPES[3] if mended(arm, exact) else SHAPES[0]
        marks.append(
            Points(-1 if null else i, arm.label, (middle,), (float(row),), (least,), (most,), shape, across=True,
                   hollow=null, tips=(told[-1],))
        )  # fmt: skip
    note = f"Held-out success at the end less that of {exact.label}, {written(reference)}, means over seeds. "
    note += "Bars: range of seeds. Diamonds: arms with a remedy. "
    note += "Hollow, and grey band: null arms." if nulls else "There are no null arms to compare with."
    return Panel(
        "gaps" if number == 1 else f"gaps-{number}", study.titled("Gap to the exact arm", group),
        f"Gap in held-out success to {exact.label}. " + "; ".join(told) + ".",
        Axis("success − exact"), Axis("", categories=_rows([study.arms[i].label for i in rows])), tuple(marks), note,
    )  # fmt: skip


def _rows(labels: Sequence[str]) -> tuple[str, ...]:
    """Without the words up to a comma that all of them begin with: where labels are cut short, these would remain."""
    parts = [label.split(", ") for label in labels]
    while all(len(own) > 1 and own[0] == parts[0][0] for own in parts):
        parts = [own[1:] for own in parts]
    return tuple(", ".join(own) for own in parts)


def mended(arm: Arm, exact: Arm) -> bool:
    """Whether a remedy is at work that is not in the exact arm too."""
    return any(
        value not in OFF and value != exact.settings.get(key)
        for key, value in arm.settings.items()
        if key.startswith(REMEDY)
    )


def ess_panel(study: Study) -> tuple[Panel | None, str]:
    """A mark a run: when it collapsed against when its ESS first fell below a half."""
    marks: list[Mark] = []
    told: list[str] = []
    for i, arm in enumerate(study.arms):
        steps = collapse(arm)
        runs = [(f, s) for f, s in zip(_warnings(arm), steps, strict=False) if not math.isnan(f + s)]
        if not runs:
            continue
        tips = tuple(f"{arm.label}: ESS below ½ {_when(f)}, collapse {_when(s)}" for f, s in runs)
        told.extend(tips)
        marks.append(Points(i, arm.label, tuple(f for f, _ in runs), tuple(s for _, s in runs), tips=tips))
    if not marks:
        return None, "it needs ESS by step and the step of collapse among the study's endpoints"
    if not any(math.isfinite(v) for mark in marks if isinstance(mark, Points) for v in (*mark.x, *mark.y)):
        return None, "no run collapsed, and none had an ESS below ½"
    warned = sum(tip.count("never") == 0 for tip in told)
    shown = "; ".join(told[:20]) + (f"; and {len(told) - 20} more runs" if len(told) > 20 else "")
    note = "A mark a run. Above the diagonal ESS gave warning before the collapse. Lanes: it never happened."
    return Panel(
        "ess-collapse", "ESS below ½ and collapse",
        f"Step of collapse against the first step with ESS below one half; {warned} of {len(told)} runs had both. "
        f"{shown}.",
        Axis("first step with ESS < ½", low=0.0, never="never"), Axis("step of collapse", low=0.0, never="never"),
        (Rule("both at once"), *marks), note,
    ), ""  # fmt: skip


def _warnings(arm: Arm) -> list[float]:
    """The first step of each run with ESS below a half: what the study measured, or else of its curves."""
    if BELOW in arm.endpoints:
        return reached_steps(arm, BELOW, LEAST)
    return [run.curve((*LAG_ESS, *ESS)).first_below(HALF) for run in arm.runs]


def _when(step: float) -> str:
    return "never" if math.isinf(step) else f"at step {step:.0f}"
