"""The control that must differ: torch's own path, with the same weights and the same tokens.

If transformers batched with padding and a cache agreed with itself unpadded in every bit, then this machine, or this
check, could not tell an engine that is exact from one that is not.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vexact.model.parameters import unstack
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.verification.result import Control


def huggingface(policy: Policy) -> Any:
    """transformers' model of the policy's config, weights and dtype, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = {key: value for key, value in policy.config.raw.items() if key != "model_type" and not key.startswith("_")}
    config = AutoConfig.for_model(policy.config.family, **raw)
    model = AutoModelForCausalLM.from_config(config, dtype=policy.dtype)
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
    from transformers import DynamicCache

    longest = max(len(rollout.prompt) for rollout in rollouts)
    steps = min(steps, max(len(rollout.completion) for rollout in rollouts))
    pads = [longest - len(rollout.prompt) for rollout in rollouts]
    prompts = [[0] * pad + list(rollout.prompt) for pad, rollout in zip(pads, rollouts, strict=True)]
    ids = torch.tensor(prompts).to(model.device)
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads]).to(model.device)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    columns = []
    # Newer versions of transformers call the argument `cache`, and warn of the old name. It is updated in place.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = {name: DynamicCache(config=model.config)}
    for step in range(steps):
        out = model(ids, attention_mask=mask, position_ids=position, use_cache=True, logits_to_keep=1, **cache)
        columns.append(out.logits[:, -1].float())
        ids = torch.tensor([[(*rollout.completion, *[0] * steps)[step]] for rollout in rollouts]).to(model.device)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        position = position[:, -1:] + 1
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
