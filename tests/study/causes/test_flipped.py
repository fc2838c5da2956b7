"""One token of a question's first rollout is another, and nothing else: what a run makes of it is no mismatch."""

from __future__ import annotations

from dataclasses import replace

import torch

from caused import exact, recorded, sampled, scored, tokens
from helpers import assert_same_bits
from vexact.recipe import MismatchSection
from vexact.study.causes.flipped import flipped
from vexact.study.mismatch import Mismatch


def test_one_token_is_the_runner_up_and_all_is_scored_exactly() -> None:
    rollouts = sampled(exact())
    found = flipped(rollouts, exact())
    first = {rollout.request: i for i, rollout in reversed(list(enumerate(rollouts)))}
    assert [i for i, (a, b) in enumerate(zip(rollouts, found, strict=True)) if a is not b] == sorted(first.values())
    before, after = rollouts[0], found[0]
    places = [i for i, (a, b) in enumerate(zip(before.completion, after.completion, strict=True)) if a != b]
    assert places == [(len(before.completion) - 1) // 2]
    (place,) = places
    logits = torch.cat(list(exact().logits([before.scored])))[place]
    logits[before.completion[place]] = -torch.inf
    assert after.completion[place] == int(logits.argmax())
    assert_same_bits(scored(exact(), found), recorded(found))
    assert_same_bits(after.logprobs[:place], before.logprobs[:place])
    assert not torch.equal(after.logprobs[place + 1 :], before.logprobs[place + 1 :])  # a mutant: the rest as it was
    assert replace(after, completion=before.completion, logprobs=before.logprobs) == before


def test_only_in_its_step() -> None:
    rollouts = sampled(exact())
    mismatch = Mismatch(MismatchSection(cause="flipped-token", degree=3), 0)
    changed = [step for step in range(6) if tokens(mismatch.flip(rollouts, step, exact())) != tokens(rollouts)]
    assert changed == [3]
    assert tokens(Mismatch(MismatchSection(), 0).flip(rollouts, 3, exact())) == tokens(rollouts)
    for step in (2, 3):
        assert mismatch.sampler(exact(), step) is exact() and mismatch.trainer(exact(), step) is exact()


def test_completions_without_tokens_are_passed_over() -> None:
    rollouts = sampled(exact())
    nothing = replace(rollouts[0], completion=(), logprobs=torch.zeros(0))
    found = flipped([nothing, *rollouts[1:]], exact())
    assert found[0] is nothing and found[1].completion != rollouts[1].completion
    assert flipped([nothing], exact()) == [nothing]
