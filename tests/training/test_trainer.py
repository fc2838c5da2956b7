"""A step of the trainer: what it knows, what it refuses, and what its gradient is in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers import assert_same_bits
from made import (
    LENGTHS,
    SMALL,
    assert_same_step,
    gradients_of,
    make_rollouts,
    make_trainer,
    poisoned,
    shifted,
    some_advantages,
)
from vexact.model.checkpoint import save_folder
from vexact.model.parameters import unstack
from vexact.model.policy import Scored
from vexact.model.rollout import Rollout
from vexact.recipe import LossSection
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.training.admission import TrainingError
from vexact.training.aggregation import divisors
from vexact.training.trainer import weights_of
from vexact_kernels import load

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNT = len(LENGTHS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_policy_the_ratio_is_exactly_one_and_no_token_differs(dtype: torch.dtype) -> None:
    trainer = make_trainer(dtype=dtype)
    for version in (1, 2):
        metrics = trainer.step(make_rollouts(trainer.policy), some_advantages(COUNT))
        assert (metrics.ratio_min, metrics.ratio_max) == (1.0, 1.0)
        assert (metrics.clip_fraction, metrics.mismatch_tokens, metrics.mismatch_max, metrics.k3) == (0, 0, 0, 0)
        assert (metrics.version, metrics.tokens, metrics.rollouts) == (version, sum(LENGTHS), COUNT)
        assert metrics.skipped == "" and metrics.grad_norm > 0


@pytest.mark.parametrize("temperature", [0.7, 1.0, 0.0])
def test_a_rollout_is_scored_at_the_temperature_it_was_sampled_at(temperature: float) -> None:
    trainer = make_trainer(dtype=torch.bfloat16)
    rollouts = Sampler(trainer.policy).run([Request(id=3, prompt=[1, 2], n=4, temperature=temperature, max_tokens=6)])
    metrics = trainer.step(rollouts, some_advantages(4))
    assert (metrics.tokens, metrics.mismatch_tokens, metrics.ratio_min, metrics.ratio_max) == (24, 0, 1.0, 1.0)


def test_one_differing_bit_is_counted() -> None:
    trainer = make_trainer()
    rollouts = make_rollouts(trainer.policy)
    logprobs = rollouts[3].logprobs.clone()
    logprobs[2] = torch.nextafter(logprobs[2], torch.tensor(-math.inf))
    rollouts[3] = replace(rollouts[3], logprobs=logprobs)
    metrics = trainer.step(rollouts, some_advantages(COUNT))
    assert metrics.mismatch_tokens == 1
    assert 0 < metrics.mismatch_max < 1e-5


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])  # tied; with biases; plain
def test_every_gradient_is_that_of_transformers_in_float64(family: str, aggregation: str, tmp_path: Path) -> None:
    trainer = make_trainer(family, loss=LossSection(aggregation=aggregation, loss_scale_factor=20))
    save_folder(tmp_path / "model", trainer.policy.config, weights_of(trainer.policy))
    rollouts = shifted(make_rollouts(trainer.policy, (1, 3, 8, 20)))
    advantages = some_advantages(4)
    exact_loss, exact = transformers_gradients(tmp_path / "model", rollouts, advantages, trainer.loss)
    metrics = trainer.step(rollouts, advantages)
    assert metrics.loss == pytest.approx(exact_loss, abs=1e-6)
    found = gradients_of(trainer)
    assert found.keys() == exact.keys()
    for name, gradient in found.items():
        assert gradient.isfinite().all() and gradient.count_nonzero() > 0, name
        # float32 chains of some hundred terms whose sizes cancel: 1e-5 of the largest entry, about 80 ulps of it
        error = (gradient.double() - exact[name]).abs().max() / exact[name].abs().max()
        assert error < 1e-5, f"{name}: {error:.2g}"


def transformers_gradients(
    folder: Path, rollouts: Sequence[Rollout], advantages: Tensor, section: LossSection
) -> tuple[float, dict[str, Tensor]]:
    """The PPO formula in float64 on another project's model: loss, and gradients by name."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    lengths = [len(rollout.completion) for rollout in rollouts]
    divisor = divisors(lengths, lengths, section).double()
    loss = torch.zeros((), dtype=torch.float64)
    row = 0
    for rollout, advantage in zip(rollouts, advantages.double(), strict=True):
        first, count = len(rollout.prompt), len(rollout.completion)
        logits = model(torch.tensor([rollout.tokens])).logits[0, first - 1 : -1]
        current = logits.log_softmax(-1).gather(1, torch.tensor(rollout.completion)[:, None])[:, 0]
        ratio = (current - rollout.logprobs.double()).exp()
        bounded = ratio.clamp(1 - section.epsilon_low, 1 + section.epsilon_high)
        loss -= (torch.minimum(ratio * advantage, bounded * advantage) / divisor[row : row + count]).sum()
        row += count
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_advantages_of_zero_move_nothing(dtype: torch.dtype) -> None:
    trainer = make_trainer(dtype=dtype)
    before = trainer.fingerprint()
    metrics = trainer.step(shifted(make_rollouts(trainer.policy)), torch.zeros(COUNT))
    assert metrics.grad_norm == 0.0
    assert all(gradient.count_nonzero() == 0 for gradient in gradients_of(trainer).values())
    assert trainer.fingerprint() == before


