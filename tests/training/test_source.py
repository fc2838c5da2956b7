"""A step whose rollouts come from elsewhere: older weights, a sampler with an arithmetic of its own, centred scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import assert_same_bits
from made import LENGTHS, assert_same_step, gradients_of, make_rollouts, make_trainer, shifted, some_advantages
from vexact.model.gradients import Gradients
from vexact.model.ops import Edit, Logprobs, Ops
from vexact.model.parameters import Matrix
from vexact.model.policy import Policy
from vexact.model.recording import Recording
from vexact.model.remedy import Centring, Plain
from vexact.model.rollout import Rollout
from vexact.ranks import Ranks
from vexact.recipe import KLSection, LossSection, RemedySection
from vexact.study.remedies import RatioWeight, Resync, StepScaling
from vexact.training.admission import Source, TrainingError
from vexact.training.lag import measure_lag
from vexact.training.metrics import StepMetrics
from vexact.training.trainer import Trainer
from vexact.verification.ranks import on_ranks
from vexact_kernels import Kernels

COUNT = len(LENGTHS)
ADVANTAGES = some_advantages(COUNT)
DLC = LossSection("reinforce", remedy=RemedySection(name="dlc", resync_level="sequence"))
CENTRED = {
    "scores": RemedySection(centre="scores"),
    "truncate": RemedySection(name="dlc", resync_level="token", clip_low=0.9, clip_high=1.1),
    "ppo": RemedySection(centre="scores", ratio="lag", clip="ppo", clip_low=0.9, clip_high=1.1),
    "sampler": RemedySection(centre="scores", ratio="sampler"),
}


class Tilted(Ops):
    """A sampler whose logits are not the trainer's."""

    def logits(self, hidden: Tensor, head: Matrix, rows: Tensor | None = None) -> Tensor:
        logits = super().logits(hidden, head, rows)
        return logits + tilt(logits)

    def digest(self, arithmetic: str) -> str:
        return f"{arithmetic}-tilted"


def tilt(logits: Tensor) -> Tensor:
    return 0.5 * torch.sin(torch.arange(logits.shape[1], dtype=torch.float32))


def older(trainer: Trainer, lr: float = 1e-3) -> tuple[list[Rollout], Source]:
    """Rollouts of the trainer's policy by a tilted sampler, before a step that leaves them one version behind."""
    exact, rate = trainer.policy, trainer.optimizer.lr
    sampler = replace(exact, ops=Tilted(trainer.kernels))
    rollouts = make_rollouts(sampler)
    remedy, trainer.remedy = trainer.remedy, None
    loss, trainer.loss = trainer.loss, LossSection("reinforce")
    trainer.optimizer.lr = lr
    trainer.step(make_rollouts(exact), ADVANTAGES)
    trainer.optimizer.lr, trainer.remedy, trainer.loss = rate, remedy, loss
    trainer.max_lag, trainer.accepts = 1, {sampler.digest}
    return rollouts, Source(exact, sampler)


def columns(policy: Policy, rollouts: Sequence[Rollout]) -> Tensor:
    return policy.logprobs([rollout.scored for rollout in rollouts]).logprob


