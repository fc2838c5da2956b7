"""What a step makes of its objective: anchors, several updates, a reference policy, remedies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import assert_same_bits
from made import LENGTHS, assert_same_step, gradients_of, make_rollouts, make_trainer, shifted, some_advantages
from vexact.model.checkpoint import save_folder
from vexact.model.policy import Policy
from vexact.model.remedy import BeforeUpdate, Centring, Plain, Ratios, Weighted
from vexact.model.rollout import Rollout
from vexact.recipe import KLSection, LossSection, RemedySection
from vexact.study.remedies import Centre, SequenceRejection
from vexact.training.trainer import Trainer, weights_of

COUNT = len(LENGTHS)
ADVANTAGES = some_advantages(COUNT)
OBJECTIVES = ("reinforce", "ppo", "gspo", "cispo")


def trained(trainer: Trainer, rollouts: list[Rollout], advantages: Tensor = ADVANTAGES) -> Trainer:
    trainer.step(rollouts, advantages)
    return trainer


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_first_update_on_policy_is_that_of_reinforce_in_every_bit(name: str) -> None:
    expected = make_trainer(loss=LossSection(name="reinforce"))
    rollouts = make_rollouts(expected.policy)
    trained(expected, rollouts)
    for anchor in ("bypass", "recomputation"):
        section = LossSection(name=name, anchor=anchor, epsilon_low=3e-4, epsilon_high=4e-4, cap=1.0, dual_clip=1.1)
        assert_same_step(trained(make_trainer(loss=section), rollouts), expected)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_off_policy_objectives_part(name: str) -> None:
    """The counter-example of the test above."""
    expected = make_trainer(loss=LossSection(name="reinforce" if name != "reinforce" else "ppo"))
    rollouts = shifted(make_rollouts(expected.policy))
    with pytest.raises(AssertionError, match="gradient of"):
        assert_same_step(trained(make_trainer(loss=LossSection(name=name)), rollouts), trained(expected, rollouts))


def test_gradients_of_a_whole_objective_are_those_of_transformers_in_float64(tmp_path: Path) -> None:
    """GSPO with KL to another policy and an entropy bonus, some sequences clipped."""
    kl = KLSection(0.1, "k3")
    section = LossSection(name="gspo", aggregation="seq-mean-token-mean", epsilon_high=0.05, kl=kl, entropy_coef=0.05)
    trainer, other = make_trainer(loss=section), make_trainer(lr=3e-4)
    trainer.reference = trained(other, make_rollouts(other.policy)).policy
    save_folder(tmp_path / "model", trainer.policy.config, weights_of(trainer.policy))
    rollouts = shifted(make_rollouts(trainer.policy, (1, 3, 8, 20)))
    advantages = torch.tensor([1.0, -0.7, 0.4, -1.2])
    loss, exact, divergence = float64_step(tmp_path / "model", rollouts, advantages, trainer.reference, section)
    metrics = trainer.step(rollouts, advantages)
    assert 0 < metrics.clip_fraction < 1
    assert metrics.loss == pytest.approx(loss, abs=1e-6)
    assert metrics.kl == pytest.approx(divergence, abs=1e-7)  # 1 and −1 cancel in each float32 estimate
    assert divergence > 1e-3
    assert furthest(trainer, exact) < 1e-5  # as in test_trainer.py
    for wrong in (
        replace(section, epsilon_high=0.1),
        replace(section, entropy_coef=0.04),
        replace(section, kl=replace(kl, coef=0.09)),
    ):
        _, exact, _ = float64_step(tmp_path / "model", rollouts, advantages, trainer.reference, wrong)
        assert furthest(trainer, exact) > 1e-4


def furthest(trainer: Trainer, exact: Mapping[str, Tensor]) -> float:
    """The largest error of a gradient, in parts of the largest entry of its tensor."""
    errors = [
        (gradient.double() - exact[name]).abs().max() / exact[name].abs().max()
        for name, gradient in gradients_of(trainer).items()
    ]
    return float(torch.stack(errors).max())


def float64_step(
    folder: Path, rollouts: list[Rollout], advantages: Tensor, reference: Policy, section: LossSection
) -> tuple[float, dict[str, Tensor], float]:
    """The loss, its gradients by name, and the mean KL estimate over tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    loss, estimates = torch.zeros((), dtype=torch.float64), []
    for rollout, advantage in zip(rollouts, advantages.double(), strict=True):
        logits = model(torch.tensor([rollout.tokens])).logits[0, len(rollout.prompt) - 1 : -1].log_softmax(-1)
        current = logits.gather(1, torch.tensor(rollout.completion)[:, None])[:, 0]
        difference = current - rollout.logprobs.double()
        ratio = difference.mean().exp()
        bounded = ratio.clamp(1 - section.epsilon_low, 1 + section.epsilon_high)
        away = current - reference.logprobs([rollout.scored]).logprob.double()
        k3 = torch.expm1(-away) + away
        entropy = -(logits.exp() * logits).sum(-1)
        token = section.kl.coef * difference.detach().exp() * k3 - section.entropy_coef * entropy
        loss = loss + (token.mean() - torch.minimum(ratio * advantage, bounded * advantage)) / len(rollouts)
        estimates.append(k3.detach())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients, float(torch.cat(estimates).mean())


