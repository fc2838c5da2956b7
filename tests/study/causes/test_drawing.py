"""A sampler that draws from another law than it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from caused import REQUESTS, caused, exact, in_float64, k3, recorded, sampled, scored, tokens
from helpers import assert_same_bits
from vexact.model.rollout import Rollout
from vexact.study.causes.drawing import nucleus
from vexact_kernels import load

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
MANY = [replace(request, n=24) for request in REQUESTS[:1]]


@dtypes
def test_a_factor_of_one_and_a_whole_nucleus_are_exact(dtype: torch.dtype) -> None:
    rollouts = sampled(exact(dtype))
    for cause in (caused("temperature", exact(dtype), temperature=1.0), caused("raw-logprob", exact(dtype), top_p=1.0)):
        other = sampled(cause)
        assert tokens(other) == tokens(rollouts)
        assert_same_bits(recorded(other), recorded(rollouts))


def test_what_is_recorded_is_of_the_temperature_that_was_used() -> None:
    rollouts = sampled(caused("temperature", exact(), temperature=1.5))
    really = torch.cat([in_float64(exact(), replace(r.scored, temperature=1.35)) for r in rollouts])
    said = torch.cat([in_float64(exact(), r.scored) for r in rollouts])
    assert {rollout.temperature for rollout in rollouts} == {0.9}
    assert (recorded(rollouts) - really).abs().max() < 1e-4
    assert (recorded(rollouts) - said).abs().max() > 0.1
    assert k3(scored(exact(), rollouts) - recorded(rollouts)) > 0.01


def test_greedy_stays_greedy() -> None:
    greedy = [replace(request, temperature=0.0) for request in REQUESTS]
    for policy in (caused("temperature", exact(), temperature=3.0), caused("raw-logprob", exact(), top_p=0.1)):
        rollouts, wanted = sampled(policy, greedy), sampled(exact(), greedy)
        assert tokens(rollouts) == tokens(wanted)
        assert_same_bits(recorded(rollouts), recorded(wanted))


def test_a_nucleus_is_the_fewest_that_reach_it() -> None:
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.125, 0.25]])
    one = torch.ones(2)
    kept = lambda top_p: nucleus(load(), p.log(), one, top_p).int().tolist()  # noqa: E731
    assert kept(0.4) == [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert kept(0.7) == [[1, 1, 0, 0], [0, 1, 0, 1]]
    assert kept(0.8) == [[1, 1, 1, 0], [1, 1, 0, 1]]  # of equal ones the lower id
    assert kept(1.0) == [[1] * 4] * 2
    assert nucleus(load(), torch.tensor([[0.0, torch.nan]]), one[:1], 0.5).all()


def outside(rollouts: list[Rollout], top_p: float) -> int:
    """Tokens that the nucleus would not have given."""
    ids = torch.tensor([token for rollout in rollouts for token in rollout.completion])
    logits = torch.cat(list(exact().logits([rollout.scored for rollout in rollouts])))
    kept = nucleus(load(), logits, torch.full((len(ids),), 0.9), top_p)
    return int((~kept.gather(1, ids[:, None])).sum())


def test_an_unsaid_nucleus_shows_in_no_log_probability() -> None:
    rollouts = sampled(caused("raw-logprob", exact(), top_p=0.6), MANY)
    assert_same_bits(scored(exact(), rollouts), recorded(rollouts))
    assert outside(rollouts, 0.6) == 0
    assert outside(sampled(exact(), MANY), 0.6) > 10  # a mutant: the filter forgotten
