"""Group-relative advantages: how much better a rollout is than the others of its prompt.

Host arithmetic in float64 with correctly rounded sums (`math.fsum`), so the order of rollouts is no part of the result.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-6  # added to the standard deviation


@dataclass(frozen=True)
class Advantages:
    """values: float32, one a rollout, in the order given. zero_spread: groups whose rewards are all equal."""

    values: Tensor
    groups: int
    zero_spread: int


def group_advantages(rewards: Sequence[float], groups: Sequence[Hashable], *, scale: bool = True) -> Advantages:
    """A = (r − mean) / (std + 1e-6) with `scale` (GRPO, arXiv 2402.03300, eq. of §4.1.2), else A = r − mean (Dr. GRPO,
    arXiv 2503.20783).

    rewards: one a rollout; groups: the prompt it belongs to. mean and std (of a sample: divisor n − 1) are those of the
    group. Equal rewards give exactly 0, and so does a group of one, which has nothing to be compared with; both count
    as groups without spread. Raises ValueError where a reward is not finite.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if not math.isfinite(reward):
            raise ValueError(f"reward {index} of group {group} is {reward}, must be finite")
        members[group].append(index)
    values = [0.0] * len(rewards)
    zero_spread = 0
    for indices in members.values():
        own = [rewards[index] for index in indices]
        if min(own) == max(own):
            zero_spread += 1
            continue
        for index, advantage in zip(indices, _spread(own, scale), strict=True):
            values[index] = advantage
    return Advantages(torch.tensor(values, dtype=torch.float32), len(members), zero_spread)


def _spread(rewards: Sequence[float], scale: bool) -> list[float]:
    """Advantages of at least two rewards that are not all equal."""
    mean = math.fsum(rewards) / len(rewards)
    differences = [reward - mean for reward in rewards]
    if not scale:
        return differences
    variance = math.fsum(difference * difference for difference in differences) / (len(rewards) - 1)
    divisor = math.sqrt(variance) + EPS
    return [difference / divisor for difference in differences]