def test_mini_batches_are_updates_one_after_the_other() -> None:
    trainer, expected = make_trainer(loss=LossSection(mini_batches=2, epochs=2)), make_trainer()
    rollouts = make_rollouts(trainer.policy)
    expected.max_lag = 9
    found = [expected.step(rollouts[i : i + 4], ADVANTAGES[i : i + 4]) for i in (0, 4, 0, 4)]
    metrics = trainer.step(rollouts, ADVANTAGES)
    assert_same_step(trainer, expected)
    assert (metrics.version, metrics.updates, metrics.skipped) == (1, 4, "")
    assert (metrics.tokens, metrics.rollouts) == (sum(LENGTHS), COUNT)
    assert metrics.loss == math.fsum(step.loss for step in found) / 4
    assert metrics.grad_norm == math.fsum(step.grad_norm for step in found) / 4
    assert metrics.ratio_max == max(step.ratio_max for step in found) > 1
    assert (metrics.mismatch_compared, metrics.mismatch_tokens) == (sum(LENGTHS[:4]), 0)


def test_on_exact_rollouts_recomputation_and_bypass_are_one_in_every_bit() -> None:
    sections = [LossSection(mini_batches=2, epochs=2, anchor=anchor) for anchor in ("bypass", "recomputation")]
    bypass, recomputed = (make_trainer(loss=section) for section in sections)
    rollouts = make_rollouts(bypass.policy)
    found = [asdict(trainer.step(rollouts, ADVANTAGES)) for trainer in (bypass, recomputed)]
    assert_same_step(recomputed, bypass)
    drift = {
        "policy_drift_tokens": 2 * sum(LENGTHS),  # bypass does not know π_old; on-policy it is what was recorded
        "policy_drift_k3": found[0]["k3"],
        "policy_drift_max": pytest.approx(max(math.log(found[0]["ratio_max"]), -math.log(found[0]["ratio_min"])), 1e-5),
    }
    assert found[0]["k3"] > 0 and found[0]["policy_drift_tokens"] == 0
    assert found[1] == {**found[0], "mismatch_compared": sum(LENGTHS), **drift}


def test_on_mismatched_rollouts_they_part_and_recomputation_sees_no_ratio_at_first() -> None:
    for epochs in (1, 2):
        bypass, recomputed = (
            make_trainer(loss=LossSection(anchor=anchor, epochs=epochs), lr=1e-5)
            for anchor in ("bypass", "recomputation")
        )
        rollouts = shifted(make_rollouts(bypass.policy))
        through, anew = (trainer.step(rollouts, ADVANTAGES) for trainer in (bypass, recomputed))
        assert through.ratio_max > 1.5 and through.clip_fraction > 0
        assert anew.mismatch_tokens == anew.mismatch_compared == through.mismatch_compared == sum(LENGTHS)
        assert anew.k3 > 0.01
        if epochs == 1:
            assert (anew.ratio_min, anew.ratio_max, anew.clip_fraction) == (1, 1, 0)
            assert anew.policy_drift_tokens == through.policy_drift_tokens == sum(LENGTHS)
            assert anew.policy_drift_k3 == through.policy_drift_max == 0
        else:
            assert 1 < anew.ratio_max < 1.5
            assert anew.policy_drift_k3 is not None and 0 < anew.policy_drift_k3 < anew.k3 / 10  # no mismatch in it
            assert through.policy_drift_k3 is None and "policy_drift_k3" not in through.measured()
        with pytest.raises(AssertionError, match="gradient of"):
            assert_same_step(recomputed, bypass)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3+"])
