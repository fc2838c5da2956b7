"""The control that must differ: torch's own path, with the same weights and the same tokens.

If transformers batched with padding and a cache agreed with itself unpadded in every bit, then this machine, or this
check, could not tell an engine that is exact from one that is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vexact.model.parameters import unstack
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.verification.padded import PaddedBatch
from vexact.verification.result import Control


def huggingface(policy: Policy, dtype: torch.dtype | None = None) -> Any:
    """transformers' model of the policy's config and weights, in evaluation mode. dtype: by default the policy's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = {key: value for key, value in policy.config.raw.items() if key != "model_type" and not key.startswith("_")}
    config = AutoConfig.for_model(policy.config.family, **raw)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype or policy.dtype)
    weights = unstack(policy.config, policy.transformer.parameters.stacked(policy.ops.kernels))
    # A tied head is the embedding, which load_state_dict fills.
    left_over = model.load_state_dict(weights, strict=False)
    missing = set(left_over.missing_keys) - ({"lm_head.weight"} if policy.config.tie_word_embeddings else set())
    if missing or left_over.unexpected_keys:
        raise ValueError(f"transformers' model has other parameters: {sorted(missing) + left_over.unexpected_keys}")
    return model.eval().to(policy.device)


@torch.no_grad()
def logits_alone(model: Any, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """One unpadded forward a rollout: float32 [completion, V] each."""
    each = []
    for rollout in rollouts:
        logits = model(torch.tensor([rollout.tokens[:-1]]).to(model.device)).logits[0]
        each.append(logits[len(rollout.prompt) - 1 :].float())
    return each


@torch.no_grad()
def logits_batched(model: Any, rollouts: Sequence[Rollout], steps: int) -> list[Tensor]:
    """All rollouts in one left-padded batch over a cache, as `generate` computes, fed the rollouts' own tokens.

    The first forward takes the prompts, each further one a token; `steps` of them. float32 [min(steps, completion), V].
    """
    steps = min(steps, max(len(rollout.completion) for rollout in rollouts))
    batch = PaddedBatch(model, [rollout.prompt for rollout in rollouts])
    columns = []
    for step in range(steps):
        columns.append(batch.logits())
        batch.append([(*rollout.completion, *[0] * steps)[step] for rollout in rollouts])
    rows = torch.stack(columns, 1)
    return [rows[i, : len(rollout.completion)] for i, rollout in enumerate(rollouts)]


def chosen(logits: Sequence[Tensor], rollouts: Sequence[Rollout]) -> Tensor:
    """torch's log-probabilities of the rollouts' tokens at their temperatures, float32, behind one another."""
    parts = []
    for each, rollout in zip(logits, rollouts, strict=True):
        ids = torch.tensor(list(rollout.completion))[: len(each)].to(each.device)
        tempered = each / (rollout.temperature or 1.0)
        parts.append(torch.log_softmax(tempered, -1).gather(1, ids[:, None])[:, 0])
    return torch.cat(parts)


def control(policy: Policy, rollouts: Sequence[Rollout], dtype: str, steps: int = 8) -> Control:
    """How many of torch's own log-probabilities differ between its two paths."""
    rollouts = [rollout for rollout in rollouts if rollout.completion]
    if not rollouts:
        return Control(dtype, 0, 0)
    model = huggingface(policy)
    alone = chosen([rows[:steps] for rows in logits_alone(model, rollouts)], rollouts)
    batched = chosen(logits_batched(model, rollouts, steps), rollouts)
    differ = int((alone.view(torch.int32) != batched.view(torch.int32)).sum())
    return Control(dtype, alone.numel(), differ)
