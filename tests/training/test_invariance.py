"""What a step may not know: its micro-batches, arrival, threads, repeats, the caller's flush mode, who computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import assert_same_bits, flushing_denormals
from made import (
    EVERYTHING,
    LENGTHS,
    SMALL,
    assert_same_step,
    gradients_of,
    make_rollouts,
    make_trainer,
    shifted,
    some_advantages,
)
from vexact.model.rollout import Rollout
from vexact.recipe import LossSection
from vexact.training.loss import TokenLosses, Tokens, sequence_log_ratios, token_losses
from vexact.training.trainer import Trainer
from vexact.verification.checks import thread_count
from vexact_kernels import load

COUNT = len(LENGTHS)


@pytest.mark.parametrize(
    ("dtype", "aggregation"),
    [
        (torch.float32, "token-mean"),
        (torch.bfloat16, "token-mean"),
        (torch.float16, "token-mean"),
        (torch.bfloat16, "seq-mean-token-mean"),
        (torch.bfloat16, "seq-mean-token-sum"),
        (torch.bfloat16, "seq-mean-token-sum-norm"),
    ],
    ids=str,
)
def test_a_step_knows_neither_its_micro_batches_nor_the_order_of_arrival(dtype: torch.dtype, aggregation: str) -> None:
    loss = LossSection(aggregation=aggregation, loss_scale_factor=20)
    expected = make_trainer(dtype=dtype, loss=loss)
    rollouts = shifted(make_rollouts(expected.policy))
    advantages = some_advantages(COUNT)
    metrics = expected.step(rollouts, advantages)
    assert metrics.aggregation == aggregation
    for tokens_at_once, order in ((1, range(COUNT)), (30, range(COUNT)), (77, [3, 7, 0, 1, 6, 2, 5, 4])):
        trainer = make_trainer(dtype=dtype, loss=loss, tokens_at_once=tokens_at_once)
        found = trainer.step([rollouts[i] for i in order], advantages[list(order)])
        assert found == metrics
        assert_same_step(trainer, expected)


@pytest.mark.parametrize("name", EVERYTHING)
def test_no_objective_knows_its_micro_batches_or_the_order_of_arrival(name: str) -> None:
    """Two steps: behind the first the policy has left its reference."""
    trainers = [make_trainer(loss=EVERYTHING[name], tokens_at_once=n) for n in (1024, 1, 77)]
    measured = []
    for trainer, order in zip(trainers, (range(COUNT), range(COUNT), [3, 7, 0, 1, 6, 2, 5, 4]), strict=True):
        for _ in range(2):
            rollouts = shifted(make_rollouts(trainer.policy))
            metrics = trainer.step([rollouts[i] for i in order], some_advantages(COUNT)[list(order)])
        measured.append(metrics)
        assert_same_step(trainer, trainers[0])
    assert measured[0] == measured[1] == measured[2]
    assert (measured[0].objective, measured[0].version) == (name, 2)
    assert (measured[0].kl > 0) == (EVERYTHING[name].kl.coef > 0)
    remedy = EVERYTHING[name].remedy
    assert (measured[0].remedy_rejected_sequences > 0) == (remedy.sequence != "off")
    expected = torch.tensor(remedy.token_high).item() if remedy.token == "tis" else 1.0
    assert measured[0].remedy_weight_max == expected


def test_a_sequences_ratio_of_the_tokens_at_hand_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test above: the mean over a micro-batch where that over a sequence is meant."""

    def pooled(current: Tensor, anchor: Tensor, cuts: list[slice], *rest: Any) -> Tensor:
        return sequence_log_ratios(current, anchor, [slice(0, len(current))], *rest)

    monkeypatch.setattr("vexact.training.loss.sequence_log_ratios", pooled)
    one, many = make_trainer(loss=EVERYTHING["gspo"]), make_trainer(loss=EVERYTHING["gspo"], tokens_at_once=30)
    rollouts = shifted(make_rollouts(one.policy))
    for trainer in (one, many):
        trainer.step(rollouts, some_advantages(COUNT))
    with pytest.raises(AssertionError, match="gradient of"):
        assert_same_step(many, one)