def test_what_is_dropped_leaves_no_trace_but_its_count() -> None:
    expected, trainer = make_trainer(), make_trainer()
    rollouts = make_rollouts(expected.policy)
    advantages = some_advantages(COUNT)
    metrics = expected.step(rollouts, advantages)
    empty = replace(rollouts[0], request=100, completion=[], logprobs=torch.empty(0))
    broken = replace(rollouts[7], request=101, finish="nonfinite", logprobs=torch.full((34,), math.nan))
    foreign = replace(rollouts[6], request=1, sample=9, finish="nonfinite", digest="other", version=7)
    poisoned = torch.cat([torch.tensor([math.nan, math.inf, -math.inf]), advantages])
    found = trainer.step([empty, broken, foreign, *rollouts], poisoned)
    assert asdict(found) == {**asdict(metrics), "dropped_empty": 1, "dropped_nonfinite": 2}
    assert_same_step(trainer, expected)


def test_a_rollout_whose_numbers_broke_in_the_middle_leaves_its_neighbours_their_gradients() -> None:
    """As the sampler leaves it: what follows one of the poisoned tokens has no finite logits."""
    expected, trainer = (poisoned(make_trainer("llama"), tokens=range(64, 72)) for _ in range(2))
    requests = [Request(id=i, prompt=[1, 2 + i], n=3, max_tokens=24) for i in range(6)]
    rollouts = Sampler(trainer.policy).run(requests)
    broken = [rollout.finish == "nonfinite" for rollout in rollouts]
    assert any(not a and b and not c for a, b, c in zip(broken, broken[1:], broken[2:], strict=False))
    assert min(len(rollout.completion) for rollout in rollouts) > 0
    advantages = some_advantages(len(rollouts))
    healthy = [i for i in range(len(rollouts)) if not broken[i]]
    metrics = expected.step([rollouts[i] for i in healthy], advantages[healthy])
    assert metrics.skipped == "" and metrics.nonfinite_tokens == metrics.mismatch_tokens == 0
    assert asdict(trainer.step(rollouts, advantages)) == {**asdict(metrics), "dropped_nonfinite": sum(broken)}
    assert_same_step(trainer, expected)


@pytest.mark.parametrize("advantages", [torch.empty(0), torch.tensor([math.nan])])
def test_a_step_without_tokens_is_a_counted_no_op(advantages: Tensor) -> None:
    trainer = make_trainer()
    policy = trainer.policy
    rollouts = [replace(r, completion=[], logprobs=torch.empty(0)) for r in make_rollouts(policy, (3,))]
    metrics = trainer.step(rollouts[: len(advantages)], advantages)
    assert (metrics.skipped, metrics.tokens, metrics.dropped_empty) == ("nothing to train", 0, len(advantages))
    assert all(math.isfinite(value) for value in asdict(metrics).values() if isinstance(value, float))
    assert trainer.policy is policy


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    trainer = make_trainer()
    policy, before = trainer.policy, {name: m.clone() for name, m in trainer.optimizer.masters.items()}
    rollouts = make_rollouts(policy)
    metrics = trainer.step(rollouts, torch.full((COUNT,), 3e38))
    assert metrics.skipped == "gradient is not finite"
    assert trainer.policy is policy
    for name, master in trainer.optimizer.masters.items():
        assert_same_bits(master, before[name], name)
    # and the step after it is as if it had not been
    expected = make_trainer()
    advantages = some_advantages(COUNT)
    assert trainer.step(rollouts, advantages) == expected.step(rollouts, advantages)
    assert_same_step(trainer, expected)


