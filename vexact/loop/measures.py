"""What the loop itself measures of a step, by the names of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vexact.model.policy import Policy
from vexact.model.rollout import Rollout


def length_measures(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    lengths = [len(rollout.completion) for rollout in rollouts]
    return {
        "completion_length_mean": sum(lengths) / len(lengths),
        "completion_length_max": max(lengths),
        "stopped": sum(rollout.finish == "stop" for rollout in rollouts),
    }


def time_measures(rollouts: Sequence[Rollout], sampling: float, scoring: float, training: float) -> dict[str, Any]:
    """Seconds; sampling counts completion tokens a second, training all tokens of the rollouts."""
    sampled = sum(len(rollout.completion) for rollout in rollouts)
    trained = sum(len(rollout.prompt) + len(rollout.completion) for rollout in rollouts)
    return {
        "sampling_seconds": sampling,
        "scoring_seconds": scoring,
        "training_seconds": training,
        "seconds": sampling + scoring + training,
        "sampling_tokens_per_second": sampled / sampling,
        "training_tokens_per_second": trained / training,
    }


def lag_measures(sampler: Policy, trainer: Policy) -> dict[str, Any]:
    """How old the sampler is, in versions. trainer: the policy that the step began with."""
    return {"sampler_version": sampler.version, "lag": trainer.version - sampler.version}
