"""Charts by step: the null arms as a band, the arms that have a colour, and metrics that only some runs have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runs import lines_of, run, small_recipe
from vexact.recipe import CheckpointSection, EvalSection, LossSection, MismatchSection, RemedySection, RunSection
from vexact.report.by_step import GRADIENT, METRICS, Metric, lit_arms, panels, small_multiples
from vexact.report.curve import Curve
from vexact.report.figure import Grey, Line, Panel
from vexact.report.study import Arm, SeedRun, Study


def arm(name: str, role: str = "arm", ends: tuple[float, ...] = (0.5,), metric: str = "eval_success") -> Arm:
    runs = (SeedRun(i, {metric: Curve.of([(0, 0.1), (1, end)])}) for i, end in enumerate(ends))
    return Arm(name, role, name, {}, tuple(runs))


def greys(panel: Panel) -> list[Grey]:
    return [mark for mark in panel.marks if isinstance(mark, Grey)]


def test_null_arms_are_one_band_from_their_least_to_their_greatest_value() -> None:
    nulls = (arm("a", "null", (0.3, 0.4)), arm("b", "null", (0.6,)))
    drawn, _ = panels(Study("t", "", (arm("exact", "exact"), *nulls)))
    (band,) = greys(drawn[0])
    assert (band.x, band.low, band.high) == ((0.0, 1.0), (0.1, 0.3), (0.1, 0.6))


def test_one_null_run_is_no_band() -> None:
    drawn, _ = panels(Study("t", "", (arm("exact", "exact"), arm("a", "null"))))
    assert greys(drawn[0]) == []


def test_seeds_have_a_band_and_one_seed_has_none() -> None:
    drawn, _ = panels(Study("t", "", (arm("several", ends=(0.2, 0.3, 0.9)), arm("one"))))
    several, one = (mark for mark in drawn[0].marks if isinstance(mark, Line))
    assert (several.low[-1], several.y[-1], several.high[-1]) == (0.2, 0.3, 0.9)
    assert one.low == one.high == ()


def test_metrics_that_no_run_or_only_some_have_are_said() -> None:
    drawn, missing = panels(Study("t", "", (arm("a"), arm("b", metric="entropy"))))
    assert [panel.id for panel in drawn] == ["success", "entropy"]
    assert "Not measured by b." in drawn[0].note and "Not measured by a." in drawn[1].note
    assert "Gradient norm" in missing and "K3 with staleness" not in missing


def test_what_equals_k3_is_not_drawn_twice() -> None:
    curves = {"tim/k3": Curve.of([(0, 0.1)]), "rollout_corr/k3_kl": Curve.of([(0, 0.1)])}
    other = {**curves, "rollout_corr/k3_kl": Curve.of([(0, 0.2)])}
    ids = lambda each: [p.id for p in panels(Study("t", "", (Arm("a", "arm", "a", {}, (SeedRun(0, each),)),)))[0]]  # noqa: E731
    assert ids(curves) == ["k3"] and ids(other) == ["k3", "k3-whole"]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Metric → its values in a run that measures all there is."""
    folder = tmp_path_factory.mktemp("logged")
    recipe = small_recipe(
        folder / "run", folder / "odd.py", checkpoint=CheckpointSection(), eval=EvalSection(items=2, every=2),
        loss=LossSection(name="reinforce", remedy=RemedySection(resync="ess", resync_level="sequence")),
        mismatch=MismatchSection(site="weights", sigma=0.2),
        run=RunSection(folder=str(folder / "run"), diagnose=2, diagnose_batch=1),
    )  # fmt: skip
    run(replace(recipe, task=replace(recipe.task, held_out=0.1)))
    found: dict[str, list[float]] = {}
    for line in lines_of(folder / "run"):
        for name, value in line.items():
            if isinstance(value, int | float):
                found.setdefault(name, []).append(float(value))
    return found


@pytest.mark.parametrize("metric", [*METRICS, *GRADIENT], ids=lambda metric: metric.id)
def test_a_run_logs_what_charts_are_drawn_of(metric: Metric, logged: dict[str, list[float]]) -> None:
    assert set(metric.names) | set(metric.beside) <= logged.keys()


def test_what_a_run_logs_that_has_nothing_to_measure_is_what_is_left_out(logged: dict[str, list[float]]) -> None:
    assert min(logged["ess_sequence"]) < 1.0 and min(logged["gap/ess_sequence"]) < 1.0
    idle = {metric.names[0]: metric.idle for metric in (*METRICS, *GRADIENT) if metric.idle is not None}
    zero = dict.fromkeys(("policy_drift_k3", "skew_positive", "skew_negative"), 0.0)
    assert idle == {"ess_sequence": 1.0, "ess_token": 1.0, **zero}
    curves = {name: Curve.of([(0, value), (1, value)]) for name, value in idle.items() if value is not None}
    study = lambda each: Study("t", "", (Arm("a", "arm", "a", {}, (SeedRun(0, each),)),))  # noqa: E731
    assert panels(study(curves))[0] == panels(study(curves), GRADIENT)[0] == []
    curves["ess_sequence"] = Curve.of([(0, 1.0), (1, 0.4)])
    curves["skew_negative"] = Curve.of([(0, 0.0), (1, -0.2)])
    drawn = [panel.id for metrics in (METRICS, GRADIENT) for panel in panels(study(curves), metrics)[0]]
    assert drawn == ["ess-lag", "skew-negative"]


def test_what_nobody_asked_for_is_not_missed() -> None:
    assert panels(Study("t", "", (arm("a"),)), GRADIENT) == ([], [])


def test_of_many_arms_the_exact_one_and_the_farthest_are_coloured() -> None:
    arms = [arm(f"a{i}", ends=(i / 20,)) for i in range(12)]
    study = Study("t", "", (*arms, arm("exact", "exact"), arm("null", "null")))
    assert lit_arms(study) == [12, 0, 1, 2, 10, 11]
    assert len(small_multiples(study)) == 14
    few = Study("t", "", (*arms[:3], arm("exact", "exact"), arm("null", "null")))
    assert lit_arms(few) == [3, 0, 1, 2] and small_multiples(few) == []


def test_the_grey_band_stands_for_the_null_arms_of_the_first_exact_arm_and_hides_no_others() -> None:
    other = replace(arm("plain draws", "null", (0.8, 0.9)), beside="plain exact")
    arms = (arm("exact", "exact"), arm("draws", "null", (0.3, 0.4)), arm("plain exact", "exact"), other)
    study = Study("t", "", arms)
    assert study.chance == [1]
    drawn, _ = panels(study)
    (band,) = [mark for mark in drawn[0].marks if isinstance(mark, Grey)]
    assert band.label.endswith("beside exact") and max(band.high) == 0.4
