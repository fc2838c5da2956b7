"""What is read off a run's metrics."""

from __future__ import annotations

from typing import Any

import pytest

from vexact.experiments.endpoints import (
    NAMES,
    STEPS,
    collapse_step,
    ess_of,
    evaluations,
    fingerprints,
    first_sync,
    k3_leaves,
    measure,
    parted,
    smoothed,
    success_falls,
    syncs,
)


def line(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "tokens": 100, "remedy_rejected_tokens": 0, "mismatch_max": 0.0, "mismatch_tokens": 0,
            "mismatch_compared": 100, "skew_positive": 0.0, "skew_negative": 0.0,
            "tim/k3": 0.0, "grad_norm": 1.0, "entropy": 0.5, "reward_mean": 0.4, "sampler_version": step, "lag": 0,
            "seconds": 0.5, "fingerprint": f"f{step}", **values}  # fmt: skip


def points(*values: float, every: int = 10) -> list[tuple[int, float]]:
    return [(i * every, value) for i, value in enumerate(values)]


def test_the_endpoints_of_a_run_are_those_that_its_lines_hold() -> None:
    before = {"step": -1, "eval_success": 0.5, "eval_sampler_success": 0.5}
    steps = [
        line(0, **{"tim/k3": 1e-3}),
        line(1, **{"tim/k3": 4e-3, "mismatch_max": 0.7, "mismatch_tokens": 9, "remedy_rejected_tokens": 50}),
        line(2, **{"tim/k3": 2e-3, "eval_success": 0.8, "eval_sampler_success": 0.6, "grad_norm": 3.0}),
    ]
    found = measure([before, *steps], tail=1)
    assert set(found) | {"parted", "kl_to_exact", "js_to_exact"} == set(NAMES)
    assert (found["final_trainer"], found["final_sampler"], found["late_trainer"]) == (0.8, 0.6, 0.8)
    assert found["peak_trainer"] == pytest.approx(0.65)
    assert (found["k3_start"], found["k3_median"], found["k3_max"]) == (1e-3, 2e-3, 4e-3)
    assert (found["delta_max"], found["mismatch_tokens"], found["grad_norm_max"]) == (0.7, 9, 3.0)
    assert found["kept"] == pytest.approx(1.0 - 50 / 300)
    assert (found["syncs"], found["first_sync"], found["seconds"]) == (2, 1, 1.5)
    assert (found["compared"], found["not_finite"]) == (300, 0)
    assert found["collapse_step"] is found["ess_below_half"] is found["drift"] is None


def test_a_run_without_evaluations_or_steps_has_no_such_endpoints() -> None:
    found = measure([line(0, entropy=None)])
    assert found["final_trainer"] is found["peak_trainer"] is found["entropy_end"] is None
    assert measure([])["delta_max"] is None


def test_late_success_is_the_mean_of_the_last_evaluations() -> None:
    lines = [line(i, eval_success=float(i)) for i in range(6)]
    assert measure(lines, tail=2)["late_trainer"] == 4.5
    assert evaluations([{"step": -1, "eval_success": 0.25}], "eval_success") == [(0, 0.25)]


def test_smoothing_looks_back_and_never_ahead() -> None:
    assert [value for _, value in smoothed(points(0.0, 3.0, 6.0, 9.0))] == [0.0, 1.5, 3.0, 6.0]


def test_a_run_that_falls_for_good_collapses_where_it_fell() -> None:
    assert collapse_step(points(0.8, 0.8, 0.8, 0.1, 0.1, 0.1, 0.1, 0.1)) == 40


def test_a_dip_that_is_made_good_is_no_collapse() -> None:
    dip = points(0.8, 0.8, 0.8, 0.0, 0.0, 0.8, 0.8, 0.8)
    assert any(value < 0.4 for _, value in smoothed(dip)[3:5])
    assert collapse_step(dip) is None


def test_two_dips_far_apart_are_not_one_long_fall() -> None:
    assert collapse_step(points(0.8, 0.8, 0.8, 0.0, 0.0, 0.8, 0.8, 0.8, 0.0, 0.0, 0.8, 0.8)) is None


def test_a_run_that_rises_from_little_has_not_collapsed_before() -> None:
    """Its peak is the one so far: of the whole run's, the beginning would lie below half."""
    assert collapse_step(points(0.1, 0.1, 0.1, 0.1, 0.8, 0.8, 0.8)) is None


