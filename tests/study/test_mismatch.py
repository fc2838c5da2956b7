"""The switch: which side is disturbed, when, by how much, and what off means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers import assert_same_bits
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.recipe import MismatchSection, Recipe, RecipeError
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.study.dose import kl, log_softmax, sampled_k3
from vexact.study.mismatch import Mismatch, check_mismatch
from vexact_kernels import load

REQUESTS = [Request(40 + i, [(i * 7 + j) % 250 for j in range(3 + 5 * i)], n=8, max_tokens=16) for i in range(10)]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy.load("tiny", load())


@pytest.fixture(scope="module")
def rollouts(policy: Policy) -> list[Rollout]:
    return Sampler(policy).run(REQUESTS)


def mismatch(**keys: Any) -> Mismatch:
    return Mismatch(MismatchSection(**{"site": "logits", **keys}), seed=1)


def test_off_is_the_same_object(policy: Policy) -> None:
    off = Mismatch(MismatchSection(), seed=1)
    assert off.sampler(policy, 0) is policy
    assert off.trainer(policy, 0) is policy
    assert off.solved


@pytest.mark.parametrize(
    ("side", "sampler", "trainer"),
    [("sampler", True, False), ("trainer", False, True), ("both-shared", True, True), ("both-independent", True, True)],
)
@pytest.mark.parametrize("site", ["logits", "kv", "weights"])
def test_a_side_is_disturbed_and_the_other_is_the_same_object(
    policy: Policy, site: str, side: str, sampler: bool, trainer: bool
) -> None:
    switch = mismatch(site=site, side=side, sigma=0.1)
    switch.begin(policy, list, 4096)
    assert (switch.sampler(policy, 0) is not policy) == sampler
    assert (switch.trainer(policy, 0) is not policy) == trainer


@pytest.mark.parametrize("site", ["logits", "hidden", "weights"])
def test_shared_noise_agrees_in_every_bit_and_independent_noise_does_not(policy: Policy, site: str) -> None:
    for side, same in (("both-shared", True), ("both-independent", False)):
        switch = mismatch(site=site, side=side, sigma=0.05)
        switch.begin(policy, list, 4096)
        drawn = Sampler(switch.sampler(policy, 0)).run(REQUESTS[:3])
        scored = switch.trainer(policy, 0).logprobs([rollout.scored for rollout in drawn]).logprob
        recorded = torch.cat([rollout.logprobs for rollout in drawn])
        assert torch.equal(scored.view(torch.int32), recorded.view(torch.int32)) == same
        assert (switch.sampler(policy, 0).digest == switch.trainer(policy, 0).digest) == same


def test_noise_begins_grows_and_ends_where_it_is_told_to(policy: Policy) -> None:
    switch = mismatch(sigma=0.4, start=2, stop=8, ramp=4)
    assert [switch.size(step) for step in range(9)] == [None, None, 0.1, 0.2, pytest.approx(0.3), 0.4, 0.4, 0.4, None]
    assert switch.sampler(policy, 1) is policy
    assert switch.sampler(policy, 8) is policy
    assert switch.sampler(policy, 2) is not policy


def test_another_seed_is_another_noise_of_the_same_size(policy: Policy) -> None:
    one, other = (mismatch(sigma=0.1, seed=seed).sampler(policy, 0) for seed in (0, 1))
    assert one.digest != other.digest


DOSES = [
    {"site": "logits"}, {"site": "logits", "shape": "laplace"}, {"site": "logits", "law": "ulp"},
    {"site": "hidden"}, {"site": "kv", "persistence": "prefix"}, {"site": "attention"}, {"site": "weights"},
    {"site": "head"}, {"site": "logits", "shape": "one-sided"}, {"site": "logits", "shape": "student"},
]  # fmt: skip


@pytest.mark.parametrize("keys", DOSES, ids=lambda keys: " ".join(keys.values()))
def test_a_dose_is_solved_for_and_met_by_what_is_sampled(
    policy: Policy, rollouts: list[Rollout], keys: dict[str, Any]
) -> None:
    switch = mismatch(**keys, k3=2e-3)
    assert not switch.solved
    dose = switch.begin(policy, lambda: rollouts, 4096)
    assert dose is not None
    assert switch.sigma == dose.sigma
    assert dose.divergence == pytest.approx(2e-3, rel=0.01)
    drawn = Sampler(switch.sampler(policy, 0)).run(REQUESTS)
    # 1280 sampled tokens: the estimate of K3 has a relative error of some 5 %, and the prefixes are others.
    assert sampled_k3(drawn, policy, 4096) == pytest.approx(2e-3, rel=0.25)


@pytest.mark.parametrize(
    ("keys", "below", "skewness"),
    [({"k3": 5e-3}, (0.49, 0.54), (-0.25, 0.0)), ({"preset": "bad-gpu"}, (0.43, 0.48), (-1.1, -0.55))],
    ids=["gaussian", "bad-gpu"],
)
def test_one_sided_noise_makes_a_skewed_discrepancy_and_no_one_sided_one(
    policy: Policy,
    rollouts: list[Rollout],
    keys: dict[str, Any],
    below: tuple[float, float],
    skewness: tuple[float, float],
) -> None:
    """Δ of every token of the vocabulary, weighed by the sampler's law, at one K3."""
    switch = mismatch(**keys)
    switch.begin(policy, lambda: rollouts, 4096)
    q, p = (
        np.concatenate(list(log_softmax(each, [rollout.scored for rollout in rollouts], 4096)))
        for each in (switch.sampler(policy, 0), policy)
    )
    weights, delta = np.exp(q) / len(q), p - q
    mean = (weights * delta).sum()
    away = delta - mean
    assert kl(q, p).mean() == pytest.approx(5e-3, rel=0.01)
    assert mean == pytest.approx(-kl(q, p).mean(), rel=1e-6)  # with any noise of the sampler
    assert below[0] < weights[delta < 0].sum() < below[1]
    assert skewness[0] < (weights * away**3).sum() / (weights * away**2).sum() ** 1.5 < skewness[1]


