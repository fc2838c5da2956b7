"""What the loop itself measures of a step, by the names of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.training.metrics import measure_mismatch


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


def replayed(rollouts: Sequence[Rollout], sampler: Policy, trainer: Policy, tokens_at_once: int) -> Tensor | None:
    """Where the sampler is older than the trainer, log-probabilities at its own weights, as `Trainer.scored` has them:
    what the trainer compared holds the staleness too. None where it is not.
    """
    chosen = sorted((r for r in rollouts if r.completion and r.finish != "nonfinite"), key=lambda rollout: rollout.id)
    if sampler.version == trainer.version or not chosen:
        return None
    return sampler.logprobs([rollout.scored for rollout in chosen], tokens_at_once).logprob


def lag_measures(
    rollouts: Sequence[Rollout], sampler: Policy, trainer: Policy, replayed: Tensor | None
) -> dict[str, Any]:
    """How old the sampler is, in versions; where it is older, mismatch compared anew with what was replayed."""
    lag = {"sampler_version": sampler.version, "lag": trainer.version - sampler.version}
    if replayed is None:
        return lag
    chosen = sorted((r for r in rollouts if r.completion and r.finish != "nonfinite"), key=lambda rollout: rollout.id)
    recorded = torch.cat([rollout.logprobs for rollout in chosen]).to(replayed.device)
    return {**lag, **measure_mismatch(replayed, recorded)}
