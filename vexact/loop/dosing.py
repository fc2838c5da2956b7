"""The size of a run's noise: found on rollouts of the exact policy, confirmed on rollouts that have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.recipe import Recipe
from vexact.study.dose import sampled_k3
from vexact.study.mismatch import Mismatch


def find_dose(
    mismatch: Mismatch, policy: Policy, step: int, sample: Callable[[Policy], Sequence[Rollout]], recipe: Recipe
) -> dict[str, Any]:
    """Of the mismatch that begins with this policy; nothing where its size is known.

    sample: rollouts of one set of questions by a policy. By name: sigma; the divergence in nats a token that it causes
    on so many positions that the exact policy sampled; K3 of the tokens that the disturbed sampler then draws, 0 where
    it is the trainer that is disturbed. Raises DoseError where no size gives the dose.
    """
    section, at_once = recipe.mismatch, recipe.optimizer.tokens_at_once
    dose = mismatch.begin(policy, lambda: sample(policy), at_once)
    if dose is None:
        return {}
    noisy = mismatch.sampler(policy, max(step, section.start + section.ramp))
    return {
        "mismatch_sigma": dose.sigma,
        "mismatch_divergence": dose.divergence,
        "mismatch_positions": dose.positions,
        "mismatch_k3": 0.0 if noisy is policy else sampled_k3(sample(noisy), policy, at_once),
    }


def dose_line(found: Mapping[str, Any]) -> str:
    """One line for a reader."""
    confirmed = f", and K3 {found['mismatch_k3']:.3g} on as many sampled with it" if found["mismatch_k3"] else ""
    return (
        f"mismatch: sigma {found['mismatch_sigma']:.6g} gives a divergence of {found['mismatch_divergence']:.3g} "
        f"a token on {found['mismatch_positions']} positions{confirmed}"
    )
