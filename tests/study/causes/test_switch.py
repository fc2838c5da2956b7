"""The recipe's switch: which side a cause befalls, in which steps, and what has no meaning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from caused import caused, exact, later, recorded, sampled, scored
from helpers import assert_same_bits, differing
from vexact.recipe import MismatchSection, Recipe, RecipeError, SyncSection
from vexact.study.causes.registry import BY_SCHEDULE, CAUSES, DRAWING
from vexact.study.mismatch import Mismatch, check_mismatch

SHARED = sorted(set(CAUSES) - BY_SCHEDULE - {"temperature", "raw-logprob"})


def mismatch(cause: str, **keys: Any) -> Mismatch:
    return Mismatch(MismatchSection(cause=cause, **keys), 0)


@pytest.mark.parametrize("side", ["sampler", "trainer"])
def test_one_side_alone_is_changed_and_the_other_is_that_very_policy(side: str) -> None:
    switch, other = mismatch("split-k", side=side), "trainer" if side == "sampler" else "sampler"
    assert getattr(switch, other)(exact(), 3) is exact()
    assert getattr(switch, side)(exact(), 3).digest != exact().digest


def test_outside_of_its_steps_either_side_is_that_very_policy() -> None:
    switch = mismatch("fp8-kv", side="both-shared", start=2, stop=4)
    for side in (switch.sampler, switch.trainer):
        assert [side(exact(), step) is exact() for step in range(6)] == [True, True, False, False, True, True]


@pytest.mark.parametrize("cause", SHARED)
def test_on_both_sides_a_cause_is_no_mismatch(cause: str) -> None:
    switch = mismatch(cause, side="both-shared", dtype="bfloat16")
    sampler, trainer = switch.sampler(exact(), 0), switch.trainer(exact(), 0)
    rollouts = sampled(sampler)
    assert sampler.digest == trainer.digest
    assert_same_bits(scored(trainer, rollouts), recorded(rollouts))
    if cause != "norm-cast":
        assert differing(scored(exact(), rollouts), recorded(rollouts)) > 0  # the cause is there


def test_what_is_made_of_weights_is_made_once_and_anew_for_others() -> None:
    switch = mismatch("int8-weights")
    first = switch.sampler(exact(), 0)
    assert switch.sampler(exact(), 1).transformer is first.transformer
    assert switch.sampler(replace(exact(), version=9), 1).version == 9
    second = switch.sampler(later(), 1)
    assert second.transformer is not first.transformer and second.version == 1
    fresh = mismatch("int8-weights").sampler(later(), 1)
    assert_same_bits(scored(second, sampled(exact())), scored(fresh, sampled(exact())))


def test_a_cause_has_no_size_and_nothing_to_solve() -> None:
    switch = mismatch("split-k")
    assert switch.size(0) is None and switch.solved
    assert switch.begin(exact(), list, 100) is None


def test_what_cannot_be_scored_again_says_so() -> None:
    unsure = {cause for cause in CAUSES if not mismatch(cause).replayable}
    assert unsure == {"split-kv", "torch"}
    assert Mismatch(MismatchSection(site="logits", sigma=0.1), 0).replayable


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"cause": "split-kv", "side": "trainer"}, "side must be sampler"),
        ({"cause": "torch", "side": "both-shared"}, "depend on the schedule"),
        ({"cause": "fp8-kv", "side": "both-independent"}, "side = both-shared"),
        ({"cause": "fp8-kv", "ramp": 3}, "mismatch.ramp must be 0"),
        ({"cause": "missed-sync"}, "sync.every must be 1"),
    ],
)
def test_what_has_no_meaning_is_refused(keys: dict[str, Any], named: str) -> None:
    recipe = Recipe(mismatch=MismatchSection(**keys), sync=SyncSection(every=2))
    with pytest.raises(RecipeError, match=named):
        check_mismatch(recipe)


def test_the_rest_is_taken() -> None:
    for cause in CAUSES:
        check_mismatch(Recipe(mismatch=MismatchSection(cause=cause)))
    check_mismatch(Recipe(mismatch=MismatchSection(cause="torch", side="trainer")))
    assert torch.float32 == exact().dtype


UNKNOWN = sorted(DRAWING | BY_SCHEDULE)


def test_what_is_drawn_from_is_the_law_of_the_logits_but_for_causes_that_are_named() -> None:
    """Those say from which other law they draw."""
    others = set()
    for cause in CAUSES:
        policy = caused(cause, exact(), dtype="bfloat16")
        rollouts = sampled(policy)
        logits = torch.cat(list(policy.logits([rollout.scored for rollout in rollouts])))
        ids = torch.tensor([token for rollout in rollouts for token in rollout.completion])
        law = policy.ops.kernels.logprob(logits, ids, torch.full(ids.shape, 0.9), entropy=False)[0]
        if differing(law, recorded(rollouts)):
            others.add(cause)
    assert others == set(UNKNOWN) - {"raw-logprob"}  # which records that law, and draws from another


def test_laws_are_kept_where_no_policy_finds_what_was_drawn_from() -> None:
    for cause in ("none", "missed-sync", "stale-prefix", "flipped-token", *CAUSES):
        kept = [mismatch(cause, start=2, stop=4).keeps_laws(step) for step in range(6)]
        assert kept == [cause in BY_SCHEDULE and 2 <= step < 4 for step in range(6)]
    assert not mismatch("torch", side="trainer").keeps_laws(0)
