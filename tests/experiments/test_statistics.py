"""The statistics of claims against what is known of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vexact.experiments.statistics import (
    difference_interval,
    fisher_test,
    lead_interval,
    mean,
    median,
    of_several,
    rank_correlation,
    rank_correlation_interval,
    rank_correlation_within,
    ranks,
    ratio_interval,
    sign_test,
    slope,
)
from vexact.experiments.verdict import FEW


def test_a_median_of_steps_that_were_not_reached_is_late() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([1.0, 2.0, 4.0, 8.0]) == 3.0
    assert median([5.0, math.inf, math.inf]) == median([1.0, math.inf]) == math.inf
    assert math.isnan(median([])) and math.isnan(mean([]))


def test_equal_values_share_their_ranks() -> None:
    assert ranks([3.0, 1.0, 3.0, math.inf]).tolist() == [2.5, 1.0, 2.5, 4.0]


def test_the_rank_correlation_sees_order_alone() -> None:
    assert rank_correlation([1, 2, 3, 4], [1, 8, 27, 64]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [9, 5, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)  # 1 − 6·Σd²/(n(n² − 1)), Σd² = 4
    assert math.isnan(rank_correlation([1, 1], [2, 3])) and math.isnan(rank_correlation([1], [1]))


def test_the_interval_of_a_rank_correlation_is_inside_its_range_and_misses_a_constant() -> None:
    x = [float(i) for i in range(12)]
    rho = rank_correlation_interval([(x, x)])
    assert rho.value == pytest.approx(1.0) and rho.low > 0.9
    assert math.isnan(rank_correlation_interval([(x, [1.0] * 12)]).low)


def test_a_correlation_inside_groups_is_that_of_one_and_ignores_what_sets_them_apart() -> None:
    x, y = [1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 4.0, 3.0]
    assert rank_correlation_within([(x, y)]) == pytest.approx(rank_correlation(x, y))
    apart = [(x, [4.0, 3.0, 2.0, 1.0]), ([v + 100 for v in x], [104.0, 103.0, 102.0, 101.0])]
    assert rank_correlation_within(apart) == pytest.approx(-1.0)
    pooled = [value for side, _ in apart for value in side], [value for _, side in apart for value in side]
    assert rank_correlation(*pooled) > 0.5


def test_fishers_test_is_the_tail_of_drawing_without_replacement() -> None:
    assert fisher_test(3, 1, 1, 3) == 17 / 70  # the lady tasting tea: (16 + 1) / 70
    assert fisher_test(4, 0, 0, 4) == 1 / 70
    assert fisher_test(0, 4, 4, 0) == fisher_test(5, 3, 0, 0) == fisher_test(0, 0, 5, 3) == 1.0


def test_the_sign_test_is_the_tail_of_a_fair_coin() -> None:
    assert [sign_test(right, 8 - right) for right in (8, 7, 0)] == [1 / 256, 9 / 256, 1.0]


def test_a_lead_is_over_the_nearest_of_the_others_and_negative_behind_it() -> None:
    base, near, far = [0.8] * 8, [0.75] * 8, [0.2] * 8
    assert lead_interval(near, [far], base).low == pytest.approx(0.55)
    assert lead_interval(near, [far, base], base).high == pytest.approx(-0.05)
    assert lead_interval([0.85] * 8, [near], base).value == pytest.approx(0.0)  # above is as far as below


def test_of_several_intervals_none_misses_as_often_as_one_does() -> None:
    assert of_several(1) == of_several(0) == pytest.approx(0.95) and of_several(10) == pytest.approx(0.995)
    a, b = [0.0, 1.0, 2.0, 3.0], [0.5, 1.5, 2.5, 9.0]
    assert difference_interval(a, b, of_several(10)).low < difference_interval(a, b).low


def test_a_slope_is_that_of_the_line() -> None:
    assert slope([1.0, 2.0, 4.0], [3.0, 5.0, 9.0]) == pytest.approx(2.0)
    assert math.isnan(slope([1.0, 1.0], [1.0, 2.0]))


def test_intervals_are_the_same_each_time_and_cover_the_truth_as_often_as_they_say() -> None:
    """Percentile bootstraps of 16 values cover a little less than they say: 95 % means about 92 %."""
    assert ratio_interval([1.0, 2.0, 3.0], [1.0]) == ratio_interval([1.0, 2.0, 3.0], [1.0])
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        a, b = (generator.normal(0.0, 1.0, 16).tolist() for _ in range(2))
        found = difference_interval(a, b)
        covered += found.low <= 0.0 <= found.high
    assert 0.88 <= covered / 200 <= 0.98


def missed(seeds: int, times: int = 1500) -> float:
    """How often the interval of two samples of one distribution leaves 0 out."""
    generator = np.random.default_rng(1)
    found = 0
    for _ in range(times):
        a, b = (generator.normal(0.0, 1.0, seeds).tolist() for _ in range(2))
        interval = difference_interval(a, b)
        found += not interval.low <= 0.0 <= interval.high
    return found / times


def test_a_verdict_takes_as_many_seeds_as_intervals_need_to_mean_something() -> None:
    assert missed(FEW) < 0.1 < missed(5)


def test_resampling_does_not_pair_the_seeds_of_two_arms() -> None:
    """Values that move together have differences without spread; two independent samples do not."""
    a = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    found = difference_interval([x + 0.1 for x in a], a)
    assert found.value == pytest.approx(0.1)
    assert found.low < -0.5 and found.high > 0.7