def test_the_lag_is_measured_without_clip_and_discrepancy() -> None:
    for remedy in (RemedySection(), RemedySection(ratio="lag", clip_high=1.0001), RemedySection(centre="scores")):
        trainer = make_trainer(loss=LossSection("reinforce", remedy=remedy))
        rollouts, source = older(trainer)
        current, sampled = columns(trainer.policy, rollouts), columns(source.exact, rollouts)
        metrics = asdict(trainer.step(rollouts, ADVANTAGES, source))
        assert trainer.replayed is not None and trainer.scored is not None
        assert_same_bits(trainer.replayed, sampled)
        assert_same_bits(trainer.scored, current)
        ends = torch.tensor(LENGTHS).cumsum(0).tolist()
        cuts = [slice(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]
        expected = measure_lag(current, sampled, cuts)
        assert {name: metrics[name] for name in expected} == expected
        assert 0 < expected["ess_sequence"] < 1 and 0 < expected["ess_token"] < 1 and expected["lag_k3"] > 0
        assert (metrics["ess_tokens"], metrics["ess_sequences"]) == (sum(LENGTHS), COUNT)
        recorded = torch.cat([rollout.logprobs for rollout in rollouts])
        assert metrics["mismatch_max"] == float((sampled - recorded).abs().max())  # at the weights that sampled
        other = measure_lag(current, recorded, cuts)  # the mutant: discrepancy counted as lag
        assert other["ess_token"] != expected["ess_token"] and other["lag_k3"] != expected["lag_k3"]


def test_without_lag_every_measure_has_its_ideal_value() -> None:
    trainer = make_trainer(loss=DLC)
    metrics = asdict(trainer.step(make_rollouts(trainer.policy), ADVANTAGES))
    assert trainer.replayed is None
    found = [metrics[f"ess_{name}"] for name in ("token", "token_lognormal", "sequence", "sequence_lognormal")]
    assert found == [1.0] * 4 and metrics["lag_k3"] == 0.0
    assert [metrics[f"centre_weight_{name}"] for name in ("min", "mean", "max")] == [1.0] * 3


def test_several_updates_measure_the_lag_of_the_whole_batch_before_the_first() -> None:
    found = []
    for mini_batches in (1, 3):
        trainer = make_trainer(loss=replace(DLC, mini_batches=mini_batches))
        rollouts, source = older(trainer)
        metrics = trainer.step(rollouts, ADVANTAGES, source)
        found.append((metrics.ess_token, metrics.ess_sequence, metrics.ess_tokens, metrics.lag_k3))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", CENTRED)
def test_a_centred_step_knows_neither_its_micro_batches_nor_the_order_of_arrival(name: str) -> None:
    section = LossSection("reinforce", mini_batches=2, epochs=2, remedy=CENTRED[name])
    measured, first = [], make_trainer(loss=section)
    for tokens_at_once, order in ((1024, range(COUNT)), (1, range(COUNT)), (77, [3, 7, 0, 1, 6, 2, 5, 4])):
        trainer = make_trainer(loss=section, tokens_at_once=tokens_at_once)
        rollouts, source = older(trainer)
        measured.append(trainer.step([rollouts[i] for i in order], ADVANTAGES[list(order)], source))
        first = trainer if tokens_at_once == 1024 else first
        assert_same_step(trainer, first)
    assert measured[0] == measured[1] == measured[2]
    assert (measured[0].centre_weight_min < 1 < measured[0].centre_weight_max) == (name != "scores")


def test_layers_that_run_again_change_no_bit_of_a_centred_step() -> None:
    trainers = [make_trainer(loss=DLC, recompute=recompute) for recompute in (False, True)]
    for trainer in trainers:
        rollouts, source = older(trainer)
        trainer.step(rollouts, ADVANTAGES, source)
    assert_same_step(*trainers)


def centred(ranks: Ranks) -> tuple[Trainer, StepMetrics]:
    trainer = make_trainer(loss=replace(DLC, mini_batches=2), ranks=ranks)
    rollouts, source = older(trainer)
    return trainer, trainer.step(rollouts, ADVANTAGES, source)


def test_a_centred_step_does_not_know_how_many_ranks_share_it() -> None:
    whole, metrics = centred(Ranks())
    for trainer, found in on_ranks(2, centred):
        assert found == metrics
        assert trainer.fingerprint() == whole.fingerprint()


def test_what_a_mask_leaves_out_has_no_centred_gradient() -> None:
    remedy = RemedySection(centre="scores", sequence="negatives", sequence_ratio="current", sequence_delta=1e-6)
    trainer = make_trainer(loss=LossSection("reinforce", remedy=remedy))
    rollouts, source = older(trainer)
    metrics = trainer.step(rollouts, ADVANTAGES, source)
    assert 0 < metrics.remedy_rejected_sequences < COUNT
    plain = make_trainer(loss=LossSection("reinforce", remedy=RemedySection(centre="scores")))
    older(plain)
    plain.step(rollouts, ADVANTAGES, source)
    with pytest.raises(AssertionError):
        assert_same_step(trainer, plain)


def test_centring_takes_off_what_the_advantages_share() -> None:
    """With one advantage for all, a tilted sampler leaves a drift that centring takes off: the steps part."""
    found = []
    for remedy in (RemedySection(), RemedySection(centre="scores")):
        trainer = make_trainer(loss=LossSection("reinforce", remedy=remedy))
        rollouts, source = older(trainer)
        trainer.step(rollouts, torch.ones(COUNT), source)
        found.append(gradients_of(trainer))
    assert any((found[0][name] != found[1][name]).any() for name in found[0])


def test_older_rollouts_need_their_source_where_the_remedy_looks_at_it() -> None:
    trainer = make_trainer(loss=DLC)
    rollouts, source = older(trainer)
    with pytest.raises(TrainingError, match=r"rollout \(0, 0\): the remedy needs the policies that sampled it"):
        trainer.step(rollouts, ADVANTAGES)
    with pytest.raises(TrainingError, match=r"sampled by version 0, the source given is 1"):
        trainer.step(rollouts, ADVANTAGES, Source(trainer.policy, trainer.policy))
    trainer.accepts = set()
    with pytest.raises(TrainingError, match=r"arithmetic digest \w+-tilted is not the trainer's"):
        trainer.step(rollouts, ADVANTAGES, source)


def test_a_view_is_what_is_scored_and_differentiated() -> None:
    """Trainer and sampler under the same tilt: not one token differs, and the step is not the plain one."""
    plain, trainer = make_trainer(), make_trainer()
    trainer.view = lambda policy: replace(policy, ops=Shared(trainer.kernels))
    sampler = trainer.view(trainer.policy)
    trainer.accepts = {sampler.digest}
    rollouts = make_rollouts(sampler)
    metrics = trainer.step(rollouts, ADVANTAGES, Source(sampler, sampler))
    assert (metrics.mismatch_tokens, metrics.mismatch_compared, metrics.ratio_max) == (0, sum(LENGTHS), 1.0)
    plain.accepts = {sampler.digest}
    assert plain.step(rollouts, ADVANTAGES).mismatch_tokens > 0
    with pytest.raises(AssertionError):
        assert_same_step(trainer, plain)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_reference_is_seen_through_the_same_view(place: str) -> None:
    """So that a policy is not apart from its own beginning; through another one it would be."""
    loss = LossSection("reinforce", anchor="recomputation", kl=KLSection(1.0, "k3", place))
    trainer = make_trainer(loss=loss)
    trainer.view = lambda policy: replace(policy, ops=Shared(trainer.kernels))
    rollouts = make_rollouts(trainer.policy)
    assert trainer.advantages(rollouts, [0.0] * COUNT).values.tolist() == [0.0] * COUNT
    assert trainer.step(rollouts, ADVANTAGES).kl == 0.0
    plain = columns(trainer.policy, rollouts)
    assert trainer.scored is not None and (plain != trainer.scored).any()


class Shared(Tilted):
    """The tilt of a sampler, around the trainer's recording too: as an edit of its logits."""

    def around(self, inner: Ops) -> Ops:
        assert isinstance(inner, Recording)
        return Edited(inner.kernels, inner.gradients, inner.recompute, inner)


class Edited(Recording):
    def __init__(self, kernels: Kernels, gradients: Gradients, recompute: bool, inner: Recording) -> None:
        super().__init__(kernels, gradients, recompute)
        self.tape = inner.tape

    def logprobs(
        self, hidden: Tensor, rows: Tensor, head: Matrix, ids: Tensor, temperature: Tensor, edit: Edit | None = None
    ) -> Logprobs:
        return super().logprobs(hidden, rows, head, ids, temperature, lambda logits, _: logits + tilt(logits))


def test_gradients_may_be_disturbed_before_anything_reads_them() -> None:
    plain, trainer = make_trainer(), make_trainer()
    trainer.disturb = lambda gradients: {name: 2.0 * gradient for name, gradient in gradients.items()}
    found = [each.step(make_rollouts(each.policy), ADVANTAGES).grad_norm for each in (plain, trainer)]
    assert found[1] == pytest.approx(2 * found[0], rel=1e-6)


def test_a_resync_may_discard_the_batch_that_triggers_it() -> None:
    trainer = make_trainer(loss=LossSection("reinforce"))
    trainer.remedy = Resync("ess", 0.9999, "sequence", discard=True)
    rollouts, source = older(trainer)
    before = trainer.fingerprint()
    metrics = asdict(trainer.step(rollouts, ADVANTAGES, source))
    assert metrics["skipped"] == "discarded by the remedy" and trainer.fingerprint() == before
    assert trainer.remedy.after_update({**metrics, "lag": 1}) == "sync"
    fresh = trainer.step(make_rollouts(trainer.policy), ADVANTAGES)
    assert fresh.skipped == "" and trainer.remedy.after_update({**asdict(fresh), "lag": 0}) == "none"


def test_a_scaled_step_is_a_step_of_the_scaled_rate() -> None:
    trainer, expected = (make_trainer(loss=LossSection("reinforce"), lr=1e-3) for _ in range(2))
    rollouts, source = older(trainer)
    older(expected)
    trainer.remedy = StepScaling()
    metrics = trainer.step(rollouts, ADVANTAGES, source)
    assert metrics.remedy_lr == math.sqrt(metrics.ess_sequence) < 1
    assert trainer.optimizer.lr == 1e-3
    expected.optimizer.lr = 1e-3 * metrics.remedy_lr
    assert expected.step(rollouts, ADVANTAGES, source).remedy_lr == 1.0
    assert_same_step(trainer, expected)


def test_the_weight_of_the_lag_holds_no_discrepancy() -> None:
    trainer = make_trainer(loss=LossSection("reinforce"))
    rollouts, source = older(trainer)
    trainer.remedy = RatioWeight(Centring("lag", "none"))
    lag = (columns(trainer.policy, rollouts) - columns(source.exact, rollouts)).double().exp()
    metrics = trainer.step(rollouts, ADVANTAGES, source)
    assert metrics.remedy_weight_max == pytest.approx(float(lag.max()), rel=1e-5)
    assert metrics.remedy_weight_min == pytest.approx(float(lag.min()), rel=1e-5)


@pytest.mark.parametrize("clip", ["truncate", "ppo"])
def test_weights_of_the_lag_alone_weigh_gradients(clip: Any) -> None:
    """Of one token: the step is that of its advantage times its weight."""
    trainer, expected = (make_trainer(loss=LossSection("reinforce")) for _ in range(2))
    rollouts, source = older(trainer)
    older(expected)
    one = [i for i, length in enumerate(LENGTHS) if length == 1]
    trainer.remedy = RatioWeight(Centring("lag", clip, 0.99, 1.01))
    metrics = trainer.step([rollouts[i] for i in one], ADVANTAGES[one], source)
    assert metrics.remedy_weight_max <= 1.01
    expected.step([rollouts[i] for i in one], ADVANTAGES[one], source)
    with pytest.raises(AssertionError):
        assert_same_step(trainer, expected)


class Undoing(Plain):
    can_undo = True


def test_a_step_taken_back_leaves_no_trace() -> None:
    """What follows a rollback is what would have followed had the step never been, in every bit."""
    trainer, expected = (make_trainer(lr=1e-2) for _ in range(2))
    trainer.remedy = Undoing()
    for each in (trainer, expected):
        each.step(make_rollouts(each.policy), ADVANTAGES)
    policy = trainer.policy
    metrics = trainer.step(make_rollouts(policy), -ADVANTAGES)
    assert (metrics.version, metrics.candidate, metrics.rollbacks) == (2, 1, 0)
    trainer.roll_back()
    assert trainer.policy is policy and trainer.rollbacks == 1
    optimizer, other = trainer.optimizer, expected.optimizer
    assert (optimizer.power1, optimizer.power2, optimizer.lr) == (other.power1, other.power2, other.lr)
    for kind in ("masters", "first", "second"):
        for name, tensor in getattr(optimizer, kind).items():
            assert_same_bits(tensor, getattr(other, kind)[name], f"{kind} of {name}")
    with pytest.raises(RuntimeError, match="no step to take back"):
        trainer.roll_back()
    found = [each.step(make_rollouts(each.policy), ADVANTAGES) for each in (trainer, expected)]
    assert (found[0].candidate, found[0].rollbacks, found[0].version) == (0, 1, 2)
    assert_same_step(trainer, expected)


@pytest.mark.parametrize("forgotten", ["first", "second", "power1", "masters"])
def test_a_rollback_that_forgot_something_would_be_seen(forgotten: str) -> None:
    """The mutants of the test above."""
    trainer, expected = (make_trainer(lr=1e-2) for _ in range(2))
    trainer.remedy = Undoing()
    rollouts = make_rollouts(trainer.policy)
    trainer.step(rollouts, ADVANTAGES)
    kept = getattr(trainer.optimizer, forgotten)
    kept = {name: x.clone() for name, x in kept.items()} if isinstance(kept, dict) else kept
    trainer.roll_back()
    if isinstance(kept, dict):
        for name, tensor in kept.items():
            getattr(trainer.optimizer, forgotten)[name].copy_(tensor)
    else:
        setattr(trainer.optimizer, forgotten, kept)
    for each in (trainer, expected):
        each.step(rollouts, ADVANTAGES)
    with pytest.raises(AssertionError):
        assert_same_step(trainer, expected)


def test_a_step_that_did_not_move_is_no_candidate() -> None:
    trainer = make_trainer()
    trainer.remedy = Undoing()
    trainer.step(make_rollouts(trainer.policy), torch.full((COUNT,), 3e38))
    with pytest.raises(RuntimeError, match="no step to take back"):
        trainer.roll_back()


def test_the_whole_batch_can_be_measured_where_the_loss_asks_for_no_scores() -> None:
    """Bypass with several updates; the weights do not notice."""
    trainers = [make_trainer(loss=LossSection(mini_batches=2)) for _ in range(2)]
    trainers[1].scores_all = True
    rollouts = shifted(make_rollouts(trainers[0].policy))
    first, whole = (trainer.step(rollouts, ADVANTAGES) for trainer in trainers)
    assert_same_step(*trainers)
    assert (first.mismatch_compared, whole.mismatch_compared) == (sum(LENGTHS[:4]), sum(LENGTHS))
    assert whole.mismatch_tokens == sum(LENGTHS) == whole.policy_drift_tokens
    assert trainers[1].scored is not None and len(trainers[1].scored) == sum(LENGTHS)
