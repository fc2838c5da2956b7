"""Noise by address: as repeatable as no noise, of the size and the shape that were asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import assert_same_bits
from vexact.model.gradients import Gradients
from vexact.model.ops import Ops
from vexact.model.origin import Addresses, Origin
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.recipe import MismatchSection
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.study.mismatch import Mismatch
from vexact.study.noise import ULP, Noise, Noisy
from vexact.study.weights import scales_of
from vexact_kernels import load

SITES: list[dict[str, Any]] = [
    {"site": "logits"},
    {"site": "logits", "law": "ulp", "sigma": 3.0},
    {"site": "logits", "shape": "laplace", "persistence": "prefix"},
    {"site": "logits", "shape": "student", "persistence": "prefix+version"},
    {"site": "logits", "shape": "spikes", "spike_rate": 0.1},
    {"site": "logits", "shape": "one-sided", "persistence": "sequence"},
    {"site": "hidden"},
    {"site": "hidden", "law": "ulp", "sigma": 2.0, "persistence": "prefix"},
    {"site": "attention", "persistence": "sequence"},
    {"site": "kv"},
    {"site": "weights", "sigma": 0.02},
    {"site": "head", "sigma": 0.02},
]


def name_of(keys: dict[str, Any]) -> str:
    return " ".join(str(value) for key, value in keys.items() if key != "sigma")


sites = pytest.mark.parametrize("keys", SITES, ids=name_of)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@cache
def exact(dtype: torch.dtype = torch.float32) -> Policy:
    return Policy.load("tiny", load(), dtype)


def noisy(keys: dict[str, Any], policy: Policy | None = None, side: str = "sampler", **more: Any) -> Policy:
    policy = policy or exact()
    mismatch = Mismatch(MismatchSection(**{"sigma": 0.2, **keys, **more}), seed=5)
    if mismatch.section.actual_site in ("weights", "head"):
        mismatch.scales = scales_of(policy, mismatch.section.actual_site)
    return getattr(mismatch, side)(policy, 0)


def requests(count: int = 6) -> list[Request]:
    return [Request(40 + i, [(i * 7 + j) % 250 for j in range(3 + 25 * i)], n=3, max_tokens=9) for i in range(count)]


def logprobs(rollouts: list[Rollout]) -> Tensor:
    return torch.cat([rollout.logprobs for rollout in rollouts])


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [list(rollout.completion) for rollout in rollouts]


@dtypes
@sites
def test_a_disturbed_sampler_is_a_disturbed_scorer(keys: dict[str, Any], dtype: torch.dtype) -> None:
    policy = noisy(keys, exact(dtype))
    rollouts = Sampler(policy).run(requests())
    scored = [rollout.scored for rollout in rollouts]
    assert_same_bits(policy.logprobs(scored).logprob, logprobs(rollouts))
    assert_same_bits(policy.logprobs(scored, tokens_at_once=20).logprob, logprobs(rollouts))
    differs = exact(dtype).logprobs(scored).logprob.view(torch.int32) != logprobs(rollouts).view(torch.int32)
    assert differs.float().mean() > 0.9


@sites
def test_noise_does_not_know_the_schedule(keys: dict[str, Any]) -> None:
    policy = noisy(keys)
    expected = Sampler(policy).run(requests())
    for schedule in ({"chunk": 3}, {"running": 1}, {"tokens_per_step": 7, "chunk": 5}, {"pages": 6, "running": 3}):
        found = Sampler(policy, **schedule).run(requests()[::-1])
        assert tokens(found) == tokens(expected)
        assert_same_bits(logprobs(found), logprobs(expected))


@sites
def test_noise_of_size_zero_changes_no_bit(keys: dict[str, Any]) -> None:
    policy = noisy({**keys, "spike_size": 0.0}, sigma=0.0)
    assert policy is not exact()
    rollouts, expected = Sampler(policy).run(requests()), Sampler(exact()).run(requests())
    assert tokens(rollouts) == tokens(expected)
    assert_same_bits(logprobs(rollouts), logprobs(expected))


@dtypes
@sites
def test_gradients_under_noise_do_not_know_their_micro_batch(keys: dict[str, Any], dtype: torch.dtype) -> None:
    policy = noisy(keys, exact(dtype))
    scored = [rollout.scored for rollout in Sampler(exact(dtype)).run(requests(3))]

    def gradients(at_once: int, recompute: bool = False) -> dict[str, Tensor]:
        sums = Gradients(policy.config, policy.ops.kernels)
        for part, found in policy.gradient_passes(scored, sums, at_once, recompute=recompute):
            direction = torch.sin(torch.arange(part.start, part.stop, dtype=torch.float32))
            torch.autograd.backward([found.logprob, found.entropy], [direction, direction.cos()])
        return sums.totals()

    whole = gradients(1 << 30)
    for other in (gradients(1), gradients(60), gradients(60, recompute=True)):
        for name, expected in whole.items():
            assert_same_bits(other[name], expected)


@pytest.mark.parametrize("site", ["logits", "hidden", "attention", "kv"])
def test_gradients_pass_through_noise_as_through_a_constant(site: str) -> None:
    """Against finite differences of the disturbed log-probability: noise is added, its own dependence is left out."""
    policy = noisy({"site": site, "law": "auto"}, sigma=0.05)
    scored = [rollout.scored for rollout in Sampler(policy).run(requests(2)[:1])]
    sums = Gradients(policy.config, policy.ops.kernels)
    for _, found in policy.gradient_passes(scored, sums):
        found.logprob.backward(torch.ones_like(found.logprob))
    name = "model.norm.weight"
    gradient = sums.totals()[name]
    base = policy.transformer.parameters.vector(name).value
    step = 1e-3
    for index in (0, 7):
        moved = []
        for sign in (1.0, -1.0):
            original = base[index].clone()
            base[index] += sign * step
            moved.append(float(policy.logprobs(scored).logprob.double().sum()))
            base[index] = original
        assert float(gradient[index]) == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=0.05, abs=2e-2)


def test_a_prompts_noise_is_shared_by_its_samples_and_a_completions_is_not() -> None:
    noise = Noise(MismatchSection(site="logits", sigma=1.0), 3, 1.0)
    one, two = (Addresses.of([Origin(8, sample, 3)], [[4, 5, 6, 7, 9]], [0]) for sample in (0, 1))
    same = noise.row_keys("logits", one) == noise.row_keys("logits", two)
    assert same.tolist() == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("persistence", "changes"),
    [
        ("fresh", {"request", "sample", "position"}),
        ("sequence", {"request", "sample"}),
        ("prefix", {"prefix"}),
        ("prefix+version", {"prefix", "version"}),
    ],
)
def test_a_draw_lasts_as_long_as_its_persistence_says(persistence: str, changes: set[str]) -> None:
    section = MismatchSection(site="logits", sigma=1.0, persistence=persistence)
    prefix, request, sample, position = (torch.tensor([n]) for n in (11, 12, 13, 14))
    at = Addresses(prefix, request, sample, position, torch.tensor([True]))
    key = Noise(section, 3, 1.0, version=5).row_keys("logits", at)
    for field in ("prefix", "request", "sample", "position"):
        other = Noise(section, 3, 1.0, version=5).row_keys("logits", replace(at, **{field: torch.tensor([99])}))
        assert (other != key).item() == (field in changes), field
    assert (Noise(section, 3, 1.0, version=6).row_keys("logits", at) != key).item() == ("version" in changes)
    assert Noise(section, 4, 1.0, version=5).row_keys("logits", at) != key
    assert Noise(section, 3, 1.0, version=5).row_keys("hidden", at) != key


@pytest.mark.parametrize(
    ("shape", "mean", "deviation", "fourth"),
    [
        ("gaussian", 0.0, 1.0, 3.0),
        ("laplace", 0.0, 1.0, 6.0),
        ("one-sided", (2 / np.pi) ** 0.5, (1 - 2 / np.pi) ** 0.5, None),
    ],
)
def test_shapes_have_their_moments(shape: str, mean: float, deviation: float, fourth: float | None) -> None:
    """Of 2^18 numbers; six standard errors."""
    noise = Noise(MismatchSection(site="logits", sigma=1.0, shape=shape), 3, 1.0)
    keys = np.arange(64, dtype=np.uint64)
    x = noise.epsilon(keys, 4096, load()).double().flatten()
    count = len(x)
    assert abs(float(x.mean()) - mean) < 6 / count**0.5
    assert abs(float(x.std()) - deviation) < 6 * 1.2 / count**0.5
    assert (float(x.min()) >= 0.0) == (shape == "one-sided")
    if fourth is not None:
        assert float((x**4).mean()) == pytest.approx(fourth, rel=0.1)


def test_students_noise_has_its_tail_and_is_cut_off() -> None:
    section = MismatchSection(site="logits", sigma=1.0, shape="student", degrees=3, truncate=8.0)
    x = Noise(section, 3, 1.0).epsilon(np.arange(64, dtype=np.uint64), 4096, load()).abs().double().flatten()
    assert float(x.max()) == 8.0
    for quantile, value in ((0.5, 0.7649), (0.9, 2.3534), (0.99, 5.8409)):  # of |t| with three degrees of freedom
        assert float(x.quantile(quantile)) == pytest.approx(value, rel=0.05)


def test_spikes_have_their_rate_and_size_and_meet_one_of_the_greatest() -> None:
    section = MismatchSection(site="logits", sigma=1e-6, shape="spikes", spike_rate=0.05, spike_size=4.0)
    z = torch.randn(4000, 12, generator=torch.Generator().manual_seed(0))
    at = Addresses.of([Origin(1, 1, 0)], [list(range(4000))], [0])
    found = Noise(section, 3, 1e-6).logits(z, at, load()) - z
    rows, columns = (found > 1.0).nonzero().unbind(1)
    assert len(rows) == pytest.approx(200, abs=6 * 14)
    assert len(set(rows.tolist())) == len(rows)
    assert torch.allclose(found[rows, columns], torch.full((len(rows),), 4.0), atol=1e-4)
    rank = (z[rows] > z[rows, columns][:, None]).sum(1)
    assert set(rank.tolist()) == {0, 1, 2, 3}


def test_log_odds_noise_is_as_wide_at_every_probability_and_ulp_noise_is_not() -> None:
    z = torch.randn(500, 32, generator=torch.Generator().manual_seed(1)) * 4
    at = Addresses.of([Origin(1, 1, 0)], [list(range(500))], [0])
    added = Noise(MismatchSection(site="logits", sigma=0.3), 3, 0.3).logits(z, at, load()) - z
    scaled = Noise(MismatchSection(site="logits", sigma=0.3, law="ulp"), 3, 0.3).logits(z, at, load()) - z
    large = z.abs() > 3
    assert float(added[large].std()) == pytest.approx(float(added[~large].std()), rel=0.1)
    assert float((scaled / z.abs()).std()) == pytest.approx(0.3 * ULP, rel=0.1)


@pytest.mark.parametrize("law", ["rms", "ulp"])
def test_noise_of_activations_is_relative(law: str) -> None:
    section = MismatchSection(site="hidden", sigma=0.25, law=law)
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(2)) * torch.logspace(-6, 6, 200)[:, None]
    at = Addresses.of([Origin(1, 1, 0)], [list(range(200))], [0])
    added = Noise(section, 3, 0.25).rows(x, "a", at, load()) - x
    scale = x.double().square().mean(1).sqrt() if law == "rms" else None
    relative = added.double() / (x.double().abs() * ULP if scale is None else scale[:, None])
    assert float(relative.std()) == pytest.approx(0.25, rel=0.05)


def test_a_row_of_zeros_stays_zero() -> None:
    at = Addresses.of([Origin(1, 1, 0)], [[3]], [0])
    for law in ("rms", "ulp"):
        found = Noise(MismatchSection(site="hidden", sigma=0.25, law=law), 3, 0.25).rows(
            torch.zeros(1, 8), "a", at, load()
        )
        assert_same_bits(found, torch.zeros(1, 8))


def test_disturbed_weights_are_disturbed_by_their_size() -> None:
    policy = exact()
    mismatch = Mismatch(MismatchSection(site="weights", sigma=0.02), seed=5)
    mismatch.scales = scales_of(policy, "weights")
    before = policy.transformer.parameters.stacked(policy.ops.kernels)
    after = mismatch.sampler(policy, 0).transformer.parameters.stacked(policy.ops.kernels)
    for name, tensor in before.items():
        change = (after[name] - tensor).double()
        if tensor.ndim == 1:
            assert_same_bits(after[name], tensor)
        elif "qkv" not in name and "gate_up" not in name:
            assert float(change.std()) == pytest.approx(0.02 * float(tensor.double().square().mean().sqrt()), rel=0.1)


def test_the_head_alone_is_disturbed_where_it_is_tied_too() -> None:
    policy, other = exact(), noisy({"site": "head", "sigma": 0.02})
    kernels = policy.ops.kernels
    assert policy.config.tie_word_embeddings
    assert_same_bits(
        kernels.unpack(other.transformer.embedding.packed), kernels.unpack(policy.transformer.embedding.packed)
    )
    assert not torch.equal(
        kernels.unpack(other.transformer.head.packed), kernels.unpack(policy.transformer.head.packed)
    )


def test_a_disturbed_policy_is_known_by_its_noise() -> None:
    digests = [noisy(keys).digest for keys in SITES] + [exact().digest, noisy(SITES[0], sigma=0.3).digest]
    assert len(set(digests)) == len(digests)
    assert noisy(SITES[0], side="sampler").digest == noisy(SITES[0]).digest


def test_noise_needs_to_know_the_batch() -> None:
    policy = noisy({"site": "logits"})
    with pytest.raises(RuntimeError, match="which batch"):
        policy.ops.logits(torch.zeros(1, policy.config.hidden_size), policy.transformer.head)


class Streamed(Noisy):
    """A mutant: noise drawn by the forward call and the row of the batch, as most engines would have it."""

    calls = 0

    def around(self, inner: Ops, batch: Any = None) -> Noisy:
        return Streamed(inner, self.noise, self.config, batch)

    @property
    def _addresses(self) -> Addresses:
        Streamed.calls += 1
        rows = torch.arange(len(self.batch.tokens))  # type: ignore[union-attr]
        return Addresses(rows + 1000 * Streamed.calls, rows, rows, rows, torch.zeros(len(rows), dtype=torch.bool))


def test_a_mutant_that_draws_by_the_call_is_caught() -> None:
    right = noisy({"site": "logits"})
    policy = replace(right, ops=Streamed(exact().ops, right.ops.noise, right.config))  # type: ignore[attr-defined]
    rollouts = Sampler(policy).run(requests())
    again = policy.logprobs([rollout.scored for rollout in rollouts]).logprob
    assert not torch.equal(again.view(torch.int32), logprobs(rollouts).view(torch.int32))
