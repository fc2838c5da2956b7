"""The rollouts of a step with their scores, from one round of sampling or several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vexact.model.rollout import Rollout
from vexact.recipe import SamplingSection
from vexact.tasks import Scores
from vexact.training.advantage import groups_with_spread

# The questions of a round, by its number, and how many are wanted: their rollouts with their scores.
Round = Callable[[int, int], tuple[list[Rollout], Scores]]


@dataclass
class Gathered:
    """rollouts, rewards: of the groups that are trained. sampled, scores: all of a step, round by round."""

    rollouts: list[Rollout] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    sampled: list[Rollout] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)

    def metrics(self) -> dict[str, Any]:
        """Of all that was sampled, by the names of metrics.jsonl: what was thrown away is no part of training, but
        leaving it out would flatter the policy."""
        rewards = [reward for scores in self.scores for reward in scores.rewards]
        return {
            "reward_mean": math.fsum(rewards) / len(rewards),
            "reward_min": min(rewards),
            "reward_max": max(rewards),
            **joined(self.scores).metrics(),
            "sampling_rounds": len(self.scores),
            "sampled_groups": len({rollout.request for rollout in self.sampled}),
        }


def gather(section: SamplingSection, sample: Round) -> Gathered:
    """One round, all of it used; or with `rounds` of 2 and more dynamic sampling (DAPO, arXiv 2503.14476, eq. 11).

    Groups whose rewards are all equal teach nothing: other questions are asked in their place, until there are enough
    groups with spread, or that many rounds are over. Then the step has fewer groups, perhaps none.
    """
    found, wanted = Gathered(), section.prompts
    for number in range(section.rounds):
        rollouts, scores = sample(number, wanted)
        found.sampled.extend(rollouts)
        found.scores.append(scores)
        groups = [rollout.request for rollout in rollouts]
        kept = set(groups) if section.rounds == 1 else groups_with_spread(scores.rewards, groups)
        for rollout, reward in zip(rollouts, scores.rewards, strict=True):
            if rollout.request in kept:
                found.rollouts.append(rollout)
                found.rewards.append(reward)
        wanted -= len(kept)
        if not wanted:
            break
    return found


def joined(scores: Sequence[Scores]) -> Scores:
    """Of all rounds together."""
    return Scores(
        rewards=[value for part in scores for value in part.rewards],
        unflipped=[value for part in scores for value in part.unflipped],
        successes=[value for part in scores for value in part.successes],
        flipped=sum(part.flipped for part in scores),
        raised=sum(part.raised for part in scores),
        not_finite=sum(part.not_finite for part in scores),
        timed_out=sum(part.timed_out for part in scores),
        first_failure=next((part.first_failure for part in scores if part.first_failure), ""),
    )
