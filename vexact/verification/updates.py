"""The checks of the backward and of the weights that move: micro-batches, arrival, an optimizer step, a publish."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from operator import add

import torch
from torch import Tensor

from vexact.recipe import OptimizerSection
from vexact.rollout.sampler import Sampler
from vexact.testing import Comparison, compare_bits
from vexact.training.trainer import Trainer
from vexact.verification.checks import (
    FAINT,
    Planned,
    computed_by,
    flush_denormal,
    others,
    recorded,
    thread_count,
)
from vexact.verification.subject import ALL, Subject

LEARNING_RATE = 1e-3  # large enough that every weight moves, in bfloat16 as well


def update_plan(kernels: str, small: bool) -> list[Planned]:
    """The lines about gradients and updates, the required one first."""
    return [
        Planned("gradients, micro-batches of one", "gradients", partial(gradients, tokens_at_once=1), True),
        Planned("gradients, micro-batches of 70 tokens", "other", partial(gradients, tokens_at_once=70)),
        Planned("gradients, threads 1", "other", partial(gradients_on_threads, count=1)),
        Planned("flush-denormal: subnormal gradients", "other", flushed_gradients),
        *(
            Planned(f"gradients, instruction set {isa}", "other", partial(gradients_on, isa=isa))
            for isa in others(kernels, small)
        ),
        Planned("after an optimizer step and a publish", "other", after_publish),
        Planned("shuffled arrival, then a step", "other", shuffled_arrival),
    ]


def gradients(subject: Subject, tokens_at_once: int) -> Comparison:
    """Every gradient tensor, against all rollouts in one micro-batch. Nothing is compared where nothing was sampled."""
    if not subject.trained:
        return Comparison()
    return same_tensors(subject.gradients, subject.gradients_of(subject.trained, tokens_at_once))


def gradients_on_threads(subject: Subject, count: int) -> Comparison:
    with thread_count(count):
        return gradients(subject, ALL)


def flushed_gradients(subject: Subject) -> Comparison:
    """A direction so faint that gradients are subnormal."""
    sequences = subject.trained[:2]
    faint = subject.direction(sequences, FAINT)
    expected = subject.gradients_of(sequences, ALL, faint)
    with flush_denormal():
        found = subject.gradients_of(sequences, ALL, faint)
    return same_tensors(expected, found)


def gradients_on(subject: Subject, isa: str) -> Comparison:
    """Another implementation; of the reference, a very short step."""
    policy = computed_by(subject.policy, isa)
    if isa != "reference":
        return same_tensors(subject.gradients, subject.gradients_of(subject.trained, ALL, policy=policy))
    short = min(subject.trained, key=lambda scored: len(scored.tokens))
    return same_tensors(subject.gradients_of([short], ALL), subject.gradients_of([short], ALL, policy=policy))


def after_publish(subject: Subject) -> Comparison:
    """The sampler adopts the trainer's next version; what it samples then is what that version scores."""
    sampler = Sampler(subject.sampling, pages=64 * len(subject.few_requests))
    before = sampler.run(subject.few_requests)
    trainer = _trainer(subject)
    trainer.step(before, _advantages(len(before)))
    if trainer.policy.version != subject.policy.version + 1:
        return Comparison()  # nothing to train on, or a gradient that is not finite
    sampler.adopt(subject.published(trainer.policy))
    after = sampler.run(subject.few_requests)
    versions = compare_bits(
        torch.tensor([rollout.version for rollout in after]),
        torch.full((len(after),), trainer.policy.version),
        where="version",
    )
    found = compare_bits(recorded(after), subject.rescore(after, policy=trainer.policy))
    return (versions if versions.differ else Comparison()) + found


def shuffled_arrival(subject: Subject) -> Comparison:
    """Rollouts handed to the trainer in another order, in other micro-batches: the weights after the step."""
    order = random.Random(4).sample(range(len(subject.few)), len(subject.few))
    in_order = _weights_after(subject, range(len(order)), tokens_at_once=4096)
    return same_tensors(in_order, _weights_after(subject, order, tokens_at_once=100))


def _weights_after(subject: Subject, order: Sequence[int], tokens_at_once: int) -> dict[str, Tensor]:
    advantages = _advantages(len(order))
    trainer = _trainer(subject, tokens_at_once)
    trainer.step([subject.few[i] for i in order], advantages[list(order)])
    return trainer.policy.transformer.parameters.stacked(subject.kernels)


def same_tensors(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Comparison:
    return reduce(add, (compare_bits(left[name], right[name], where=name) for name in left), Comparison())


def _advantages(count: int) -> Tensor:
    return torch.tensor([(-1.0) ** i * (1 + i % 3) / 2 for i in range(count)])


def _trainer(subject: Subject, tokens_at_once: int = 4096) -> Trainer:
    subject.forget_gradients()
    stacked = subject.policy.transformer.parameters.stacked(subject.kernels)
    masters = {name: tensor.to(torch.float32, copy=True) for name, tensor in stacked.items()}
    section = OptimizerSection(lr=LEARNING_RATE, tokens_at_once=tokens_at_once)
    return Trainer(subject.policy, masters, optimizer=section)
