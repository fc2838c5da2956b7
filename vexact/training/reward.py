"""What is added to the rewards of a task before they are compared: the overlong punishment, KL to the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.recipe import LossSection
from vexact.training.kl import kl_penalty


def soft_overlong(length: int, max_tokens: int, buffer: int) -> float:
    """What DAPO adds to the reward of a completion of that many tokens (arXiv 2503.14476, eq. 13): 0 up to max_tokens −
    buffer, from there in equal steps down to −1 at max_tokens, −1 beyond.

    Raises ValueError unless 0 < buffer ≤ max_tokens.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"an overlong buffer of {buffer} tokens must be above 0 and at most max_tokens = {max_tokens}")
    return max(-1.0, min(0.0, (max_tokens - buffer - length) / buffer))


def kl_penalties(
    rollouts: Sequence[Rollout], policy: Policy, reference: Policy, loss: LossSection, tokens_at_once: int
) -> list[float]:
    """What each rollout's reward loses: `loss.kl.coef` times the sum over its tokens of the estimate of log π_old −
    log π_ref, π_old by `loss.anchor`. 0 for what is not trained: rollouts without a token, and `nonfinite` ones.
    """
    penalties = [0.0] * len(rollouts)
    chosen = [i for i, rollout in enumerate(rollouts) if rollout.completion and rollout.finish != "nonfinite"]
    if not chosen:
        return penalties
    sequences = [rollouts[index].scored for index in chosen]
    lengths = [sequence.rows for sequence in sequences]
    theirs = reference.logprobs(sequences, tokens_at_once).logprob.split(lengths)
    if loss.anchor == "recomputation":
        ours = policy.logprobs(sequences, tokens_at_once).logprob.split(lengths)
    else:
        ours = tuple(rollouts[index].logprobs.to(policy.device) for index in chosen)
    for index, old, of_reference in zip(chosen, ours, theirs, strict=True):
        penalties[index] = kl_penalty(old, of_reference, loss.kl, policy.ops.kernels)
    return penalties


def shaped_rewards(
    rollouts: Sequence[Rollout],
    rewards: Sequence[float],
    penalties: Sequence[float],
    loss: LossSection,
    max_tokens: int | None = None,
) -> list[float]:
    """Reward + `overlong_penalty` · soft_overlong − penalty of each rollout, summed in float64 and rounded once.

    max_tokens: of a completion; needed with an overlong buffer (ValueError). A reward that is not finite stays so.
    """
    shaped = []
    for rollout, reward, penalty in zip(rollouts, rewards, penalties, strict=True):
        parts = [float(reward), -penalty]
        if loss.overlong_buffer:
            if max_tokens is None:
                raise ValueError("an overlong buffer needs max_tokens")
            parts.append(
                loss.overlong_penalty * soft_overlong(len(rollout.completion), max_tokens, loss.overlong_buffer)
            )
        shaped.append(math.fsum(parts) if all(map(math.isfinite, parts)) else sum(parts))
    return shaped
