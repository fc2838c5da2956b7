"""The size of a run's noise: found on rollouts of the exact policy, confirmed on rollouts that have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.recipe import Recipe
from vexact.study.dose import POSITIONS, sampled_k3
from vexact.study.mismatch import Mismatch

Ask = Callable[[Policy, int, int], list[Rollout]]  # of fresh questions from the first on, so many, by a policy
FIRST = 4  # questions; twice as many are asked each further time, until there are enough positions
MOST = 512


def find_dose(mismatch: Mismatch, policy: Policy, step: int, ask: Ask, recipe: Recipe) -> dict[str, Any]:
    """Of the mismatch that begins with this policy; nothing where its size is known.

    By name: sigma; the divergence in nats a token that it causes on so many positions that the exact policy sampled; K3
    of the tokens that the disturbed sides then give to other questions. Raises DoseError where no size gives the dose.
    """
    section, at_once = recipe.mismatch, recipe.optimizer.tokens_at_once
    asked = 0

    def enough() -> list[Rollout]:
        nonlocal asked
        found: list[Rollout] = []
        count = FIRST
        while asked < MOST and sum(len(rollout.completion) for rollout in found) < POSITIONS:
            found += ask(policy, asked, count)
            asked, count = asked + count, 2 * count
        return found

    dose = mismatch.begin(policy, enough, at_once)
    if dose is None:
        return {}
    whole = max(step, section.start + section.ramp)
    sampler, trainer = mismatch.sampler(policy, whole), mismatch.trainer(policy, whole)
    return {
        "mismatch_sigma": dose.sigma,
        "mismatch_divergence": dose.divergence,
        "mismatch_positions": dose.positions,
        "mismatch_k3": sampled_k3(ask(sampler, asked, asked), trainer, at_once),
    }


def dose_line(found: Mapping[str, Any]) -> str:
    """One line for a reader."""
    confirmed = f", and K3 {found['mismatch_k3']:.3g} on as many sampled with it"
    return (
        f"mismatch: sigma {found['mismatch_sigma']:.6g} gives a divergence of {found['mismatch_divergence']:.3g} "
        f"a token on {found['mismatch_positions']} positions{confirmed}"
    )
