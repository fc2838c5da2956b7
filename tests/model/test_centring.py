"""A centred gradient is that of autograd on the surrogate in float64, and knows neither its parts nor its batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers import assert_same_bits
from made import SMALL
from vexact.model import ops
from vexact.model.centring import Centres
from vexact.model.gradients import Gradients
from vexact.model.ops import Ops
from vexact.model.parameters import HEAD, Matrix, stack
from vexact.model.policy import Policy, Scored
from vexact.model.remedy import Centring
from vexact.model.tiny import tiny_config, tiny_weights
from vexact.verification.checks import thread_count
from vexact_kernels import load

KERNELS = load()
CONFIG = tiny_config("qwen3", **SMALL, tie_word_embeddings=False)
SEQUENCES = [
    Scored([3, 1, 4, 1, 5, 9, 2], 2, 0.7), Scored([6, 5, 3, 5], 1), Scored([8, 9, 7, 9, 3, 2, 3, 8, 4], 4, 1.3),
    Scored([2, 7], 1),
]  # fmt: skip
ROWS = sum(each.rows for each in SEQUENCES)
CENTRINGS = [
    Centring(), Centring("lag", "none"), Centring("lag", "truncate", 0.9, 1.1), Centring("lag", "ppo", 0.9, 1.1),
    Centring("sampler", "none"), Centring("sampler", "truncate", 0.0, 1.05), Centring("sampler", "ppo", 0.9, 1.1),
]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with thread_count(1):
        yield


class Tilted(Ops):
    """A sampler whose logits are not the trainer's."""

    def logits(self, hidden: Tensor, head: Matrix, rows: Tensor | None = None) -> Tensor:
        assert rows is not None and len(rows) == len(hidden)  # noise needs to know where it is
        logits = super().logits(hidden, head, rows)
        return logits + 0.5 * torch.sin(torch.arange(logits.shape[1], dtype=torch.float32))


def policy(seed: int, scale: float = 0.1) -> Policy:
    """Of weights that another seed moves a little."""
    generator, weights = torch.Generator().manual_seed(seed), tiny_weights(CONFIG)
    moved = {name: w + scale * w.std() * torch.randn(w.shape, generator=generator) if seed else w
             for name, w in weights.items()}  # fmt: skip
    return Policy.build(CONFIG, lambda name: stack(CONFIG, moved, name), KERNELS, torch.float32)


TRAINER, EXACT = policy(0), policy(1)
SAMPLER = replace(EXACT, ops=Tilted(KERNELS))
GIVEN = torch.randn(ROWS, generator=torch.Generator().manual_seed(5))  # gradients of log-probabilities, both signs


def gradient(centring: Centring, at_once: int = 1000, sampler: Policy = SAMPLER) -> tuple[dict[str, Tensor], Tensor]:
    """Of every stack, and w_a of every row."""
    sums, centres = Gradients(CONFIG, KERNELS), Centres(centring, sampler, EXACT)
    weights = []
    for rows, result in TRAINER.gradient_passes(SEQUENCES, sums, at_once, centres=centres):
        result.logprob.backward(GIVEN[rows])
        assert centres.last is not None
        weights.append(centres.last.weights)
    return {name: total.clone() for name, total in sums.totals().items()}, torch.cat(weights)


def exact(centring: Centring, signed: bool = True) -> tuple[Tensor, Tensor]:
    """The gradient of the head, and w_a, by autograd in float64 on logits that the policies themselves give."""
    temperature = torch.cat([torch.full((each.rows,), each.temperature) for each in SEQUENCES]).double()[:, None]
    ids = torch.cat([torch.tensor(each.tokens[each.first :]) for each in SEQUENCES])[:, None]
    hidden = hidden_of(TRAINER)
    weight = KERNELS.unpack(TRAINER.transformer.head.packed).double().requires_grad_()
    tilt = 0.5 * torch.sin(torch.arange(CONFIG.vocab_size, dtype=torch.float32)).double()
    other = hidden_of(EXACT) @ KERNELS.unpack(EXACT.transformer.head.packed).double().T
    policy = (hidden @ weight.T / temperature).log_softmax(-1)
    base = (other / temperature).log_softmax(-1)
    sampler = ((other + tilt) / temperature).log_softmax(-1)
    w = torch.ones_like(base)
    if centring.base != "none":
        w = (policy.detach() - (base if centring.base == "lag" else sampler)).exp()
        w = weighed(w, centring, GIVEN.double()[:, None] if signed else torch.ones(ROWS, 1))
    w_a = w.gather(1, ids)
    surrogate = w_a * policy.gather(1, ids) - (sampler.exp() * w * policy).sum(-1, keepdim=True)
    (surrogate[:, 0] * GIVEN.double()).sum().backward()
    assert weight.grad is not None
    return weight.grad, w_a[:, 0]


