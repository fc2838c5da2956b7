"""Policies that a cause has changed, what they sample, and the same model in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from made import FAMILIES
from vexact.model.parameters import EMBEDDING, HEAD, NORM, stack
from vexact.model.policy import Policy, Scored
from vexact.model.rollout import Rollout
from vexact.model.rotary import inverse_frequencies
from vexact.model.tiny import tiny_config, tiny_weights
from vexact.recipe import MismatchSection
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.study.causes.registry import CAUSES
from vexact_kernels import load

REQUESTS = [
    Request(7 + i, [(7 * i + 3 * j) % 250 for j in range(4 + 33 * i)], n=2, max_tokens=10, temperature=0.9)
    for i in range(3)
]
MIXED = [replace(request, temperature=t) for request, t in zip(REQUESTS, (0.5, 1.0, 2.0), strict=True)]
SCHEDULES: list[dict[str, Any]] = [
    {"chunk": 7, "tokens_per_step": 13, "running": 3},
    {"pages": 4, "chunk": 20},  # pages are lost and made again
]


def exact(dtype: torch.dtype = torch.float32, family: str = "qwen3") -> Policy:
    """The same object each time."""
    return _exact(dtype, family)


def later(dtype: torch.dtype = torch.float32) -> Policy:
    """Other weights near those of `exact`, as a step of training leaves them; version 1; the same object each time."""
    return _later(dtype)


@cache
def _exact(dtype: torch.dtype, family: str) -> Policy:
    config = tiny_config(family, **FAMILIES[family])
    weights = tiny_weights(config)
    return Policy.build(config, lambda name: stack(config, weights, name), load(), dtype)


@cache
def _later(dtype: torch.dtype) -> Policy:
    config, before, other = exact().config, tiny_weights(exact().config), tiny_weights(exact().config, 1)
    weights = {name: tensor + 0.02 * other[name] for name, tensor in before.items()}
    return Policy.build(config, lambda name: stack(config, weights, name), load(), dtype, version=1)


def caused(cause: str, policy: Policy, **keys: Any) -> Policy:
    return CAUSES[cause](policy, MismatchSection(cause=cause, **keys))


def sampled(policy: Policy, requests: Sequence[Request] = tuple(REQUESTS), **schedule: Any) -> list[Rollout]:
    return Sampler(policy, **schedule).run(requests)


def tokens(rollouts: Sequence[Rollout]) -> list[list[int]]:
    return [list(rollout.completion) for rollout in rollouts]


def recorded(rollouts: Sequence[Rollout]) -> Tensor:
    return torch.cat([rollout.logprobs for rollout in rollouts])


def scored(policy: Policy, rollouts: Sequence[Rollout]) -> Tensor:
    return policy.logprobs([rollout.scored for rollout in rollouts]).logprob


def k3(delta: Tensor) -> float:
    """delta float32 [tokens]: log p − log q of tokens drawn from q."""
    wide = delta.double()
    return float((torch.expm1(wide) - wide).mean())


def in_float64(policy: Policy, sequence: Scored) -> Tensor:
    """Log-probabilities float64 of what is scored, by the policy's weights and temperature; nothing is rounded."""
    config, kernels = policy.config, policy.ops.kernels
    w = {name: tensor.double() for name, tensor in policy.transformer.parameters.stacked(kernels).items()}
    n, (h, g, k) = len(sequence.tokens) - 1, (config.num_heads, config.num_kv_heads, config.head_dim)
    angles = torch.arange(n).double()[:, None] * torch.from_numpy(inverse_frequencies(config.rope, k))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * weight

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    x = w[EMBEDDING][torch.tensor(sequence.tokens[:-1])]
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    for i in range(config.num_layers):
        at = f"model.layers.{i}"
        qkv = norm(x, w[f"{at}.input_layernorm.weight"]) @ w[f"{at}.self_attn.qkv_proj.weight"].T
        qkv = qkv + w.get(f"{at}.self_attn.qkv_proj.bias", 0.0)
        q, key, v = qkv.view(n, h + 2 * g, k).split([h, g, g], dim=1)
        if config.qk_norm:
            q, key = norm(q, w[f"{at}.self_attn.q_norm.weight"]), norm(key, w[f"{at}.self_attn.k_norm.weight"])
        q, key = turned(q), turned(key).repeat_interleave(h // g, dim=1)
        scores = torch.einsum("ihk,jhk->hij", q, key) * config.attention_scale
        p = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        y = torch.einsum("hij,jhk->ihk", p, v.repeat_interleave(h // g, dim=1)).flatten(1)
        x = x + y @ w[f"{at}.self_attn.o_proj.weight"].T
        gate, up = (norm(x, w[f"{at}.post_attention_layernorm.weight"]) @ w[f"{at}.mlp.gate_up_proj.weight"].T).chunk(
            2, dim=-1
        )
        x = x + (torch.nn.functional.silu(gate) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    head = w[EMBEDDING] if config.tie_word_embeddings else w[HEAD]
    logits = norm(x, w[NORM]) @ head.T / (sequence.temperature or 1.0)
    rows = torch.arange(sequence.first - 1, n)
    return logits[rows].log_softmax(-1)[torch.arange(len(rows)), torch.tensor(sequence.tokens[sequence.first :])]