def test_a_divisor_counted_in_the_micro_batch_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test above: a loss that is averaged over each micro-batch."""

    def averaged(tokens: Tokens, *rest: Any) -> TokenLosses:
        count = float(len(tokens.current))
        return token_losses(replace(tokens, divisor=torch.full_like(tokens.divisor, count)), *rest)

    monkeypatch.setattr("vexact.training.trainer.token_losses", averaged)
    one, many = make_trainer(), make_trainer(tokens_at_once=30)
    rollouts = make_rollouts(one.policy)
    for trainer in (one, many):
        trainer.step(rollouts, some_advantages(COUNT))
    with pytest.raises(AssertionError, match="gradient of"):
        assert_same_step(many, one)


def faint_step() -> tuple[Trainer, list[Rollout], Tensor]:
    """Log-ratios of about -80, advantages of 1e-3, divisors of 1000: each token's loss is about -1.8e-41."""
    trainer = make_trainer(loss=LossSection(aggregation="seq-mean-token-sum-norm", loss_scale_factor=1000 // COUNT))
    rollouts = make_rollouts(trainer.policy)
    return trainer, [replace(r, logprobs=r.logprobs + 80.0) for r in rollouts], torch.full((COUNT,), 1e-3)


def ordinary_step() -> tuple[Trainer, list[Rollout], Tensor]:
    trainer = make_trainer()
    return trainer, shifted(make_rollouts(trainer.policy)), some_advantages(COUNT)


@pytest.mark.parametrize("make", [ordinary_step, faint_step])
def test_the_callers_flush_mode_is_no_part_of_a_step(
    make: Callable[[], tuple[Trainer, Sequence[Rollout], Tensor]],
) -> None:
    (expected, rollouts, advantages), (trainer, _, _) = make(), make()
    metrics = expected.step(rollouts, advantages)
    with flushing_denormals():
        found = trainer.step(rollouts, advantages)
    assert found == metrics
    assert_same_step(trainer, expected)


def test_a_step_that_obeyed_the_callers_flush_mode_would_be_seen() -> None:
    """The mutant of the test above: the same step without its guard."""
    (expected, rollouts, advantages), (trainer, _, _) = faint_step(), faint_step()
    assert -1e-37 < expected.step(rollouts, advantages).loss < 0
    assert any(gradient.count_nonzero() for gradient in gradients_of(expected).values())
    with flushing_denormals():
        Trainer.step.__wrapped__(trainer, rollouts, advantages)  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="gradient of"):
        assert_same_step(trainer, expected)


@pytest.mark.parametrize("count", [2, 64])
def test_ten_backward_passes_on_three_threads_give_the_same_bits(count: int) -> None:
    trainer = make_trainer(dtype=torch.bfloat16)
    lengths = [1 + i % 5 for i in range(count)]
    rollouts = make_rollouts(trainer.policy, lengths, prompt=2)
    direction = some_advantages(sum(lengths))
    expected = backward(trainer, rollouts, direction)
    with thread_count(3):
        for repeat in range(10):
            for name, gradient in backward(trainer, rollouts, direction).items():
                assert_same_bits(gradient, expected[name], f"{name} of repeat {repeat}")


def backward(trainer: Trainer, rollouts: Sequence[Rollout], direction: Tensor) -> dict[str, Tensor]:
    """The gradient of the log-probabilities in a direction, by Hugging Face name."""
    trainer.gradients.clear()
    for rows, result in trainer.policy.gradient_passes([r.scored for r in rollouts], trainer.gradients):
        result.logprob.backward(direction[rows])
    return {name: gradient.clone() for name, gradient in gradients_of(trainer).items()}


def test_the_specification_takes_the_same_step() -> None:
    compiled, reference = (make_trainer(changes=SMALL, kernels=load(device)) for device in ("cpu", "reference"))
    rollouts, advantages = make_rollouts(compiled.policy, (2, 3), prompt=2), torch.tensor([1.0, -0.5])
    assert compiled.step(rollouts, advantages) == reference.step(rollouts, advantages)
    assert_same_step(reference, compiled)
