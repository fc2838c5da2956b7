"""What a sampler keeps is what it drew from: it says of a drawn token what was recorded, and the sampler's mean of a
score that is centred with it is 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from caused import MIXED, SCHEDULES, caused, exact, recorded
from helpers import assert_same_bits, differing
from vexact.model import law as module
from vexact.model.centring import States
from vexact.model.law import Kept, Law, divisor
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.study.causes.caused import labelled
from vexact.study.causes.registry import BY_SCHEDULE, CAUSES, DRAWING
from vexact_kernels import PAGE, Softmax

ROUNDING = 8e-7  # of float32 probabilities, divided by the temperature
KEYS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.25},
    "raw-logprob": {"top_p": 0.8},
    "other-dtype": {"dtype": "bfloat16"},
}
UNKNOWN = sorted(BY_SCHEDULE | DRAWING)
LONG = [
    Request(3 + i, [(5 * j + i) % 250 for j in range(90 + 40 * i)], n=3, max_tokens=20, temperature=0.5)
    for i in range(3)
]  # some pages, so that decode is cut


@cache
def sampler_of(cause: str, dtype: torch.dtype = torch.float32) -> Policy:
    return exact(dtype) if cause == "none" else caused(cause, exact(dtype), **KEYS.get(cause, {}))


def kept(policy: Policy, requests: Sequence[Request] = tuple(MIXED), **schedule: int) -> list[Rollout]:
    sampler = Sampler(policy, **schedule)
    sampler.adopt(policy, laws=True)
    return sampler.run(requests)


@cache
def rollouts_of(cause: str, dtype: torch.dtype = torch.float32) -> list[Rollout]:
    return kept(sampler_of(cause, dtype))


def law_of(rollouts: Sequence[Rollout]) -> Law:
    return Law.joined([rollout.law for rollout in rollouts if rollout.law is not None])


def said(rollouts: Sequence[Rollout]) -> Tensor:
    """What their laws say of the drawn tokens: float32 [tokens]."""
    ids = torch.tensor([token for rollout in rollouts for token in rollout.completion])
    return law_of(rollouts).logprobs(exact().ops.kernels).gather(1, ids[:, None])[:, 0]


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("cause", ["none", *UNKNOWN, "bf16-logits", "bf16-head"])
def test_the_law_says_of_the_drawn_token_what_was_recorded(
    cause: str, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cut:
        monkeypatch.setattr(module, "WHOLE", 0)
    rollouts = kept(sampler_of(cause)) if cut else rollouts_of(cause)
    law = law_of(rollouts)
    assert (law.ids is not None) == cut and law.rows == len(recorded(rollouts))
    if cause == "raw-logprob":  # records what it did not draw from: the nucleus has a share of the mass
        assert 0 < (said(rollouts) - recorded(rollouts)).min() <= (said(rollouts) - recorded(rollouts)).max() < 0.3
    elif cause == "torch":  # records torch's softmax of the logits that the kernels draw from
        assert (said(rollouts) - recorded(rollouts)).abs().max() < 4e-6
    else:
        assert_same_bits(said(rollouts), recorded(rollouts))


def test_a_law_of_the_logits_alone_would_not_say_it() -> None:
    """The mutants: causes that do not tell what they draw from, and a law of another token's row."""
    for cause in ("temperature", "bf16-softmax"):
        policy = sampler_of(cause)
        deaf = type(
            "Deaf", (type(policy.ops),), {"drawn_from": lambda self, logits, temperature: (logits, temperature)}
        )
        ops: Any = object.__new__(deaf)
        ops.__dict__.update(policy.ops.__dict__)
        rollouts = kept(replace(policy, ops=ops))
        assert_same_bits(recorded(rollouts), recorded(rollouts_of(cause)))
        assert differing(said(rollouts), recorded(rollouts)) > len(recorded(rollouts)) / 2
    rollouts = rollouts_of("none")
    other = law_of(rollouts[::-1]).logprobs(exact().ops.kernels)
    ids = torch.tensor([token for rollout in rollouts for token in rollout.completion])
    assert differing(other.gather(1, ids[:, None])[:, 0], recorded(rollouts)) > 10


def test_keeping_laws_changes_nothing_that_is_drawn_and_costs_nothing_where_it_is_off() -> None:
    for cause in ("none", "bf16-softmax", "torch"):
        plain = Sampler(sampler_of(cause)).run(MIXED)
        assert [rollout.completion for rollout in plain] == [rollout.completion for rollout in rollouts_of(cause)]
        assert_same_bits(recorded(plain), recorded(rollouts_of(cause)))
        assert all(rollout.law is None for rollout in plain)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("cause", ["none", *sorted(DRAWING)])