def test_one_sided_noise_of_the_record_makes_a_one_sided_discrepancy(policy: Policy, rollouts: list[Rollout]) -> None:
    switch = mismatch(site="record", shape="one-sided", sigma=0.1)
    noted = switch.record(rollouts, 0, policy.ops.kernels)
    delta = torch.cat([before.logprobs - after.logprobs for before, after in zip(rollouts, noted, strict=True)])
    assert (delta <= 0).all() and (delta < 0).float().mean() > 0.99


@pytest.mark.parametrize("side", ["sampler", "trainer", "both-independent"])
def test_a_dose_is_that_of_the_sides_that_are_disturbed(policy: Policy, rollouts: list[Rollout], side: str) -> None:
    """Sampled by the one and scored by the other; σ² of two independent noises is half of that of one."""
    switch, alone = mismatch(k3=2e-2, side=side), mismatch(k3=2e-2)
    for each in (switch, alone):
        each.begin(policy, lambda: rollouts, 4096)
    drawn = Sampler(switch.sampler(policy, 0)).run(REQUESTS)
    assert sampled_k3(drawn, switch.trainer(policy, 0), 4096) == pytest.approx(2e-2, rel=0.25)
    assert switch.sigma is not None and alone.sigma is not None
    assert (switch.sigma / alone.sigma) ** 2 == pytest.approx(0.5 if side == "both-independent" else 1.0, rel=0.15)


def test_the_dose_of_spikes_is_that_of_their_core(policy: Policy, rollouts: list[Rollout]) -> None:
    core, spiked = mismatch(k3=2e-3), mismatch(k3=2e-3, shape="spikes", spike_rate=0.1)
    for switch in (core, spiked):
        switch.begin(policy, lambda: rollouts, 4096)
    assert core.sigma == spiked.sigma


def test_a_dose_is_solved_once_and_held(policy: Policy, rollouts: list[Rollout]) -> None:
    switch = mismatch(k3=2e-3)
    switch.begin(policy, lambda: rollouts, 4096)
    held = switch.sigma
    assert switch.begin(policy, lambda: rollouts[:2], 4096) is None
    assert switch.sigma == held
    again = mismatch(k3=2e-3, hold="k3")
    again.begin(policy, lambda: rollouts, 4096)
    assert again.begin(policy, lambda: rollouts[:2], 4096) is not None
    assert again.sigma != held


def test_the_state_comes_back_in_every_bit(policy: Policy, rollouts: list[Rollout]) -> None:
    switch = mismatch(site="weights", k3=2e-3)
    switch.begin(policy, lambda: rollouts, 4096)
    other = mismatch(site="weights", k3=2e-3)
    other.restore(switch.values())
    assert other.solved
    assert other.sampler(policy, 0).digest == switch.sampler(policy, 0).digest
    assert other.scales == switch.scales


def test_weights_keep_their_noise_from_version_to_version(policy: Policy) -> None:
    """δW is relative to the weights that the run began with, not to those that it has come to."""
    switch = mismatch(site="weights", sigma=0.02)
    switch.begin(policy, list, 4096)
    kernels = policy.ops.kernels
    stacked = policy.transformer.parameters.stacked(kernels)
    later = Policy.build(policy.config, lambda name: stacked[name] * 2, kernels, policy.dtype, version=1)
    name = "model.layers.0.mlp.down_proj.weight"
    changes = [
        switch.sampler(p, 0).transformer.parameters.stacked(kernels)[name]
        - p.transformer.parameters.stacked(kernels)[name]
        for p in (policy, later)
    ]
    assert torch.allclose(changes[0], changes[1], atol=1e-6)
    assert switch.sampler(later, 0).version == 1


