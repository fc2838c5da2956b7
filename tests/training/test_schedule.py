"""Learning rates: the stated formulas against the library's cosine, the ends, and equality on every machine."""

from __future__ import annotations

import math

import pytest

from vexact.recipe import OptimizerSection
from vexact.training.schedule import cosine, factor, learning_rate


def section(schedule: str = "constant", warmup: int = 0, final: float = 0.0) -> OptimizerSection:
    return OptimizerSection(lr=0.25, schedule=schedule, warmup=warmup, final=final)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_rises_in_equal_steps_and_never_begins_with_nothing(schedule: str) -> None:
    rates = [learning_rate(section(schedule, warmup=4), step, 20) for step in range(5)]
    assert rates == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.25], rel=1e-15)
    assert rates[4] == 0.25


def test_constant_stays_and_linear_goes_down_to_its_share() -> None:
    assert {learning_rate(section(), step, 20) for step in range(20)} == {0.25}
    down = [factor(section("linear", warmup=2, final=0.1), step, 12) for step in range(2, 13)]
    assert down == pytest.approx([1 - 0.09 * i for i in range(11)], rel=1e-15)
    assert factor(section("linear", warmup=2, final=0.1), 99, 12) == pytest.approx(0.1)


@pytest.mark.parametrize(("warmup", "final", "steps"), [(0, 0.0, 10), (3, 0.1, 17), (0, 0.5, 1), (5, 0.0, 5)])
def test_cosine_is_the_formula(warmup: int, final: float, steps: int) -> None:
    for step in range(warmup, steps + 1):
        p = (step - warmup) / max(1, steps - warmup)
        expected = final + (1 - final) * (1 + math.cos(math.pi * p)) / 2
        assert factor(section("cosine", warmup, final), step, steps) == pytest.approx(expected, abs=1e-15)


def test_the_cosine_of_its_own_is_the_nearest_number() -> None:
    from mpmath import mp

    with mp.workprec(400):
        for denominator in (1, 2, 3, 7, 1000, 99991):
            for numerator in {0, 1, denominator // 3, denominator // 2, denominator - 1, denominator}:
                exact = mp.cos(mp.pi * numerator / denominator)
                assert cosine(numerator, denominator) == (float(exact) if abs(exact) > 1e-30 else pytest.approx(0))


def test_a_run_of_any_length_has_a_rate_above_nothing_at_each_of_its_steps() -> None:
    for schedule in ("constant", "linear", "cosine"):
        for steps in (1, 2, 9):
            for warmup in (0, 1, 20):
                assert all(learning_rate(section(schedule, warmup), step, steps) > 0 for step in range(steps))