def test_a_law_does_not_know_its_schedule(cause: str, schedule: dict[str, Any]) -> None:
    """Where scoring would find the logits again."""
    found, expected = law_of(kept(sampler_of(cause), **schedule)), law_of(rollouts_of(cause))
    assert_same_bits(found.logprobs(exact().ops.kernels), expected.logprobs(exact().ops.kernels))


def test_a_sequence_that_loses_its_pages_keeps_its_law() -> None:
    """Those of a prompt of 60 tokens that go on into a second page, which there is for one of them."""
    requests = [Request(1, [7 * i % 250 for i in range(PAGE - 4)], n=3, max_tokens=9)]
    sampler = Sampler(exact(), pages=4)
    sampler.adopt(exact(), laws=True)
    found = sampler.run(requests)
    assert sampler.scheduler.preemptions > 0
    assert_same_bits(said(found), recorded(found))
    assert [rollout.law is not None and rollout.law.rows for rollout in found] == [9, 9, 9]


@pytest.mark.parametrize("cause", sorted(DRAWING))
def test_ops_around_others_draw_from_what_those_draw_from(cause: str) -> None:
    policy = sampler_of(cause)
    assert_same_bits(said(kept(labelled(policy, "named"))), said(rollouts_of(cause)))


def of(policy: Policy, rollouts: Sequence[Rollout], *, kept: bool) -> Softmax:
    """Of every sampled token: its law as it was kept, or as a policy computes it again."""
    _, _, targets = policy.hidden([rollout.scored for rollout in rollouts], policy.ops, None)
    laws = {rollout.id: rollout.law for rollout in rollouts if rollout.law is not None}
    source: Kept | States = States(policy, targets.batch, targets.rows)
    if kept:
        source = Kept(laws, targets.batch, targets.rows, policy.ops.kernels)
    return source.softmax(slice(0, len(targets.rows)), targets.ids, targets.temperature)


@pytest.mark.parametrize("cause", ["none", *sorted(set(CAUSES) - BY_SCHEDULE)])
def test_what_is_kept_and_what_is_computed_again_are_one_but_for_the_schedule(cause: str) -> None:
    policy, rollouts = sampler_of(cause), rollouts_of(cause)
    one, other = (of(policy, rollouts, kept=kept) for kept in (True, False))
    assert_same_bits([one.logits, one.max, one.sum], [other.logits, other.max, other.sum])


def mean_score(drawn: Law, softmax: Softmax, temperature: Tensor) -> Tensor:
    """Σ_a q_a (1_a − s)/T by the kernel that centres, q the law that was drawn from, float64: float64 [rows, V]."""
    kernels, (rows, vocabulary) = exact().ops.kernels, softmax.logits.shape
    q = drawn.logprobs(kernels).double().exp()
    ids = torch.arange(vocabulary)
    found = []
    for row in range(rows):
        each = Softmax(
            *(x[row : row + 1].expand(vocabulary, *x.shape[1:]).contiguous() for x in vars(softmax).values())
        )
        t, one = temperature[row].expand(vocabulary).contiguous(), torch.ones(vocabulary)
        gradient, _, _ = kernels.centre(each, each, None, ids, t, one, None, None, "clamp", torch.float32)
        found.append((q[row][:, None] * gradient.double()).sum(0))
    return torch.stack(found)


@pytest.mark.parametrize("cause", UNKNOWN)
def test_the_samplers_mean_of_a_centred_score_is_0_with_what_it_drew_from_alone(cause: str) -> None:
    policy = sampler_of(cause, torch.float16)
    rollouts = kept(policy, LONG)
    law, temperature = law_of(rollouts), torch.full((law_of(rollouts).rows,), LONG[0].temperature)
    assert (divisor(law.temperature) != temperature).any() == (cause == "temperature")
    means = [
        float(mean_score(law, of(each, rollouts, kept=keep), temperature).abs().max())
        for each, keep in ((policy, True), (policy, False), (exact(torch.float16), False))
    ]
    assert means[0] < ROUNDING
    assert (means[1] < ROUNDING) == (cause in DRAWING)  # else no forward finds it
    assert means[2] > 5 * ROUNDING  # the law of the exact logits
