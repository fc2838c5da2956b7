"""torch as the engine, and another dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from caused import MIXED, SCHEDULES, caused, exact, recorded, sampled, scored, tokens
from helpers import assert_same_bits
from made import FAMILIES
from vexact.model.policy import Policy
from vexact.study.causes.engine import TorchEngine

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
NEAR = {torch.float32: 1e-4, torch.bfloat16: 1.0, torch.float16: 0.1}  # nats; a wrong formula gives several


@dtypes
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_torch_computes_the_same_model(family: str, dtype: torch.dtype) -> None:
    policy = exact(dtype, family)
    schedules: list[dict[str, Any]] = [{}, *SCHEDULES]
    for schedule in schedules:
        rollouts = sampled(caused("torch", policy), **schedule)
        delta = scored(policy, rollouts) - recorded(rollouts)
        assert 0 < delta.abs().max() < NEAR[dtype]


def test_a_mask_that_is_forgotten_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        "vexact.study.causes.engine.functional.scaled_dot_product_attention",
        lambda q, k, v, attn_mask, scale: real(q, k, v, scale=scale),
    )
    rollouts = sampled(caused("torch", exact()))
    assert (scored(exact(), rollouts) - recorded(rollouts)).abs().max() > 100 * NEAR[torch.float32]


def test_its_scores_are_torchs_own() -> None:
    """At the temperature of each row, whatever is scored beside it."""
    policy = caused("torch", exact())
    assert isinstance(policy.ops, TorchEngine)
    rollouts = sampled(exact(), MIXED)
    found = scored(policy, rollouts)
    parts = [policy.logprobs([rollout.scored]).logprob for rollout in rollouts]
    assert (found - torch.cat(parts)).abs().max() < 1e-4
    logits = torch.cat(list(policy.logits([rollout.scored for rollout in rollouts])))
    ids = torch.tensor([token for rollout in rollouts for token in rollout.completion])
    temperature = torch.tensor([rollout.temperature for rollout in rollouts for _ in rollout.completion])
    expected = (logits / temperature[:, None]).log_softmax(1).gather(1, ids[:, None])[:, 0]
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("other", ["float32", "bfloat16", "float16"])
@dtypes
def test_another_dtype_is_the_policy_of_that_dtype(dtype: torch.dtype, other: str) -> None:
    """From weights rounded before: float32's own are those that the other policy is built from."""
    policy = exact(dtype)
    found = caused("other-dtype", policy, dtype=other)
    assert found.dtype == getattr(torch, other)
    if found.dtype == dtype:
        assert found is policy
        return
    assert found.digest != policy.digest
    if dtype == torch.float32:
        wanted = sampled(exact(found.dtype))
        rollouts = sampled(found)
        assert tokens(rollouts) == tokens(wanted)
        assert_same_bits(recorded(rollouts), recorded(wanted))


def test_versions_stay() -> None:
    policy = Policy(exact().transformer, exact().ops, version=5)
    for cause in ("torch", "other-dtype", "fp8-weights", "bf16-rope", "split-k"):
        assert caused(cause, policy).version == 5
