"""A step whose rollouts keep the law that they were drawn from: the very step that computes it again, where one can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from made import assert_same_step, make_rollouts, make_trainer, some_advantages
from vexact.model import law as module
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.ranks import Ranks
from vexact.recipe import LossSection, MismatchSection, RemedySection
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.study.causes.registry import CAUSES
from vexact.study.mismatch import Mismatch
from vexact.training.admission import Source, TrainingError
from vexact.training.metrics import StepMetrics
from vexact.training.trainer import Trainer
from vexact.verification.ranks import on_ranks

REQUESTS = [
    Request(i, [(7 * i + 3 * j) % 250 for j in range(3 + 30 * i)], n=2, max_tokens=4 + 3 * i, temperature=t)
    for i, t in enumerate((0.9, 1.0, 1.3, 0.7))
]
COUNT = 8
ADVANTAGES = some_advantages(COUNT)
CENTRED = {
    "scores": RemedySection(centre="scores"),
    "dlc": RemedySection(name="dlc", resync_level="token", clip_low=0.9, clip_high=1.1),
    "sampler": RemedySection(centre="scores", ratio="sampler"),
}
NOISE = MismatchSection(site="logits", sigma=0.5)
SAMPLERS = {"exact": MismatchSection(), "noise": NOISE, "hotter": MismatchSection(cause="temperature", temperature=1.3),
            "split-k": MismatchSection(cause="split-k")}  # fmt: skip


def sampled(policy: Policy, section: MismatchSection) -> tuple[list[Rollout], Policy]:
    """With their laws."""
    seen = Mismatch(section, 0).sampler(policy, 0)
    sampler = Sampler(seen)
    sampler.adopt(seen, laws=True)
    return sampler.run(REQUESTS), seen


def older(
    remedy: str, section: MismatchSection = NOISE, ranks: Ranks | None = None, **optimizer: Any
) -> tuple[Trainer, list[Rollout], Source]:
    """A trainer that is a step ahead of the rollouts."""
    loss = LossSection("reinforce", mini_batches=2, epochs=2, remedy=CENTRED[remedy])
    trainer = make_trainer(loss=loss, ranks=ranks, **optimizer)
    exact = trainer.policy
    rollouts, sampler = sampled(exact, section)
    own, trainer.remedy, trainer.loss = trainer.remedy, None, LossSection("reinforce")
    trainer.step(make_rollouts(exact), some_advantages(8))
    trainer.remedy, trainer.loss = own, loss
    trainer.max_lag, trainer.accepts = 1, {sampler.digest}
    return trainer, rollouts, Source(exact, sampler)


def bare(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return [replace(rollout, law=None) for rollout in rollouts]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("remedy", CENTRED)
def test_a_step_with_kept_laws_is_the_step_that_computes_them_again(remedy: str, sampler: str) -> None:
    trainers = []
    for keep in (True, False):
        trainer, rollouts, source = older(remedy, SAMPLERS[sampler])
        # Who reads laws needs no sampler: the exact policy stands in for one that nobody can compute again.
        source = Source(source.exact, source.exact) if keep else source
        trainer.step(rollouts if keep else bare(rollouts), ADVANTAGES, source)
        trainers.append(trainer)
    assert_same_step(*trainers)


def test_laws_of_others_would_be_seen() -> None:
    """The mutants: the law of another sample, and that of the exact policy."""
    steps = []
    for mutant in ("none", "swapped", "computed"):
        trainer, rollouts, source = older("scores")
        if mutant == "swapped":
            first, second = rollouts[:2]
            assert len(first.completion) == len(second.completion)
            rollouts[:2] = [replace(first, law=second.law), replace(second, law=first.law)]
        if mutant == "computed":
            rollouts, source = bare(rollouts), Source(source.exact, source.exact)
        trainer.step(rollouts, ADVANTAGES, source)
        steps.append(trainer.fingerprint())
    assert len(set(steps)) == 3


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("remedy", CENTRED)
def test_such_a_step_knows_neither_micro_batches_nor_the_order_of_arrival(
    remedy: str, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cut:
        monkeypatch.setattr(module, "WHOLE", 0)
    found: list[tuple[Trainer, StepMetrics]] = []
    cuts: list[tuple[dict[str, Any], Sequence[int]]] = [
        ({}, range(COUNT)),
        ({"tokens_at_once": 1}, range(COUNT)),
        ({"tokens_at_once": 77, "recompute": True}, [3, 7, 0, 1, 6, 2, 5, 4]),
    ]
    for keys, order in cuts:
        trainer, rollouts, source = older(remedy, **keys)
        found.append((trainer, trainer.step([rollouts[i] for i in order], ADVANTAGES[list(order)], source)))
        assert_same_step(trainer, found[0][0])
        assert found[-1][1] == found[0][1]


def shared(ranks: Ranks) -> tuple[str, StepMetrics]:
    trainer, rollouts, source = older("dlc", MismatchSection(cause="split-kv"), ranks)
    metrics = trainer.step(rollouts, ADVANTAGES, source)
    return trainer.fingerprint(), metrics


def test_such_a_step_does_not_know_how_many_ranks_share_it() -> None:
    whole = shared(Ranks())
    assert all(found == whole for found in on_ranks(2, shared))


@pytest.mark.parametrize("cause", sorted(CAUSES))
def test_scores_can_be_centred_with_every_cause(cause: str) -> None:
    trainer, rollouts, source = older("sampler", MismatchSection(cause=cause, dtype="bfloat16"))
    metrics = trainer.step(rollouts, ADVANTAGES, source)
    assert metrics.skipped == "" and metrics.grad_norm > 0
    assert 0 < metrics.centre_weight_min <= metrics.centre_weight_max <= 2.0


def test_a_law_that_does_not_fit_is_refused() -> None:
    trainer, rollouts, source = older("scores")
    law = rollouts[0].law
    assert law is not None
    with pytest.raises(TrainingError, match=r"rollout \(0, 0\): has no law, others keep what they were drawn from"):
        trainer.step([replace(rollouts[0], law=None), *rollouts[1:]], ADVANTAGES, source)
    with pytest.raises(TrainingError, match=r"rollout \(0, 0\): its law is of 3 tokens and 320 ids, not of 4 and 320"):
        trainer.step([replace(rollouts[0], law=law.at(slice(0, 3))), *rollouts[1:]], ADVANTAGES, source)
    with pytest.raises(TrainingError, match=r"its law is of 4 tokens and 99 ids, not of 4 and 320"):
        trainer.step([replace(rollouts[0], law=replace(law, vocabulary=99)), *rollouts[1:]], ADVANTAGES, source)
