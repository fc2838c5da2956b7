"""Advantages: how much better a rollout is than others of its prompt, or of its batch.

Host arithmetic in float64 with correctly rounded sums (`math.fsum`) and one rounding to float32, so the order of
rollouts is no part of the result. Every standard deviation is that of a sample: ddof = 1, divisor n − 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-6  # added to the standard deviation of a group (verl's; TRL has 1e-4)
WHITENING_EPS = 1e-8  # added to the variance of a batch, under the root (TRL's and verl's masked_whiten)


@dataclass(frozen=True)
class Advantages:
    """values: float32, one a rollout, in the order given. zero_spread: groups whose rewards are all equal."""

    values: Tensor
    groups: int
    zero_spread: int


def advantages_of(
    name: str, rewards: Sequence[float], groups: Sequence[Hashable], lengths: Sequence[int]
) -> Advantages:
    """The advantages that `loss.advantage` names.

    rewards: one a rollout; groups: the prompt it belongs to; lengths: its completion tokens. Raises ValueError where a
    reward is not finite.
    """
    if name == "group_std":
        return group_advantages(rewards, groups)
    if name == "group_mean":
        return group_advantages(rewards, groups, scale=False)
    if name == "leave_one_out":
        return leave_one_out(rewards, groups)
    if name == "batch_sequence":
        return whitened(rewards, groups, [1] * len(rewards))
    if name == "batch_token":
        return whitened(rewards, groups, lengths)
    if name == "reward":
        return plain(rewards, groups)
    raise ValueError(f"no advantage is called {name}")


def group_advantages(rewards: Sequence[float], groups: Sequence[Hashable], *, scale: bool = True) -> Advantages:
    """A = (r − mean) / (std + 1e-6) with `scale` (GRPO, arXiv 2402.03300, eq. of §4.1.2), else A = r − mean (Dr. GRPO,
    arXiv 2503.20783).

    rewards: one a rollout; groups: the prompt it belongs to. mean and std (of a sample: divisor n − 1) are those of the
    group. Equal rewards give exactly 0, and so does a group of one, which has nothing to be compared with; both count
    as groups without spread. Raises ValueError where a reward is not finite.
    """
    return _by_group(rewards, groups, lambda own: _spread(own, scale))


def leave_one_out(rewards: Sequence[float], groups: Sequence[Hashable]) -> Advantages:
    """A = r − mean of the others of its group: RLOO, arXiv 2402.14740; not scaled.

    Equal rewards and a group of one give exactly 0, as in `group_advantages`. Raises ValueError likewise.
    """
    return _by_group(
        rewards, groups, lambda own: [reward - math.fsum([*own, -reward]) / (len(own) - 1) for reward in own]
    )


def whitened(rewards: Sequence[float], groups: Sequence[Hashable], counts: Sequence[int]) -> Advantages:
    """A = (r − mean) / sqrt(var + 1e-8) over the whole batch, each rollout counted `counts` times: its tokens, as in
    REINFORCE++ (arXiv 2501.03262; verl's `reinforce_plus_plus`), or once.

    mean = Σcr/n, var = Σc(r − mean)²/(n − 1) with n = Σc. Where all counted rewards are equal, or n is 1, every
    advantage is exactly 0; a rollout that is counted 0 times (no token, nothing to train) has 0 too. groups are only
    counted. Raises ValueError where a reward is not finite.
    """
    members = _members(rewards, groups)
    zero_spread = sum(len({rewards[index] for index in indices}) == 1 for indices in members.values())
    counted = [(reward, count) for reward, count in zip(rewards, counts, strict=True) if count]
    total = sum(count for _, count in counted)
    values = [0.0] * len(rewards)
    if len({reward for reward, _ in counted}) > 1:
        mean = math.fsum(reward * count for reward, count in counted) / total
        variance = math.fsum((reward - mean) * (reward - mean) * count for reward, count in counted) / (total - 1)
        divisor = math.sqrt(variance + WHITENING_EPS)
        values = [(reward - mean) / divisor if count else 0.0 for reward, count in zip(rewards, counts, strict=True)]
    return Advantages(torch.tensor(values, dtype=torch.float32), len(members), zero_spread)


def plain(rewards: Sequence[float], groups: Sequence[Hashable]) -> Advantages:
    """A = r, compared with nothing: REINFORCE without a baseline (Williams 1992). With rewards of 1 and 0 only what is
    right is learned from, and what is wrong not at all.

    groups are only counted. Raises ValueError where a reward is not finite.
    """
    members = _members(rewards, groups)
    zero_spread = sum(len({rewards[index] for index in indices}) == 1 for indices in members.values())
    return Advantages(torch.tensor(list(rewards), dtype=torch.float32), len(members), zero_spread)


def groups_with_spread(rewards: Sequence[float], groups: Sequence[Hashable]) -> set[Hashable]:
    """The groups that dynamic sampling keeps: those whose rewards are not all equal (DAPO, arXiv 2503.14476, eq. 11,
    where rewards are right or wrong). The others have advantage 0 and are sampled anew by the loop.

    rewards: of the task, before anything is added to them. Raises ValueError where one is not finite.
    """
    members = _members(rewards, groups)
    return {group for group, indices in members.items() if len({rewards[index] for index in indices}) > 1}


def _members(rewards: Sequence[float], groups: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Indices of the rollouts of each group."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if not math.isfinite(reward):
            raise ValueError(f"reward {index} of group {group} is {reward}, must be finite")
        members[group].append(index)
    return members


def _by_group(
    rewards: Sequence[float], groups: Sequence[Hashable], compare: Callable[[Sequence[float]], Sequence[float]]
) -> Advantages:
    """compare: the advantages of at least two rewards of one group that are not all equal."""
    members = _members(rewards, groups)
    values = [0.0] * len(rewards)
    zero_spread = 0
    for indices in members.values():
        own = [rewards[index] for index in indices]
        if min(own) == max(own):
            zero_spread += 1
            continue
        for index, advantage in zip(indices, compare(own), strict=True):
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