def weighed(w: Tensor, centring: Centring, given: Tensor) -> Tensor:
    """A > 0 where the gradient that the loss has for log π is below 0."""
    if centring.clip == "truncate":
        return w.clamp(centring.low, centring.high)
    if centring.clip == "ppo":
        return torch.where(((given < 0) & (w > centring.high)) | ((given > 0) & (w < centring.low)), 0.0, w)
    return w


def hidden_of(policy: Policy) -> Tensor:
    """float64 [rows, D] of what is scored."""
    _, hidden, targets = policy.hidden(SEQUENCES, policy.ops, None)
    return hidden[targets.rows].double()


@pytest.mark.parametrize("centring", CENTRINGS, ids=str)
def test_the_gradient_is_that_of_the_surrogate(centring: Centring) -> None:
    found, weights = gradient(centring)
    expected, w_a = exact(centring)
    largest = expected.abs().max()
    assert (found[HEAD].double() - expected).abs().max() < 1e-5 * largest
    assert (weights.double() - w_a).abs().max() < 1e-5 * w_a.max()
    others = [exact(other)[0] for other in CENTRINGS if other != centring]
    assert min(float((found[HEAD].double() - other).abs().max() / largest) for other in others) > 1e-3  # the mutants


def test_a_clip_of_ppo_that_forgot_the_sign_would_be_seen() -> None:
    centring = Centring("lag", "ppo", 0.9, 1.1)
    difference = (gradient(centring)[0][HEAD].double() - exact(centring, signed=False)[0]).abs().max()
    assert difference > 1e-2 * exact(centring)[0].abs().max()


@pytest.mark.parametrize("centring", CENTRINGS, ids=str)
def test_it_does_not_know_how_it_was_cut(centring: Centring, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, weights = gradient(centring)
    cuts = [gradient(centring, at_once) for at_once in (1, 9)]
    for module in ("vexact.model.recording", "vexact.model.ops"):
        monkeypatch.setattr(f"{module}.token_parts", lambda rows, vocabulary: [slice(i, i + 1) for i in range(rows)])
    cuts.append(gradient(centring))
    for found, w_a in cuts:
        assert_same_bits(w_a, weights)
        for name, stacked in expected.items():
            assert_same_bits(found[name], stacked, name)


def test_on_policy_it_is_the_gradient_without_centring_but_for_its_mean() -> None:
    """With q = p the mean score is 0 but for rounding: centring changes nothing that matters."""
    found, weights = gradient(Centring("sampler", "none"), sampler=TRAINER)
    sums = Gradients(CONFIG, KERNELS)
    for rows, result in TRAINER.gradient_passes(SEQUENCES, sums, 1000):
        result.logprob.backward(GIVEN[rows])
    plain = sums.totals()
    assert_same_bits(weights, torch.ones(ROWS))
    for name, stacked in found.items():
        assert (stacked - plain[name]).abs().max() < 1e-5 * plain[name].abs().max()
    away, _ = gradient(Centring())
    assert (away[HEAD] - plain[HEAD]).abs().max() > 1e-2 * plain[HEAD].abs().max()


def test_an_entropy_bonus_and_a_missing_policy_are_refused() -> None:
    centres = Centres(Centring(), SAMPLER)
    for _, result in TRAINER.gradient_passes(SEQUENCES, Gradients(CONFIG, KERNELS), centres=centres):
        with pytest.raises(RuntimeError, match="no centred gradient"):
            (result.logprob + result.entropy).backward(GIVEN)
    for _, result in TRAINER.gradient_passes(
        SEQUENCES, Gradients(CONFIG, KERNELS), centres=Centres(Centring("lag"), SAMPLER)
    ):
        with pytest.raises(RuntimeError, match="needs the exact policy"):
            result.logprob.backward(GIVEN)


def test_parts_are_small() -> None:
    """What the tests above cut by hand is cut by the size of the vocabulary."""
    assert len(ops.token_parts(10, ops.LOGITS_AT_ONCE)) == 10