def test_at_the_reference_a_step_is_the_step_without_it(estimator: str) -> None:
    plain, trainer = make_trainer(), make_trainer(loss=LossSection(kl=KLSection(0.5, estimator)))
    start = trainer.policy
    rollouts = make_rollouts(plain.policy)
    assert plain.reference is None and trainer.reference is start
    assert plain.step(rollouts, ADVANTAGES) == trainer.step(rollouts, ADVANTAGES)
    assert_same_step(trainer, plain)
    # and the next one is not: the reference stays where it was
    rollouts = make_rollouts(plain.policy)
    assert plain.step(rollouts, ADVANTAGES).kl == 0 < trainer.step(rollouts, ADVANTAGES).kl
    assert trainer.reference is start
    with pytest.raises(AssertionError, match="gradient of"):
        assert_same_step(trainer, plain)


def test_a_resumed_trainer_is_given_its_reference() -> None:
    section = LossSection(kl=KLSection(0.5, "k2"))
    first = make_trainer(loss=section)
    trained(first, make_rollouts(first.policy))
    masters = {name: master.clone() for name, master in first.optimizer.masters.items()}
    resumed = Trainer(first.policy, masters, section, first.section, reference=first.reference)
    resumed.optimizer.first, resumed.optimizer.second = (
        {name: moment.clone() for name, moment in moments.items()}
        for moments in (first.optimizer.first, first.optimizer.second)
    )
    resumed.optimizer.power1, resumed.optimizer.power2 = first.optimizer.power1, first.optimizer.power2
    rollouts = make_rollouts(first.policy)
    assert resumed.step(rollouts, ADVANTAGES) == first.step(rollouts, ADVANTAGES)
    assert_same_step(resumed, first)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_a_rejected_sequence_leaves_gradient_and_divisor(aggregation: str) -> None:
    section = LossSection(
        aggregation=aggregation, remedy=RemedySection(sequence="rejection", sequence_low=0.5, sequence_high=2.0)
    )
    trainer, expected = make_trainer(loss=section), make_trainer(loss=LossSection(aggregation=aggregation))
    rollouts = make_rollouts(trainer.policy)
    far = {1: 1.0, 4: -3.0, 6: 40.0}
    given = [replace(r, logprobs=r.logprobs + far[i]) if i in far else r for i, r in enumerate(rollouts)]
    rest = [i for i in range(COUNT) if i not in far]
    metrics = trainer.step(given, ADVANTAGES)
    trained(expected, [rollouts[i] for i in rest], ADVANTAGES[rest])
    assert_same_step(trainer, expected)
    assert (metrics.remedy_rejected_sequences, metrics.remedy_rejected_tokens) == (3, 2 + 8 + 21)
    assert (metrics.tokens, metrics.mismatch_tokens, metrics.ratio_max) == (sum(LENGTHS), 2 + 8 + 21, 1.0)


