"""Weights of the step before: all of them, or those that a prompt's keys and values come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from caused import REQUESTS, SCHEDULES, exact, k3, later, recorded, sampled, scored, tokens
from helpers import assert_same_bits, differing
from vexact.model.batch import Batch, Chunk
from vexact.model.pages import Pages, pages_for
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.recipe import MismatchSection
from vexact.study.mismatch import Mismatch

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def seen(cause: str, step: int, dtype: torch.dtype = torch.float32, **keys: Any) -> Policy:
    """What samples in a step whose weights are `later`, those of the step before `exact`."""
    return Mismatch(MismatchSection(cause=cause, **keys), 0).sampler(later(dtype), step, exact(dtype))


def over_stale_prompt(rollout: Rollout, dtype: torch.dtype) -> Tensor:
    """Log-probabilities of a completion, by new weights over pages that old ones left of the prompt."""
    old, new, tokens, prompt = exact(dtype), later(dtype), rollout.tokens, len(rollout.prompt)
    pages = Pages(new.config, pages_for(len(tokens)), dtype)
    held = pages.take(pages.count)
    if prompt > 1:
        old.transformer.forward(Batch.of([Chunk(tokens[: prompt - 1], 0, held)]), pages, old.ops)
    batch = Batch.of([Chunk(tokens[prompt - 1 : -1], prompt - 1, held)])
    hidden = new.transformer.forward(batch, pages, new.ops)
    logits = new.ops.logits(hidden, new.transformer.head)
    ids = torch.tensor(rollout.completion)
    return new.ops.kernels.logprob(logits, ids, torch.full((len(ids),), rollout.temperature))[0]


@dtypes
def test_a_stale_prefix_is_a_cache_that_was_not_flushed(dtype: torch.dtype) -> None:
    rollouts = sampled(seen("stale-prefix", 1, dtype))
    wanted = torch.cat([over_stale_prompt(rollout, dtype) for rollout in rollouts])
    assert_same_bits(recorded(rollouts), wanted)
    for fresh in (exact(dtype), later(dtype)):  # mutants: all old, all new
        assert differing(scored(fresh, rollouts), wanted) > 0
    assert k3(scored(later(dtype), rollouts) - recorded(rollouts)) > 0


@dtypes
def test_a_stale_prefix_does_not_know_the_schedule(dtype: torch.dtype) -> None:
    policy = seen("stale-prefix", 1, dtype)
    rollouts = sampled(policy)
    assert_same_bits(scored(policy, rollouts), recorded(rollouts))
    for schedule in SCHEDULES:
        other = sampled(policy, **schedule)
        assert tokens(other) == tokens(rollouts)
        assert_same_bits(recorded(other), recorded(rollouts))


def test_a_prompt_of_one_token_has_no_prefix() -> None:
    short = [replace(request, prompt=request.prompt[:1]) for request in REQUESTS]
    rollouts, wanted = sampled(seen("stale-prefix", 1), short), sampled(later(), short)
    assert tokens(rollouts) == tokens(wanted)
    assert_same_bits(recorded(rollouts), recorded(wanted))


def test_equal_weights_leave_nothing_stale() -> None:
    copy = Policy.build(
        exact().config, exact().transformer.parameters.stacked(exact().ops.kernels).__getitem__, exact().ops.kernels,
        torch.float32,
    )  # fmt: skip
    mismatch = Mismatch(MismatchSection(cause="stale-prefix"), 0)
    rollouts, wanted = sampled(mismatch.sampler(exact(), 1, copy)), sampled(exact())
    assert tokens(rollouts) == tokens(wanted)
    assert_same_bits(recorded(rollouts), recorded(wanted))
    assert mismatch.sampler(exact(), 1, exact()) is exact()


def test_every_third_publish_is_lost() -> None:
    found = [seen("missed-sync", step, degree=3) for step in range(8)]
    lost = [step for step, policy in enumerate(found) if policy.transformer is exact().transformer]
    assert lost == [3, 6]
    assert all(policy is later() for step, policy in enumerate(found) if step not in lost)


def test_a_lost_publish_names_the_version_that_it_lost() -> None:
    policy = seen("missed-sync", 3, degree=3)
    rollouts, wanted = sampled(policy), sampled(exact())
    assert {rollout.version for rollout in rollouts} == {1}
    assert tokens(rollouts) == tokens(wanted)
    assert_same_bits(recorded(rollouts), recorded(wanted))
    assert policy.digest not in (exact().digest, later().digest)


def test_nothing_is_lost_outside_of_the_named_steps() -> None:
    steps = [step for step in range(10) if seen("missed-sync", step, degree=1, start=2, stop=5) is not later()]
    assert steps == [2, 3, 4]


def test_the_first_step_has_no_publish_to_lose() -> None:
    assert seen("missed-sync", 0, degree=1) is later()
