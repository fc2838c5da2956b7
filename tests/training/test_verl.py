"""Where verl has the formula, values and gradients agree. Runs where verl is installed, on its functions alone.

They are given float64; ours are float32: 1e-6 of the largest value.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vexact.model.remedy import Centring, Ratios
from vexact.recipe import KLSection, LossSection
from vexact.study.remedies import (
    DPPO,
    IcePop,
    RatioWeight,
    SequenceRejection,
    SequenceTIS,
    Together,
    TokenRejection,
    TokenTIS,
)
from vexact.training.advantage import advantages_of
from vexact.training.aggregation import divisors
from vexact.training.kl import kl_term
from vexact.training.loss import Tokens, sequence_log_ratios, token_losses
from vexact_kernels import load

pytestmark = pytest.mark.filterwarnings("ignore")  # verl's own
KERNELS = load()
LENGTHS = [1, 4, 2, 7, 5, 3]
CUTS = [slice(sum(LENGTHS[:i]), sum(LENGTHS[: i + 1])) for i in range(len(LENGTHS))]
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@pytest.fixture(scope="module")
def core() -> Any:
    return pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)


@pytest.fixture(scope="module")
def correction() -> Any:
    return pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", exc_type=ImportError)


def columns() -> tuple[Tensor, Tensor, Tensor]:
    """current, old, advantage: float32 [tokens]."""
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(sum(LENGTHS), generator=generator)
    current = old + 0.5 * torch.randn(len(old), generator=generator)
    advantage = torch.randn(len(LENGTHS), generator=generator).repeat_interleave(torch.tensor(LENGTHS))
    return current, old, advantage


def padded(column: Tensor) -> Tensor:
    """float64 [sequences, longest], zeros behind."""
    rows = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.float64)
    for row, cut in zip(rows, CUTS, strict=True):
        row[: cut.stop - cut.start] = column[cut]
    return rows


MASK = padded(torch.ones(sum(LENGTHS)))


def close(found: Tensor, expected: Tensor) -> None:
    assert (found.double() - expected).abs().max() <= 1e-6 * expected.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["reinforce", "ppo", "gspo", "cispo"])
def test_policy_losses(core: Any, name: str, mode: str) -> None:
    section = LossSection(
        name=name, aggregation=mode, epsilon_low=0.2, epsilon_high=0.3, dual_clip=1.5, cap=1.3,
        loss_scale_factor=max(LENGTHS),
    )  # fmt: skip
    config = core.ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.3, clip_ratio_high=0.3,
        clip_ratio_low=1.0 if name == "cispo" else 0.2, clip_ratio_c=1.5,
    )  # fmt: skip
    current, old, advantage = columns()
    theirs = padded(current).requires_grad_()
    loss_of = core.get_policy_loss_fn({"reinforce": "gpg", "ppo": "vanilla"}.get(name, name))
    expected = loss_of(padded(old), theirs, padded(advantage), MASK, mode, config)[0]
    expected.backward()
    ours = current.clone().requires_grad_()
    ratios = sequence_log_ratios(current, old, CUTS, None, KERNELS)
    tokens = Tokens(ours, old, advantage, divisors(LENGTHS, LENGTHS, section), sequence_log_ratio=ratios)
    found = token_losses(tokens, section, KERNELS).loss
    found.backward(torch.ones_like(found))
    assert ours.grad is not None and theirs.grad is not None
    close(found.detach().sum(), expected.detach())
    close(ours.grad, theirs.grad[MASK.bool()])


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3+"])
def test_kl(core: Any, estimator: str) -> None:
    current, reference, _ = columns()
    ours, theirs = current.clone().requires_grad_(), current.double().requires_grad_()
    expected = core.kl_penalty(theirs, reference.double(), estimator)
    found = kl_term(ours, reference, KLSection(1.0, estimator), KERNELS)
    expected.sum().backward()
    found.backward(torch.ones_like(found))
    assert ours.grad is not None and theirs.grad is not None
    close(found.detach(), expected.detach())
    close(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("name", "estimator", "options"),
    [
        ("group_std", "grpo", {"norm_adv_by_std_in_grpo": True}),
        ("group_mean", "grpo", {"norm_adv_by_std_in_grpo": False}),
        ("leave_one_out", "rloo", {}),
        ("batch_token", "reinforce_plus_plus", {}),
    ],
)
def test_advantages(core: Any, name: str, estimator: str, options: dict[str, Any]) -> None:
    rewards, groups = [1.0, 0.0, 0.25, 1.0, 0.0, 0.5], [0, 0, 0, 1, 1, 1]
    scores = torch.zeros_like(MASK)
    for row, (reward, length) in enumerate(zip(rewards, LENGTHS, strict=True)):
        scores[row, length - 1] = reward
    if estimator == "reinforce_plus_plus":
        options = {"config": core.AlgoConfig(gamma=1.0)}
    else:
        options = {**options, "index": np.array(groups)}
    of = core.get_adv_estimator_fn(estimator)
    expected, _ = of(token_level_rewards=scores, response_mask=MASK, **options)
    found = advantages_of(name, rewards, groups, LENGTHS).values
    close(found, expected[:, 0])


def test_corrections(correction: ModuleType) -> None:
    log = columns()[0] - columns()[1]
    ratios, everything = Ratios(log, log, CUTS, KERNELS), torch.ones(len(log), dtype=torch.bool)
    expected, _ = correction.compute_rollout_correction_weights(padded(log), MASK, "token", 1.5)
    found = TokenTIS(1.5).weights(ratios, everything, log)
    close(found.weights, expected[MASK.bool()])
    low, high = 0.6, 1.5
    for level, theirs in (("product", "seq_sum_k1"), ("geometric", "seq_mean_k1")):
        # verl bounds the inverse, q/p
        bounds = f"{1 / high}_{1 / low}"
        mask, _ = correction.compute_rollout_rejection_mask(padded(log), MASK, theirs, bounds)
        kept = SequenceRejection(low, high, level).weights(ratios, everything, log).kept  # type: ignore[arg-type]
        assert kept.tolist() == mask[MASK.bool()].bool().tolist()
        assert 0 < int(kept.sum()) < len(log)
    assert math.isfinite(float(ratios.product(log, everything).max()))


@pytest.mark.parametrize(
    ("remedy", "level", "threshold"),
    [(TokenTIS(1.5), "token", 1.5), (SequenceTIS(1.5), "sequence", 1.5), (IcePop(0.7, 1.4), "token", "0.7_1.4")],
    ids=lambda x: type(x).__name__,
)
def test_weights(correction: ModuleType, remedy: Any, level: str, threshold: Any) -> None:
    log = columns()[0] - columns()[1]
    ratios, everything = Ratios(log, log, CUTS, KERNELS), torch.ones(len(log), dtype=torch.bool)
    expected, _ = correction.compute_rollout_correction_weights(padded(log), MASK, level, threshold)
    found = remedy.weights(ratios, everything, log)
    close(torch.where(found.kept, found.weights, 0.0), expected[MASK.bool()])
    assert len(set(found.weights.tolist())) > 1 and float(found.weights.max()) <= 1.5


@pytest.mark.parametrize(
    ("remedy", "theirs", "bound"),
    [
        (TokenRejection(0.0, 0.05, "k2"), "token_k2", "0.05"),
        (TokenRejection(0.0, 0.05, "k3"), "token_k3", "0.05"),
        (TokenRejection(0.7, 1.4), "token_k1", f"{1 / 1.4}_{1 / 0.7}"),
        (SequenceRejection(0.0, 0.13, "k2"), "seq_mean_k2", "0.13"),
        (SequenceRejection(0.0, 0.13, "k3"), "seq_mean_k3", "0.13"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_rejection(correction: ModuleType, remedy: Any, theirs: str, bound: str) -> None:
    log = columns()[0] - columns()[1]
    ratios, everything = Ratios(log, log, CUTS, KERNELS), torch.ones(len(log), dtype=torch.bool)
    mask, _ = correction.compute_rollout_rejection_mask(padded(log), MASK, theirs, bound)
    kept = remedy.weights(ratios, everything, log).kept
    assert kept.tolist() == mask[MASK.bool()].bool().tolist()
    assert 0 < int(kept.sum()) < len(log)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo(core: Any, divergence: Any) -> None:
    """Its gradient, with the truncated ratio to the sampler as weight; both divide by all tokens here."""
    delta = 0.1 if divergence == "tv" else 0.02
    config = core.ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=delta, clip_ratio_low=delta,
        clip_ratio_high=delta, clip_ratio_c=20.0,
    )  # fmt: skip
    current, sampler, advantage = columns()
    current = current.clamp(max=-1e-3)  # a probability, which that of the others need not be
    theirs = padded(current).requires_grad_()
    loss_of = core.get_policy_loss_fn(f"dppo_{divergence}")
    loss_of(padded(sampler), theirs, padded(advantage), MASK, "seq-mean-token-sum", config)[0].backward()
    log = current - sampler
    ratios, everything = Ratios(log, log, CUTS, KERNELS, None, sampler), torch.ones(len(log), dtype=torch.bool)
    remedy = Together(DPPO(delta, divergence), RatioWeight(Centring("sampler", "truncate", 0.0, 20.0)))
    found = remedy.weights(ratios, everything, advantage)
    assert theirs.grad is not None
    close(-torch.where(found.kept, found.weights, 0.0) * advantage / len(LENGTHS), theirs.grad[MASK.bool()])
    assert 0 < int(found.kept.sum()) < len(log)
