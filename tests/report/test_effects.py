"""Dose–response, gaps and collapse: what is drawn where, by what the study measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from vexact.experiments import endpoints
from vexact.report import dose, gaps
from vexact.report.curve import Curve
from vexact.report.figure import Grey, Panel, Points, Rule
from vexact.report.study import Arm, SeedRun, Study
from vexact.report.table import STEPS, table

NAN = math.nan


def arm(name: str, role: str = "arm", success: float = 0.5, k3: float = 0.0, **endpoints: tuple[float, ...]) -> Arm:
    curves = {"eval_success": Curve.of([(0, success)]), "tim/k3": Curve.of([(0, k3)])}
    return Arm(name, role, name, {}, (SeedRun(0, curves), SeedRun(1, curves)), endpoints)


def sided(name: str, side: str, size: float, success: float, k3: float) -> Arm:
    return replace(arm(name, success=success, k3=k3), settings={"mismatch.side": side, "mismatch.sigma": size})


def marks(panel: Panel) -> dict[str, Points]:
    return {mark.label: mark for mark in panel.marks if isinstance(mark, Points)}


def test_a_placebo_stands_at_the_dose_of_its_twin() -> None:
    arms = (
        arm("exact", "exact", 0.8),
        sided("one", "sampler", 0.1, 0.7, 1e-3), sided("both", "both-shared", 0.1, 0.8, 0.0),
        sided("more", "sampler", 0.5, 0.2, 1e-1), sided("lonely", "both-shared", 0.7, 0.8, 0.0),
    )  # fmt: skip
    panels, _ = dose.panels(Study("t", "", arms))
    found = marks(panels[0])
    assert found["both"].x == found["one"].x == (1e-3,)
    assert found["both"].hollow and not found["one"].hollow and found["both"].shape != found["one"].shape
    assert found["more"].x == (1e-1,)
    assert "lonely" not in found, "no arm has its dose, and its own K3 is zero"


def test_one_dose_is_no_dose_response() -> None:
    panels, why = dose.panels(Study("t", "", (arm("a", k3=1e-3),)))
    assert panels == [] and "two arms" in why


def test_a_run_that_did_not_collapse_is_not_one_that_was_not_measured() -> None:
    never = arm("never", k3=1e-2, collapse_step=(NAN, NAN), peak_trainer=(0.9, NAN))
    assert dose.collapse(never)[0] == math.inf and math.isnan(dose.collapse(never)[1])
    half = arm("half", k3=1e-1, collapse_step=(30.0, NAN), peak_trainer=(0.9, 0.9))
    panels, _ = dose.panels(Study("t", "", (never, half)))
    assert [panel.id for panel in panels] == ["dose", "dose-collapse"]
    assert marks(panels[1])["never"].y == (math.inf,)


def test_gaps_are_of_means_and_the_null_band_holds_zero() -> None:
    ends = lambda *values: {"late_trainer": values}  # noqa: E731
    arms = (
        arm("exact", "exact", **ends(0.7, 0.9)), arm("null", "null", **ends(0.9, 0.9)),
        arm("bad", **ends(0.1, 0.3)), arm("fine", **ends(0.84, 0.84)),
    )  # fmt: skip
    (panel,), _ = gaps.gap_panels(Study("t", "", arms))
    assert panel.y.categories == ("bad", "fine", "null")
    assert marks(panel)["bad"].x == pytest.approx((-0.6,))
    band = next(mark for mark in panel.marks if isinstance(mark, Grey))
    assert band.x == pytest.approx((0.0, 0.1))
    assert "fine: 0.04 (0.04 to 0.04), inside the null band" in panel.description
    assert "bad: −0.6 (−0.7 to −0.5), outside the null band" in panel.description


def test_arms_with_a_remedy_have_another_shape() -> None:
    off, tis = (
        {"loss.remedy.token": "none", "loss.remedy.cap": 2.0},
        {"loss.remedy.token": "tis", "loss.remedy.cap": 2.0},
    )
    arms = [replace(arm("exact", "exact"), settings=off), replace(arm("none"), settings=off)]
    (panel,), _ = gaps.gap_panels(Study("t", "", (*arms, replace(arm("tis"), settings=tis))))
    assert marks(panel)["tis"].shape != marks(panel)["none"].shape


def test_without_an_exact_arm_there_is_no_gap() -> None:
    assert gaps.gap_panels(Study("t", "", (arm("a"), arm("b")))) == ([], "it needs an exact arm with held-out success")
    assert gaps.gap_panels(Study("t", "", (arm("a", "exact"),)))[1] == "it needs an arm beside the exact one"


def test_rows_leave_out_what_all_their_labels_begin_with() -> None:
    named = lambda name, label, *more: replace(arm(name, *more), label=label)  # noqa: E731
    arms = (
        arm("exact", "exact"), named("a", "rewards of 1 and 0, head noise, K3 1"),
        named("b", "rewards of 1 and 0, head noise, K3 2"), named("c", "rewards of 1 and 0, drawn anew", "null"),
    )  # fmt: skip
    (panel,), _ = gaps.gap_panels(Study("t", "", arms))
    assert panel.y.categories == ("head noise, K3 1", "head noise, K3 2", "drawn anew")
    assert "rewards of 1 and 0, head noise, K3 1: 0" in panel.description


def test_each_arm_is_drawn_beside_the_exact_arm_of_its_own_objective() -> None:
    own = lambda each: replace(each, beside="plain exact")  # noqa: E731
    arms = (
        arm("exact", "exact", 0.9), arm("draws", "null", 0.85), arm("head", "arm", 0.8, 1e-3),
        arm("more", "arm", 0.7, 1e-2), arm("plain exact", "exact", 0.5),
        own(arm("plain draws", "null", 0.47)), own(arm("plain head", "arm", 0.4, 1e-3)),
        own(arm("plain more", "arm", 0.1, 1e-2)),
    )  # fmt: skip
    study = Study("t", "", arms)
    first, second = gaps.gap_panels(study)[0]
    assert (first.id, second.id) == ("gaps", "gaps-2") and second.title == "Gap to the exact arm: plain exact"
    assert set(first.y.categories) == {"head", "more", "draws"}
    assert second.y.categories == ("plain more", "plain head", "plain draws")
    assert marks(second)["plain head"].x == pytest.approx((-0.1,))
    assert next(mark for mark in second.marks if isinstance(mark, Grey)).x == pytest.approx((-0.03, 0.0))
    drawn, _ = dose.panels(study)
    assert [(panel.id, set(marks(panel))) for panel in drawn] == [
        ("dose", {"head", "more"}), ("dose-2", {"plain head", "plain more"}),
    ]  # fmt: skip
    assert [mark.y for panel in drawn for mark in panel.marks if isinstance(mark, Rule)] == [0.9, 0.5]


def test_ess_stands_against_collapse_run_by_run() -> None:
    run = arm("a", collapse_step=(60.0, NAN), ess_below_half=(40.0, NAN), ess_min=(0.1, 0.8), peak_trainer=(0.9, 0.9))
    panel, _ = gaps.ess_panel(Study("t", "", (run,)))
    assert panel is not None
    assert marks(panel)["a"].x == (40.0, math.inf) and marks(panel)["a"].y == (60.0, math.inf)
    quiet = arm("a", collapse_step=(NAN,), ess_below_half=(NAN,), ess_min=(0.8,), peak_trainer=(0.9,))
    assert gaps.ess_panel(Study("t", "", (quiet,)))[1] == "no run collapsed, and none had an ESS below ½"
    unmeasured = arm("a", collapse_step=(60.0,), ess_below_half=(NAN,), ess_min=(NAN,), peak_trainer=(0.9,))
    assert "it needs ESS" in gaps.ess_panel(Study("t", "", (unmeasured,)))[1]


def test_the_table_has_medians_ranges_and_steps_that_never_came() -> None:
    run = arm("a", late_trainer=(0.5, 0.7), collapse_step=(60.0, NAN), peak_trainer=(0.9, 0.9), drift=(NAN, NAN))
    names, rows = table(Study("t", "", (run,)))
    assert names == ["late_trainer", "collapse_step", "peak_trainer"], "a column without any value is left out"
    assert rows[0].cells == (("0.6", "0.5 … 0.7"), ("60", "60 … never"), ("0.9", ""))


def test_a_chart_of_collapse_needs_a_collapse() -> None:
    arms = [arm(name, k3=k3, collapse_step=(NAN,), peak_trainer=(0.9,)) for name, k3 in (("a", 1e-3), ("b", 1e-2))]
    assert [panel.id for panel in dose.panels(Study("t", "", tuple(arms)))[0]] == ["dose"]


def test_the_table_knows_every_endpoint_that_is_a_step() -> None:
    assert STEPS == endpoints.STEPS
