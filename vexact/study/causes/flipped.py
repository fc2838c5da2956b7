"""A null arm and no mismatch: `flipped-token`.

In one step one token of each question's first rollout is replaced by the most probable other one under the exact
policy, and the whole completion is scored anew by that policy, so Δ stays 0 in every bit. What follows in the run is
what so small a difference does to an exact run. One rollout alone would often change nothing at all: where all of a
group have one reward, none of them is learned from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from vexact.model.policy import Policy, Scored
from vexact.model.rollout import Rollout


def flipped(rollouts: Sequence[Rollout], policy: Policy) -> list[Rollout]:
    """rollouts: in order of their ids. The token is the middle one of the first completion of each that has any."""
    found, changed = list(rollouts), set()
    for index, rollout in enumerate(rollouts):
        if rollout.completion and rollout.request not in changed:
            changed.add(rollout.request)
            found[index] = _flipped(rollout, policy)
    return found


def _flipped(rollout: Rollout, policy: Policy) -> Rollout:
    completion = list(rollout.completion)
    place = (len(completion) - 1) // 2
    scored = rollout.scored
    until = len(rollout.prompt) + place + 1
    (logits,) = policy.logits([replace(scored, tokens=scored.tokens[:until], first=until - 1)])
    row = logits[0].clone()
    row[completion[place]] = -torch.inf
    completion[place] = int((row == row.max()).nonzero()[0])
    again = Scored([*rollout.prompt, *completion], scored.first, scored.temperature, scored.request, scored.sample)
    logprobs = policy.logprobs([again]).logprob.to(rollout.logprobs.device)
    return replace(rollout, completion=tuple(completion), logprobs=logprobs, law=None)