def test_a_fall_just_before_the_end_is_not_seen_through() -> None:
    falling = [0.8, 0.8, 0.8, 0.0, 0.0, 0.0]
    assert collapse_step(points(*falling)) is None
    assert collapse_step(points(*falling, 0.0)) == 40


def test_the_effective_sample_is_the_lags_own_where_it_was_measured() -> None:
    measured = line(3, lag=2, lag_k3=0.1, ess_sequence=0.4, **{"rollout_corr/chi2_seq": 9.0})
    unasked = line(4, lag=3, lag_k3=0.0, ess_sequence=1.0, **{"rollout_corr/chi2_seq": 3.0})
    fresh = line(5, lag=0, **{"rollout_corr/chi2_seq": 3.0})
    assert ess_of([measured, unasked, fresh]) == [(3, 0.4), (4, 0.25), (5, 1.0)]
    assert measure([fresh, measured])["ess_below_half"] == 3


def test_syncs_are_changes_of_the_weights_that_sample() -> None:
    assert syncs([line(step, sampler_version=version) for step, version in enumerate([0, 0, 2, 2, 4])]) == 2
    assert syncs([{"step": 0}]) is None


def test_the_first_sync_is_the_step_that_was_sampled_with_other_weights() -> None:
    assert first_sync([line(step, sampler_version=version) for step, version in enumerate([0, 0, 0, 3, 4])]) == 3
    assert first_sync([line(step, sampler_version=0) for step in range(3)]) is first_sync([{"step": 0}]) is None


def test_steps_that_compared_tokens_and_found_no_number_are_counted() -> None:
    lines = [line(0), line(1, mismatch_max=None), line(2, mismatch_max=None, mismatch_compared=0)]
    assert (measure(lines)["compared"], measure(lines)["not_finite"]) == (200, 1)


def test_the_skew_is_the_mean_of_late_steps() -> None:
    lines = [line(step, skew_positive=float(step), skew_negative=-float(step >= 10)) for step in range(20)]
    found = measure(lines)
    assert (found["skew_positive"], found["skew_negative"]) == (14.5, -1.0)


def test_k3_leaves_where_it_has_doubled_for_good_and_not_by_chance() -> None:
    steady = [(step, 1e-3 * (1 + step % 2)) for step in range(40)]  # median of the first 20: 1.5e-3
    assert k3_leaves(steady) is None
    assert k3_leaves([(step, 1.0 if step == 30 else value) for step, value in steady]) is None
    # The median of ten steps is above from the sixth high one on.
    assert k3_leaves([(step, 4e-3 if step >= 25 else value) for step, value in steady]) == 30
    assert k3_leaves([(step, 0.0) for step in range(40)]) is k3_leaves([]) is None


def test_success_falls_where_it_is_a_tenth_below_its_peak_so_far() -> None:
    assert success_falls(points(0.5, 0.6, 0.8, 0.8, 0.8, 0.5, 0.5)) == 50
    assert success_falls(points(0.8, 0.8, 0.75, 0.8, 0.72, 0.8)) is None
    assert success_falls(points(0.1, 0.2, 0.8, 0.8)) is None  # before its peak it was lower still


def test_every_step_that_may_not_be_reached_has_what_tells_that_it_was_looked_for() -> None:
    assert {name for name in STEPS.values() if name} <= set(NAMES) and set(STEPS) <= set(NAMES)


def test_two_runs_part_at_the_first_step_whose_weights_differ() -> None:
    a = fingerprints([line(0), line(1), line(2)])
    assert parted(a, {**a, 1: "other", 2: "other"}) == 1
    assert parted(a, a) is None


def test_what_grows_with_age_and_what_grows_by_the_end() -> None:
    k3 = [0.5] * 20 + [9.0] * 7 + [2.0] * 20
    lines = [line(i, lag=i % 4, lag_k3=float(i % 4) ** 2, **{"tim/k3": value}) for i, value in enumerate(k3)]
    found = measure(lines)
    assert found["lag_with_age"] == pytest.approx(1.0) and found["k3_growth"] == 4.0
    assert measure(lines[:39])["k3_growth"] is None
    still = measure([{**each, "lag": 0, "lag_k3": 0.0, "tim/k3": 0.0} for each in lines])
    assert still["lag_with_age"] is None and still["k3_growth"] is None
