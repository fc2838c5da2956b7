"""An advantage compares a rollout with its group and with nothing else."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import assert_same_bits
from vexact.training.advantage import (
    EPS,
    WHITENING_EPS,
    advantages_of,
    group_advantages,
    groups_with_spread,
    leave_one_out,
    whitened,
)

NAMES = ("group_std", "group_mean", "leave_one_out", "batch_sequence", "batch_token")


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


def test_the_plain_reward_is_compared_with_nothing() -> None:
    found = advantages_of("reward", [1.0, 0.0, 0.1, 1.0], ["a", "a", "b", "b"], [3, 0, 2, 1])
    assert_same_bits(found.values, torch.tensor([1.0, 0.0, 0.1, 1.0]))
    assert (found.groups, found.zero_spread) == (2, 0)
    assert advantages_of("reward", [1.0, 1.0, 0.0], ["a", "a", "b"], [1, 1, 1]).zero_spread == 2
    with pytest.raises(ValueError, match="reward 1 of group a"):
        advantages_of("reward", [1.0, float("nan")], ["a", "a"], [1, 1])


def test_a_group_of_one_has_nothing_to_be_compared_with() -> None:
    found = group_advantages([1.0, 1.0, 0.0], ["alone", "pair", "pair"], scale=False)
    assert found.values.tolist() == [0.0, 0.5, -0.5]
    assert (found.groups, found.zero_spread) == (2, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rewards", [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1], [1, 0], [0.1] * 3, []])
def test_every_kind_is_finite_and_small_and_zero_where_nothing_differs(name: str, rewards: list[float]) -> None:
    found = advantages_of(name, rewards, [0] * len(rewards), [3] * len(rewards))
    assert found.values.isfinite().all() and (found.values.abs() <= 10).all()
    if len(set(rewards)) < 2:
        assert_same_bits(found.values, torch.zeros(len(rewards)))
        assert found.zero_spread == found.groups == bool(rewards)


def test_a_left_out_reward_is_compared_with_the_mean_of_the_others() -> None:
    rewards, groups = [1.0, 0.0, 0.0, 0.5, 7.0, 2.0, 3.0], [0, 0, 0, 0, 1, 2, 2]
    found = leave_one_out(rewards, groups)
    for index in (0, 1, 2, 3, 5, 6):
        others = [r for i, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == groups[index] and i != index]
        assert found.values[index] == torch.tensor(rewards[index] - statistics.fmean(others))
    assert found.values[4] == 0.0  # alone in its group
    assert (found.groups, found.zero_spread) == (3, 1)
    # n/(n − 1) times the distance from the mean, as verl writes it
    mean = group_advantages(rewards[:4], [0] * 4, scale=False).values
    assert torch.allclose(found.values[:4], mean * 4 / 3, rtol=2**-22, atol=0.0)


def test_whitened_by_token_each_token_counts_and_by_sequence_each_rollout() -> None:
    rewards, groups, lengths = [1.0, 0.0, 0.25, 1.0], ["a", "a", "b", "b"], [1, 5, 2, 4]
    for counts in (lengths, [1] * 4):
        every = [reward for reward, count in zip(rewards, counts, strict=True) for _ in range(count)]
        mean, std = statistics.fmean(every), math.sqrt(statistics.variance(every) + WHITENING_EPS)
        found = whitened(rewards, groups, counts).values
        assert torch.allclose(found, torch.tensor([(r - mean) / std for r in rewards]), rtol=2**-22, atol=0.0)
        tokens = found.repeat_interleave(torch.tensor(counts)).double()
        assert abs(tokens.mean()) < 1e-6 and abs(tokens.std() - 1) < 1e-6
    by_name = [advantages_of(name, rewards, groups, lengths).values for name in ("batch_token", "batch_sequence")]
    assert not torch.equal(*by_name)
    assert_same_bits(by_name[0], whitened(rewards, groups, lengths).values)


def test_a_rollout_without_a_token_has_no_part_in_what_is_whitened_by_token() -> None:
    found = whitened([1.0, 5.0, 0.0], [0, 0, 0], [2, 0, 3])
    assert_same_bits(found.values[[0, 2]], whitened([1.0, 0.0], [0, 0], [2, 3]).values)
    assert found.values[1] == 0.0
    assert whitened([1.0, 5.0, 1.0], [0, 0, 0], [2, 0, 3]).values.count_nonzero() == 0


def test_dynamic_sampling_keeps_the_groups_whose_rewards_differ() -> None:
    rewards, groups = [1, 1, 0, 0, 1, 0, 1, 0.1, 0.1], list("aabbccddd")
    assert groups_with_spread(rewards, groups) == {"c", "d"}
    assert groups_with_spread([*rewards[:4], 1.0], [*"aabb", "alone"]) == set()
    advantages = group_advantages(rewards, groups).values
    assert {g for g, a in zip(groups, advantages, strict=True) if a} == {"c", "d"}


def test_a_kind_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no advantage is called grpo"):
        advantages_of("grpo", [1.0], [0], [1])


rewards_and_groups = st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 3)), min_size=1, max_size=12)


@given(rewards_and_groups, st.randoms(use_true_random=False), st.sampled_from(NAMES))
def test_the_order_of_rollouts_is_no_part_of_an_advantage(
    pairs: list[tuple[float, int]], random: object, name: str
) -> None:
    order = list(range(len(pairs)))
    random.shuffle(order)  # type: ignore[attr-defined]
    lengths = [index % 4 for index in order]
    straight = advantages_of(name, [r for r, _ in pairs], [g for _, g in pairs], [i % 4 for i in range(len(pairs))])
    shuffled = advantages_of(name, [pairs[i][0] for i in order], [pairs[i][1] for i in order], lengths)
    assert_same_bits(shuffled.values, straight.values[order])
    assert shuffled.zero_spread == straight.zero_spread


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    for name in NAMES:
        with pytest.raises(ValueError, match="reward 1 of group a"):
            advantages_of(name, [0.0, reward], ["a", "a"], [1, 1])
    with pytest.raises(ValueError, match="reward 1 of group a"):
        groups_with_spread([0.0, reward], ["a", "a"])
