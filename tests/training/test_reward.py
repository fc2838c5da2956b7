"""What is added to a reward is what its formula says, and nothing where nothing is asked."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from helpers import assert_same_bits
from made import make_rollouts, make_trainer, shifted
from vexact.model.policy import Policy, Scored
from vexact.model.rollout import Rollout
from vexact.recipe import KLSection, LossSection
from vexact.training.advantage import group_advantages, whitened
from vexact.training.reward import kl_penalties, shaped_rewards, soft_overlong

LENGTHS = (1, 3, 8, 6)
K1 = LossSection(advantage="group_mean", kl=KLSection(0.25, "k1", "reward"))


def test_the_overlong_punishment_sinks_in_equal_steps_over_the_buffer() -> None:
    found = [soft_overlong(length, 100, 20) for length in (0, 80, 81, 90, 100, 101, 1000)]
    assert found == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]
    assert soft_overlong(7, 10, 10) == -0.7


@pytest.mark.parametrize("buffer", [0, -1, 11])
def test_a_buffer_that_does_not_fit_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"an overlong buffer of {buffer} tokens must be .* at most max_tokens = 10"):
        soft_overlong(1, 10, buffer)


def scored(policy: Policy, rollout: Rollout) -> torch.Tensor:
    return policy.logprobs([Scored(rollout.tokens, len(rollout.prompt))]).logprob


def test_a_penalty_is_what_the_anchor_says_of_the_whole_completion() -> None:
    policy, reference = make_trainer().policy, make_trainer("llama").policy
    rollouts = shifted(make_rollouts(policy, LENGTHS))
    for anchor in ("bypass", "recomputation"):
        section = replace(K1, anchor=anchor)
        found = kl_penalties(rollouts, policy, reference, section, 1024)
        assert kl_penalties(rollouts, policy, reference, section, 1) == found
        for rollout, penalty in zip(rollouts, found, strict=True):
            old = rollout.logprobs if anchor == "bypass" else scored(policy, rollout)
            exact = 0.25 * (old - scored(reference, rollout)).double().sum().item()
            assert penalty == pytest.approx(exact, rel=1e-12)


def test_what_is_not_trained_has_no_penalty() -> None:
    policy, reference = make_trainer().policy, make_trainer("llama").policy
    rollouts = make_rollouts(policy, LENGTHS)
    rollouts[1] = replace(rollouts[1], finish="nonfinite")
    rollouts[2] = replace(rollouts[2], completion=[], logprobs=torch.empty(0))
    found = kl_penalties(rollouts, policy, reference, K1, 1024)
    assert found[1] == found[2] == 0.0 and found[0] != 0.0 and found[3] != 0.0
    assert kl_penalties(rollouts[1:3], policy, reference, K1, 1024) == [0.0, 0.0]


def test_a_reward_is_the_tasks_plus_punishment_minus_penalty() -> None:
    rollouts = make_rollouts(make_trainer().policy, LENGTHS)
    section = LossSection(overlong_buffer=4, overlong_penalty=0.5)
    found = shaped_rewards(rollouts, [1, 0.1, 0, 1], [0.0, 0.2, 0.0, 0.0], section, 8)
    assert found == [1.0, -0.1, -0.5, 0.75]
    assert shaped_rewards(rollouts, [1, 0.1, 0, 1], [0.0] * 4, LossSection()) == [1.0, 0.1, 0.0, 1.0]
    assert math.isnan(shaped_rewards(rollouts[:1], [math.nan], [0.0], LossSection())[0])
    with pytest.raises(ValueError, match="an overlong buffer needs max_tokens"):
        shaped_rewards(rollouts, [0.0] * 4, [0.0] * 4, section)


def test_the_trainer_compares_shaped_rewards_as_its_section_names_it() -> None:
    reference = make_trainer("llama").policy
    trainer = make_trainer(loss=replace(K1, overlong_buffer=4))
    rollouts, rewards = make_rollouts(trainer.policy, LENGTHS), [1.0, 0.0, 0.5, 0.0]
    at_the_start = trainer.advantages(rollouts, rewards, 8)
    shaped = shaped_rewards(rollouts, rewards, [0.0] * 4, trainer.loss, 8)
    assert_same_bits(at_the_start.values, group_advantages(shaped, [0, 0, 1, 1], scale=False).values)
    trainer.reference = reference
    away = trainer.advantages(rollouts, rewards, 8)
    penalties = kl_penalties(rollouts, trainer.policy, reference, trainer.loss, 1024)
    shaped = shaped_rewards(rollouts, rewards, penalties, trainer.loss, 8)
    assert_same_bits(away.values, group_advantages(shaped, [0, 0, 1, 1], scale=False).values)
    assert not torch.equal(away.values, at_the_start.values)
    plain = make_trainer(loss=LossSection()).advantages(rollouts, rewards)
    assert_same_bits(plain.values, group_advantages(rewards, [0, 0, 1, 1]).values)


def test_the_tokens_of_a_rollout_that_is_not_trained_are_not_counted() -> None:
    trainer = make_trainer(loss=LossSection(advantage="batch_token"))
    rollouts = make_rollouts(trainer.policy, LENGTHS)
    rollouts[2] = replace(rollouts[2], finish="nonfinite")
    found = trainer.advantages(rollouts, [1.0, 0.0, 7.0, 0.5])
    assert_same_bits(found.values, whitened([1.0, 0.0, 7.0, 0.5], [0, 0, 1, 1], [1, 3, 0, 6]).values)