class Band(Plain):
    """Rejects tokens outside a band, and weighs the others by their ratio."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        ratio = ratios.token(ratios.correction)
        return Weighted(ratio, mask & (ratio >= self.low) & (ratio <= self.high))

    def before_update(self, metrics: Mapping[str, float]) -> BeforeUpdate:
        return "discard" if metrics["remedy_ratio_max"] > 100 else "use"


def test_a_rejected_token_leaves_the_divisor_and_the_others_keep_their_weights() -> None:
    """The loss of REINFORCE with ratios 1.105 and 1.350 of five tokens kept is their mean."""
    trainer = make_trainer(loss=LossSection(name="reinforce"))
    trainer.remedy = Band(0.5, 2.0)
    (rollout, other) = make_rollouts(trainer.policy, (5, 3))
    log_ratios = torch.tensor([0.1, -1.5, 0.8, -10.0, 0.3])
    given = [
        replace(rollout, logprobs=rollout.logprobs - log_ratios),
        replace(other, logprobs=other.logprobs - 4.0),
    ]
    metrics = trainer.step(given, torch.ones(2))
    weighed = -(rollout.logprobs[0] * math.exp(0.1) + rollout.logprobs[4] * math.exp(0.3)) / 2
    assert metrics.loss == pytest.approx(float(weighed), rel=1e-5)
    assert (metrics.remedy_rejected_tokens, metrics.remedy_rejected_sequences) == (6, 1)
    assert metrics.remedy_weight_min == pytest.approx(1.105, abs=1e-3)
    assert metrics.remedy_weight_max == pytest.approx(1.350, abs=1e-3)
    assert metrics.remedy_weight_mean == pytest.approx((math.exp(0.1) + math.exp(0.3)) / 2, rel=1e-5)
    assert metrics.remedy_weight_std == pytest.approx((math.exp(0.3) - math.exp(0.1)) / 2, rel=1e-4)
    assert metrics.remedy_ratio_max == pytest.approx(math.exp(4.0), rel=1e-5)


def test_token_weights_multiply_gradients_of_the_recomputed_objective() -> None:
    """With one weight for all tokens: log-ratios of 1 and a cap of 1.5 are a step of 1.5 times the advantages."""
    section = LossSection(anchor="recomputation", remedy=RemedySection(token="tis", token_high=1.5))
    trainer, expected = make_trainer(loss=section), make_trainer()
    rollouts = make_rollouts(trainer.policy)
    metrics = trainer.step([replace(r, logprobs=r.logprobs - 1.0) for r in rollouts], ADVANTAGES)
    trained(expected, rollouts, ADVANTAGES * 1.5)
    assert_same_step(trainer, expected)
    assert metrics.remedy_weight_min == metrics.remedy_weight_max == 1.5 and metrics.remedy_weight_std == 0.0
    assert metrics.remedy_ratio_max == pytest.approx(math.e, rel=1e-5)


def test_on_exact_rollouts_remedies_change_no_bit() -> None:
    plain = make_trainer()
    trainer = make_trainer(
        loss=LossSection(
            anchor="recomputation", remedy=RemedySection(token="tis", sequence="rejection", sequence_level="geometric")
        )
    )
    rollouts = make_rollouts(plain.policy)
    assert plain.step(rollouts, ADVANTAGES) == trainer.step(rollouts, ADVANTAGES)
    assert_same_step(trainer, plain)


@pytest.mark.parametrize("mini_batches", [1, 3])
def test_where_everything_is_rejected_nothing_moves_and_all_is_finite(mini_batches: int) -> None:
    section = LossSection(mini_batches=mini_batches, remedy=RemedySection(sequence="rejection"))
    trainer = make_trainer(loss=section)
    policy, before = trainer.policy, trainer.fingerprint()
    metrics = trainer.step([replace(r, logprobs=r.logprobs - 5.0) for r in make_rollouts(policy)], ADVANTAGES)
    assert (metrics.skipped, metrics.updates, metrics.remedy_rejected_sequences) == ("nothing to train", 0, COUNT)
    assert (metrics.mismatch_tokens, metrics.remedy_weight_mean) == (sum(LENGTHS), 1.0)
    assert all(math.isfinite(value) for value in asdict(metrics).values() if isinstance(value, float))
    assert trainer.policy is policy and trainer.fingerprint() == before


def test_a_mini_batch_without_a_kept_rollout_is_left_out_and_named() -> None:
    section = LossSection(mini_batches=2, remedy=RemedySection(sequence="rejection"))
    trainer = make_trainer(loss=section)
    rollouts = make_rollouts(trainer.policy)
    given = [replace(r, logprobs=r.logprobs - 5.0) if i < 4 else r for i, r in enumerate(rollouts)]
    metrics = trainer.step(given, ADVANTAGES)
    assert (metrics.skipped, metrics.updates, metrics.version) == ("nothing to train in 1 of 2 updates", 1, 1)
    assert_same_step(trainer, trained(make_trainer(), rollouts[4:], ADVANTAGES[4:]))


def test_an_update_whose_gradient_is_not_finite_is_left_out_and_named() -> None:
    trainer = make_trainer(loss=LossSection(mini_batches=2))
    rollouts = make_rollouts(trainer.policy)
    advantages = torch.where(torch.arange(COUNT) < 4, 3e38, ADVANTAGES)
    metrics = trainer.step(rollouts, advantages)
    assert metrics.skipped == "gradient is not finite in 1 of 2 updates"
    assert (metrics.updates, metrics.version) == (1, 1) and math.isnan(metrics.grad_norm)
    assert_same_step(trainer, trained(make_trainer(), rollouts[4:], ADVANTAGES[4:]))


def test_a_remedy_may_discard_a_batch() -> None:
    trainer = make_trainer()
    trainer.remedy = Band(0.0, math.inf)
    policy, rollouts = trainer.policy, make_rollouts(trainer.policy)
    far = [replace(r, logprobs=r.logprobs - 5.0) for r in rollouts]
    metrics = trainer.step(far, ADVANTAGES)
    assert (metrics.skipped, metrics.updates, metrics.rollouts) == ("discarded by the remedy", 0, COUNT)
    assert metrics.remedy_ratio_max > 100 and trainer.policy is policy
    assert metrics.mismatch_tokens == metrics.tokens == sum(LENGTHS)
    assert trainer.step(rollouts, ADVANTAGES).skipped == ""


@pytest.mark.parametrize(("ratio", "rejected"), [("correction", 0), ("current", COUNT), ("drift", COUNT)])
def test_a_remedy_may_look_again_before_each_update(ratio: Any, rejected: int) -> None:
    """A band of one ratio keeps everything at first, and nothing once the policy has moved."""
    trainer = make_trainer(loss=LossSection(epochs=2))
    trainer.remedy = SequenceRejection(1.0, 1.0, ratio=ratio)
    metrics = trainer.step(make_rollouts(trainer.policy), ADVANTAGES)
    assert metrics.remedy_rejected_sequences == rejected
    assert metrics.updates == (2 if ratio == "correction" else 1)


@pytest.mark.parametrize(("ratio", "updates"), [("correction", 0), ("current", 0), ("drift", 1)])
def test_the_drift_is_between_two_policies_of_the_trainer(ratio: Any, updates: int) -> None:
    """However far off the sampler is, it is 0 in a step's first update; behind that it is what the update moved."""
    trainer = make_trainer(loss=LossSection(anchor="recomputation", epochs=2))
    trainer.remedy, seen = SequenceRejection(1.0, 1.0, ratio=ratio), []
    weights = trainer.remedy.weights

    def kept(ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        seen.append(ratios)
        return weights(ratios, mask, advantages)

    trainer.remedy.weights = kept  # type: ignore[method-assign]
    rollouts = make_rollouts(trainer.policy)
    begun = trainer.policy.logprobs([r.scored for r in rollouts]).logprob
    metrics = trainer.step([replace(r, logprobs=r.logprobs - 5.0) for r in rollouts], ADVANTAGES)
    assert metrics.updates == updates
    if ratio == "drift":
        first, second = (each.of("drift") for each in seen)
        assert (first == 0.0).all()
        assert_same_bits(second, trainer.policy.logprobs([r.scored for r in rollouts]).logprob - begun)
        assert (seen[1].correction > 4.9).all() and (second != 0.0).any()


def test_scores_are_centred_under_reinforce_alone() -> None:
    trainer = make_trainer()
    for loss in (LossSection(), LossSection("reinforce", entropy_coef=0.1),
                 LossSection("reinforce", kl=KLSection(0.1))):  # fmt: skip
        with pytest.raises(ValueError, match="scores are centred under reinforce alone"):
            Trainer(trainer.policy, trainer.optimizer.masters, loss, remedy=Centre(Centring()))


def test_a_remedy_that_a_recipe_names_is_not_forgotten() -> None:
    trainer = make_trainer()
    with pytest.raises(ValueError, match="the loss section names a remedy: hand in"):
        Trainer(trainer.policy, trainer.optimizer.masters, LossSection("reinforce", remedy=RemedySection(token="tis")))


def test_the_entropy_bonus_raises_entropy() -> None:
    found = []
    for coefficient in (0.0, 0.1):
        trainer = make_trainer(loss=LossSection(entropy_coef=coefficient), lr=3e-3)
        for _ in range(3):
            metrics = trainer.step(make_rollouts(trainer.policy), torch.zeros(COUNT))
        found.append(metrics.entropy)
    assert found[1] > found[0]
    assert_same_bits(torch.tensor(found[0]), torch.tensor(make_entropy()))


def make_entropy() -> float:
    trainer = make_trainer()
    return trainer.step(make_rollouts(trainer.policy), torch.zeros(COUNT)).entropy


def test_the_skew_of_the_loss_is_told_by_the_sign_of_the_advantage() -> None:
    """Against float64 on the ratios of the policy to what was recorded; on-policy it is 0."""
    trainer = make_trainer(loss=LossSection(name="ppo"))
    honest = make_rollouts(trainer.policy)
    rollouts = shifted(honest)
    scored = trainer.policy.logprobs([rollout.scored for rollout in rollouts]).logprob.double()
    delta = scored - torch.cat([rollout.logprobs for rollout in rollouts]).double()
    advantage = ADVANTAGES.repeat_interleave(torch.tensor(LENGTHS)).double()
    share = -delta.expm1() * advantage
    metrics = trainer.step(rollouts, ADVANTAGES)
    assert metrics.skew_positive == pytest.approx(float(share[advantage > 0].mean()), abs=1e-6)
    assert metrics.skew_negative == pytest.approx(float(share[advantage < 0].mean()), abs=1e-6)
    assert metrics.skew_positive != metrics.skew_negative
    plain = make_trainer(loss=LossSection(name="ppo")).step(honest, ADVANTAGES)
    assert (plain.skew_positive, plain.skew_negative) == (0.0, 0.0)