def test_the_trained_tokens_follow_from_lengths_and_not_from_what_they_are() -> None:
    """pad = end: the end counts once, and the same id inside a prompt counts never."""
    trainer = make_trainer(changes={"pad_token_id": 257, "eos_token_id": 257})
    rollouts = make_rollouts(trainer.policy, (2, 3))
    tokens = [[5, 257, 257, 9], [257, 6, 7, 8, 1]]
    completions = [[11, 257], [257, 12, 257]]
    for i in range(2):
        scored = trainer.policy.logprobs([Scored([*tokens[i], *completions[i]], len(tokens[i]))])
        rollouts[i] = replace(rollouts[i], prompt=tokens[i], completion=completions[i], logprobs=scored.logprob)
    metrics = trainer.step(rollouts, torch.tensor([1.0, -1.0]))
    assert (metrics.tokens, metrics.mismatch_tokens) == (5, 0)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_published_is_the_masters_rounded_once_and_shares_no_memory_with_them(
    dtype: torch.dtype, device: str
) -> None:
    trainer = make_trainer(dtype=dtype, kernels=load(device), changes=SMALL)
    old, before = trainer.policy, {name: w.clone() for name, w in weights_of(trainer.policy).items()}
    trainer.step(make_rollouts(old, (2, 3), prompt=2), torch.tensor([1.0, -0.5]))
    for name, master in unstack(old.config, trainer.optimizer.masters).items():
        assert_same_bits(weights_of(trainer.policy)[name], master.to(dtype), name)
    for name, weight in weights_of(old).items():
        assert_same_bits(weight, before[name], f"{name} of the policy before")
    assert trainer.policy.version == old.version + 1


def test_updates_smaller_than_the_compute_dtype_are_kept_in_the_masters() -> None:
    trainer = make_trainer(dtype=torch.bfloat16, lr=1e-6)
    before = {name: master.clone() for name, master in trainer.optimizer.masters.items()}
    trainer.step(make_rollouts(trainer.policy), some_advantages(COUNT))
    moved = [name for name, master in trainer.optimizer.masters.items() if not torch.equal(master, before[name])]
    assert len(moved) == len(before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"digest": "0123456789abcdef"}, r"rollout \(0, 0\): arithmetic digest 0123456789abcdef is not the trainer's"),
        ({"version": 1}, r"rollout \(0, 0\): sampled by version 1, the trainer is at 0"),
        ({"request": 0, "sample": 1}, r"rollout \(0, 1\): given twice"),
        ({"logprobs": torch.tensor([math.nan])}, r"rollout \(0, 0\): a recorded logprob is not finite"),
        ({"logprobs": torch.zeros(2)}, r"rollout \(0, 0\): needs 1 float32 logprobs"),
    ],
)
def test_rollouts_that_cannot_be_trained_on_are_refused_by_name(change: dict[str, object], words: str) -> None:
    trainer = make_trainer()
    rollouts = make_rollouts(trainer.policy)
    rollouts[0] = replace(rollouts[0], **change)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match=words):
        trainer.step(rollouts, some_advantages(COUNT))


def test_an_advantage_that_is_not_finite_is_refused() -> None:
    trainer = make_trainer()
    rollouts, advantages = make_rollouts(trainer.policy), some_advantages(COUNT)
    advantages[2] = math.inf
    with pytest.raises(TrainingError, match=r"rollout \(1, 0\): advantage is inf"):
        trainer.step(rollouts, advantages)
    with pytest.raises(TrainingError, match="8 rollouts need as many advantages"):
        trainer.step(rollouts, advantages[:3])


def test_older_rollouts_are_taken_where_lag_is_allowed() -> None:
    trainer = make_trainer()
    rollouts = make_rollouts(trainer.policy)
    trainer.step(rollouts, some_advantages(COUNT))
    with pytest.raises(TrainingError, match="a lag of at most 0"):
        trainer.step(rollouts, some_advantages(COUNT))
    trainer.max_lag = 1
    metrics = trainer.step(rollouts, some_advantages(COUNT))
    assert metrics.version == 2
    assert metrics.mismatch_tokens > 0
    assert metrics.ratio_min < 1.0 < metrics.ratio_max
    assert metrics.k3 > 0
