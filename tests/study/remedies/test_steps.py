"""Remedies of whole steps decide by what was measured, and go on where they were."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from vexact.study.remedies import MIPU, Resync, StepScaling, SurgeSchedule, Together


def measured(**values: float) -> dict[str, float]:
    return {
        "ess_token": 0.9, "ess_sequence": 0.4, "lag_k3": 0.2, "lag": 3, "candidate": 0, "acceptance_token": 0.0,
        "acceptance_token_raw": 0.0, "acceptance_sequence": 0.0, "acceptance_sequence_raw": 0.0,
        "completion_length_mean": 10.0, "k3": 0.0, "tim/k3": 0.0, **values,
    }  # fmt: skip


def test_a_resync_comes_where_the_ratio_is_spread_too_far() -> None:
    assert Resync("ess", 0.5, "sequence").after_update(measured()) == "sync"
    assert Resync("ess", 0.5, "token").after_update(measured()) == "none"
    assert Resync("ess", 0.5, "token").after_update(measured(ess_token=math.nan)) == "sync"
    assert Resync("k3", 0.1).after_update(measured()) == "sync"
    assert Resync("k3", 0.3).after_update(measured()) == "none"
    assert Resync("k3", 0.3).after_update(measured(lag_k3=math.inf)) == "sync"
    assert [Resync("every", every=4).after_update(measured(lag=lag)) for lag in range(5)] == ["none"] * 3 + ["sync"] * 2


def test_a_batch_is_discarded_only_where_that_is_asked_for() -> None:
    assert Resync("ess", 0.5, "sequence").before_update(measured()) == "use"
    assert Resync("ess", 0.5, "sequence", discard=True).before_update(measured()) == "discard"
    assert Resync("ess", 0.5, "sequence", discard=True).before_update(measured(ess_sequence=0.5)) == "use"


def test_a_step_is_as_long_as_the_root_of_what_is_left() -> None:
    assert StepScaling().lr_scale(measured()) == math.sqrt(0.4)
    assert StepScaling("token").lr_scale(measured()) == math.sqrt(0.9)
    assert StepScaling(on_policy=0.3).lr_scale(measured()) == 1.0
    assert StepScaling(on_policy=0.1, cap=1.5).lr_scale(measured()) == 1.5
    assert 0.0 < StepScaling().lr_scale(measured(ess_sequence=0.0)) < 1e-5


def test_the_rate_is_halved_after_a_surge_down_to_its_floor() -> None:
    schedule = SurgeSchedule(window=4, surge=3.0, period=1.5, floor=0.2)
    scales = []
    for step in range(60):
        scales.append(schedule.lr_scale(measured()))
        schedule.after_update(measured(completion_length_mean=10.0 if step < 7 else 30.0))
    assert schedule.since == 8  # counted from 1; three times the mean of the first four
    assert scales == [1.0] * 20 + [0.5] * 12 + [0.25] * 12 + [0.2] * 16  # each 1.5·8 = 12 steps behind the surge


def test_no_surge_halves_nothing() -> None:
    schedule = SurgeSchedule(window=4, surge=3.1, period=0.1)
    for step in range(60):
        assert schedule.lr_scale(measured()) == 1.0
        schedule.after_update(measured(completion_length_mean=10.0 if step < 7 else 30.0))


def test_a_surge_of_mismatch_is_one_of_the_discrepancy() -> None:
    """Not of `k3`, in which lag and drift are; and where the sampler is exact there is none."""
    schedule = SurgeSchedule("k3", window=2, surge=2.0)
    for k3, discrepancy, since in ((0.1, 0.1, 0), (0.1, 0.1, 0), (9.0, 0.1, 0), (0.1, 0.3, 4)):
        schedule.after_update(measured(**{"k3": k3, "tim/k3": discrepancy}))
        assert schedule.since == since
    exact = SurgeSchedule("k3", window=1)
    for _ in range(5):
        exact.after_update(measured(k3=1.0))
    assert not exact.since


def test_the_schedule_goes_on_from_its_state() -> None:
    whole, first = SurgeSchedule(window=2, period=0.5), SurgeSchedule(window=2, period=0.5)
    lengths = [1.0, 1.0, math.nan, 3.0, 1.0, 9.0, 1.0]
    for length in lengths[:4]:
        whole.after_update(measured(completion_length_mean=length))
        first.after_update(measured(completion_length_mean=length))
    resumed = Together(SurgeSchedule(window=2, period=0.5), Resync("k3", 9.0))
    resumed.take_up(Together(first, Resync("k3", 9.0)).state())
    for length in lengths[4:]:
        whole.after_update(measured(completion_length_mean=length))
        resumed.after_update(measured(completion_length_mean=length))
        assert resumed.lr_scale(measured()) == whole.lr_scale(measured())
    assert whole.lr_scale(measured()) == 0.5
    fresh = SurgeSchedule(window=2, period=0.5)  # the mutant: one that forgot
    for length in lengths[4:]:
        fresh.after_update(measured(completion_length_mean=length))
    assert fresh.lr_scale(measured()) == 1.0


def test_only_a_candidate_is_taken_back() -> None:
    remedy = MIPU(start=1e-2)
    for candidate, acceptance, before, after in (
        (0, -1.0, "use", "none"),
        (1, -0.009, "use", "none"),
        (1, -0.011, "discard", "rollback"),
        (1, 1.0, "use", "none"),
        (1, math.nan, "discard", "rollback"),
    ):
        metrics = measured(candidate=candidate, acceptance_token=acceptance)
        assert (remedy.before_update(metrics), remedy.after_update(metrics)) == (before, after)
    raw = MIPU(start=1e-2, level="sequence", fold=False)
    assert raw.before_update(measured(candidate=1, acceptance_sequence_raw=-0.1)) == "discard"
    assert raw.before_update(measured(candidate=1, acceptance_sequence=-0.1)) == "use"


def test_the_loss_that_is_borne_shrinks() -> None:
    remedy, found = MIPU(start=4e-3, end=1e-3, steps=3), []
    for _ in range(5):
        found.append(remedy.c)
        remedy.after_update(measured())
    assert found == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3, 1e-3])
    resumed = MIPU(start=4e-3, end=1e-3, steps=3)
    resumed.take_up({"done": 2})
    assert resumed.c == pytest.approx(2e-3)
    assert MIPU(start=4e-3).c == 4e-3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Resync("every"), "at least 1 step"),
        (lambda: Resync("k3", 0.0), "a threshold above 0"),
        (lambda: StepScaling(on_policy=2.0), "0 < ESS_on"),
        (lambda: SurgeSchedule(surge=1.0), "surge above 1"),
        (lambda: MIPU(0.0, fold=False), "folded advantages or c above 0"),
    ],
)
def test_what_could_not_decide_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