def test_noise_on_the_record_leaves_what_was_drawn(policy: Policy, rollouts: list[Rollout]) -> None:
    switch = mismatch(site="record", sigma=0.2)
    assert switch.sampler(policy, 0) is policy
    disturbed = switch.record(rollouts, 0, policy.ops.kernels)
    for before, after in zip(rollouts, disturbed, strict=True):
        assert after.completion == before.completion
        assert after.logprobs.max() <= 0
    p, q = (torch.cat([r.logprobs for r in side]).double().exp() for side in (rollouts, disturbed))
    moved = (q / (1 - q)).log() - (p / (1 - p)).log()
    assert float(moved.std()) == pytest.approx(0.2, rel=0.1)
    assert_same_bits(
        torch.cat([r.logprobs for r in mismatch(site="record").record(rollouts, 0, policy.ops.kernels)]),
        torch.cat([r.logprobs for r in rollouts]),
    )


def test_noise_on_gradients_is_relative_to_each_tensor(policy: Policy) -> None:
    switch = mismatch(site="gradients", side="trainer", sigma=0.1)
    gradients = {"a": torch.randn(40, 60) * 1e-5, "b": torch.randn(500) * 1e3}
    noisy = switch.gradients(gradients, policy.ops.kernels, 3)
    for name, gradient in gradients.items():
        rms = float(gradient.double().square().mean().sqrt())
        assert float((noisy[name] - gradient).double().std()) == pytest.approx(0.1 * rms, rel=0.15)
    assert not torch.equal(noisy["a"], switch.gradients(gradients, policy.ops.kernels, 4)["a"])
    assert switch.trainer(policy, 0) is policy
    none = mismatch(site="gradients", side="trainer").gradients(gradients, policy.ops.kernels, 3)
    assert_same_bits(none["b"], gradients["b"])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"sigma": 0.1}, "mismatch.sigma needs a mismatch.site"),
        ({"site": "logits", "sigma": 0.1, "k3": 1e-3}, "give one"),
        ({"site": "logits", "law": "rms"}, "law = rms does not go with site logits; it is log-odds or ulp"),
        ({"site": "hidden", "law": "log-odds"}, "it is rms or ulp"),
        ({"site": "weights", "law": "ulp"}, "it is rms"),
        ({"site": "logits", "persistence": "weights"}, "persistence = weights does not go with site logits"),
        ({"site": "weights", "persistence": "fresh"}, "persistence = fresh does not go with site weights"),
        ({"site": "gradients", "sigma": 0.1}, "only the trainer has any"),
        ({"site": "record", "sigma": 0.1, "side": "trainer"}, "the sampler keeps the record"),
        ({"site": "kv", "shape": "spikes"}, "shape = spikes does not go with site kv; it is gaussian"),
        ({"site": "record", "shape": "spikes"}, "shape = spikes does not go with site record"),
        ({"site": "record", "k3": 1e-3}, "no K3 follows from it"),
        ({"preset": "fp8", "sigma": 0.1}, "preset = fp8 says site and size itself"),
        ({"preset": "fp8", "site": "kv"}, "preset = fp8 says site and size itself"),
        ({"preset": "bf16-dense", "law": "rms"}, "law = rms does not go with site logits"),
        ({"preset": "bf16-dense", "persistence": "weights"}, "persistence = weights does not go with site logits"),
        ({"preset": "weights-0.01", "persistence": "prefix"}, "does not go with site weights; it is weights"),
        ({"preset": "weights-0.01", "shape": "laplace"}, "shape = laplace does not go with site weights"),
        ({"preset": "bad-gpu", "shape": "laplace"}, "bad-gpu has the shape one-sided"),
        ({"site": "gradients", "side": "trainer", "persistence": "prefix"}, "does not go with site gradients"),
        ({"site": "record", "persistence": "prefix+version"}, "does not go with site record"),
        ({"cause": "split-k", "site": "kv"}, "goes without a site"),
        ({"cause": "missed-sync", "side": "trainer"}, "befalls the sampler"),
        ({"site": "logits", "start": 5, "stop": 5}, "stop = 5 must be above start = 5"),
        ({"site": "logits", "start": 2, "ramp": 9, "stop": 10}, "ramp = 9 from start = 2 is not over at stop = 10"),
        ({"site": "logits", "sigma": 0.1, "hold": "k3"}, "needs a k3 to hold"),
        ({"top_p": 1.5}, "top_p = 1.5 must be at most 1"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        MismatchSection(**keys)


@pytest.mark.parametrize(
    ("preset", "site", "target", "shape"),
    [
        ("fp16", "logits", 7e-5, "gaussian"),
        ("bad-gpu", "logits", 5e-3, "one-sided"),
        ("weights-0.02", "weights", 0, "gaussian"),
    ],
)
def test_a_preset_says_site_size_and_shape(preset: str, site: str, target: float, shape: str) -> None:
    section = MismatchSection(preset=preset)
    assert (section.actual_site, section.target, section.actual_shape) == (site, target, shape)
    assert section.actual_sigma == (0.02 if preset == "weights-0.02" else 0.0)


def test_greedy_sampling_has_no_noise_of_logits() -> None:
    recipe = Recipe(mismatch=MismatchSection(site="logits", sigma=0.1))
    check_mismatch(recipe)
    with pytest.raises(RecipeError, match="temperature = 0 is greedy"):
        check_mismatch(replace(recipe, sampling=replace(recipe.sampling, temperature=0.0)))
