"""An advantage compares a rollout with its group and with nothing else."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import assert_same_bits
from vexact.training.advantage import EPS, group_advantages


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e300])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_equal_rewards_give_exactly_zero(reward: float, count: int, scale: bool) -> None:
    found = group_advantages([reward] * count, ["a"] * count, scale=scale)
    assert_same_bits(found.values, torch.zeros(count))
    assert (found.groups, found.zero_spread) == (1, 1)


@pytest.mark.parametrize("rewards", [[1, 0, 0, 0], [1, 0], [0, 1e-9], [0.5, 0.5, 0.5, 0.5 + 1e-16 * 2], [0, 1] * 32])
def test_a_scaled_advantage_is_the_standard_score_and_stays_small(rewards: list[float]) -> None:
    found = group_advantages(rewards, [0] * len(rewards)).values
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    expected = torch.tensor([(reward - mean) / (std + EPS) for reward in rewards])
    # statistics takes exact fractions, we take float64: both are rounded to float32, once
    assert torch.allclose(found, expected, rtol=2**-22, atol=0.0)
    assert found.abs().max() <= 10


def test_an_unscaled_advantage_is_the_distance_from_the_mean() -> None:
    found = group_advantages([1.0, 0.0, 0.0, 0.0], [0] * 4, scale=False).values
    assert found.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_a_group_of_one_has_nothing_to_be_compared_with() -> None:
    found = group_advantages([1.0, 1.0, 0.0], ["alone", "pair", "pair"], scale=False)
    assert found.values.tolist() == [0.0, 0.5, -0.5]
    assert (found.groups, found.zero_spread) == (2, 1)


rewards_and_groups = st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 3)), min_size=1, max_size=12)


@given(rewards_and_groups, st.randoms(use_true_random=False), st.booleans())
def test_the_order_of_rollouts_is_no_part_of_an_advantage(
    pairs: list[tuple[float, int]], random: object, scale: bool
) -> None:
    order = list(range(len(pairs)))
    random.shuffle(order)  # type: ignore[attr-defined]
    straight = group_advantages([r for r, _ in pairs], [g for _, g in pairs], scale=scale)
    shuffled = group_advantages([pairs[i][0] for i in order], [pairs[i][1] for i in order], scale=scale)
    assert_same_bits(shuffled.values, straight.values[order])
    assert shuffled.zero_spread == straight.zero_spread


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="reward 1 of group a"):
        group_advantages([0.0, reward], ["a", "a"])
