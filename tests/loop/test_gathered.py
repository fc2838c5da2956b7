"""Dynamic sampling: what is kept, what is asked anew, when it ends, and that nothing is hidden from the measures."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vexact.loop.gathered import Gathered, gather
from vexact.model.rollout import Rollout
from vexact.recipe import SamplingSection
from vexact.tasks import Scores


def rollout(request: int, sample: int) -> Rollout:
    return Rollout(request, sample, [1], [2, 3], torch.zeros(2), "stop", 1.0, 0, "digest")


def scores(rewards: Sequence[float]) -> Scores:
    return Scores(list(rewards), list(rewards), [reward == 1 for reward in rewards], 1, 0, 2, 0, "late")


class Rounds:
    """Groups of two by round; each is asked for no more groups than it has. asked: (round, wanted)."""

    def __init__(self, *rounds: Sequence[Sequence[float]]) -> None:
        self.rounds, self.asked = rounds, list[tuple[int, int]]()

    def __call__(self, number: int, wanted: int) -> tuple[list[Rollout], Scores]:
        self.asked.append((number, wanted))
        groups = self.rounds[number][:wanted]
        rollouts = [rollout(100 * number + i, j) for i, group in enumerate(groups) for j in range(len(group))]
        return rollouts, scores([reward for group in groups for reward in group])


SAME, OTHER, SPREAD = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)


def trained(found: Gathered) -> list[int]:
    return sorted({rollout.request for rollout in found.rollouts})


def test_one_round_is_used_whole() -> None:
    rounds = Rounds([SAME, SPREAD, OTHER])
    found = gather(SamplingSection(prompts=3, samples=2), rounds)
    assert (rounds.asked, trained(found)) == ([(0, 3)], [0, 1, 2])
    assert found.rollouts == found.sampled
    assert found.rewards == [1, 1, 0, 1, 0, 0]


def test_groups_without_spread_give_way_until_there_are_enough() -> None:
    rounds = Rounds([SAME, SPREAD, OTHER], [OTHER, SPREAD], [SPREAD], [SPREAD])
    found = gather(SamplingSection(prompts=3, samples=2, rounds=9), rounds)
    assert rounds.asked == [(0, 3), (1, 2), (2, 1)]
    assert trained(found) == [1, 101, 200]
    assert found.rewards == [0, 1] * 3


def test_the_rounds_are_bounded_and_a_step_may_be_left_with_nothing() -> None:
    rounds = Rounds([SAME, SAME], [SAME, OTHER], [SPREAD, SPREAD])
    found = gather(SamplingSection(prompts=2, samples=2, rounds=2), rounds)
    assert rounds.asked == [(0, 2), (1, 2)]
    assert (found.rollouts, found.rewards) == ([], [])


def test_measures_are_of_all_that_was_sampled() -> None:
    found = gather(SamplingSection(prompts=2, samples=2, rounds=2), Rounds([SAME, SPREAD], [SAME]))
    measures = found.metrics()
    assert measures["reward_mean"] == measures["success_mean"] == 5 / 6
    assert (measures["sampling_rounds"], measures["sampled_groups"]) == (2, 3)
    assert (measures["rewards_flipped"], measures["rewards_not_finite"], measures["reward_failure"]) == (2, 4, "late")
    assert sum(found.rewards) / len(found.rewards) == 0.5  # what is left alone would say something else
