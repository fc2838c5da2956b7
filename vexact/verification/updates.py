"""The checks of the backward and of the weights that move: micro-batches, arrival, an optimizer step, a publish."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial, reduce
from operator import add

import torch
from torch import Tensor

from vexact.testing import Comparison, compare_bits
from vexact.verification.checks import (
    FAINT,
    Planned,
    absence,
    computed_by,
    flush_denormal,
    implementation_lines,
    recorded,
    same_rollouts,
    subnormal_line,
    thread_count,
)
from vexact.verification.ranks import on_ranks
from vexact.verification.result import GRADIENTS, RANKS, THREADS
from vexact.verification.subject import ALL, Subject
from vexact_kernels import Kernels


def update_plan(kernels: Kernels, small: bool) -> list[Planned]:
    """The lines about gradients and updates."""
    no_cpu = absence(kernels)
    return [
        Planned("gradients, micro-batches of one", GRADIENTS, partial(gradients, tokens_at_once=1)),
        Planned("gradients, micro-batches of 70 tokens", GRADIENTS, partial(gradients, tokens_at_once=70)),
        *(
            Planned(
                f"gradients, threads {n}", f"gradients, threads {n}", partial(gradients_on_threads, count=n), no_cpu
            )
            for n in THREADS
        ),
        subnormal_line(kernels, "gradients", flushed_gradients, faint_gradients),
        *implementation_lines(kernels, small, "gradients, instruction sets", gradients_on, "gradients, "),
        Planned("gradients, layers computed again", "gradients, recomputed layers", recomputed),
        *rank_lines(kernels, small),
        Planned("after an optimizer step and a publish", "step and publish", after_publish),
        Planned("shuffled arrival, then a step", "gradients, shuffled arrival", shuffled_arrival),
    ]


def gradients(subject: Subject, tokens_at_once: int) -> Comparison:
    """Every gradient tensor, against all rollouts in one micro-batch. Nothing is compared where nothing was sampled."""
    if not subject.trained:
        return Comparison()
    return same_tensors(subject.gradients, subject.gradients_of(subject.trained, tokens_at_once))


def rank_lines(kernels: Kernels, small: bool) -> list[Planned]:
    """Lanes one by one, added outside the kernels. Whole steps as well where a CPU computes a small model: ranks are
    threads in here, each with gradients of its own."""
    kind = "gradients, ranks"
    lines = [Planned("gradients, a lane at a time as on 8 ranks", kind, lane_by_lane)]
    if small and not absence(kernels):
        lines += [Planned(f"a step on {size} ranks", kind, partial(step_on_ranks, size=size)) for size in RANKS]
    return lines


def recomputed(subject: Subject) -> Comparison:
    """Layers run again on the way back instead of being kept."""
    if not subject.trained:
        return Comparison()
    return same_tensors(subject.gradients, subject.gradients_of(subject.trained, 70, recompute=True))


def lane_by_lane(subject: Subject) -> Comparison:
    if not subject.trained:
        return Comparison()
    return same_tensors(subject.gradients, subject.gradients_by_lane(subject.trained))


def step_on_ranks(subject: Subject, size: int) -> Comparison:
    """Moments and every rank's weights after a step that ranks share."""
    order = range(len(subject.few))
    in_order = subject.stepped
    if in_order is None:
        return Comparison()
    found = Comparison()
    alone = in_order.policy.transformer.parameters.stacked(subject.kernels)
    for each in on_ranks(size, lambda ranks: subject.stepped_on(order, 4096, ranks)):
        if each is None:
            return Comparison()
        moments = {name: in_order.moments[name] for name in each.moments}
        found += same_tensors(moments, each.moments)
        found += same_tensors(alone, each.policy.transformer.parameters.stacked(subject.kernels))
    return found


def gradients_on_threads(subject: Subject, count: int) -> Comparison:
    with thread_count(count):
        return gradients(subject, ALL)


def flushed_gradients(subject: Subject) -> Comparison:
    """A direction so faint that gradients are subnormal."""
    sequences = subject.trained[:2]
    if not sequences:
        return Comparison()
    faint = subject.direction(sequences, FAINT)
    expected = subject.gradients_of(sequences, ALL, faint)
    with flush_denormal():
        found = subject.gradients_of(sequences, ALL, faint)
    return same_tensors(expected, found)


def faint_gradients(subject: Subject, other: Kernels) -> Comparison:
    """The same direction, computed by another implementation."""
    sequences = subject.trained[:2]
    if not sequences:
        return Comparison()
    faint = subject.direction(sequences, FAINT)
    policy = computed_by(subject, other)
    return same_tensors(
        subject.gradients_of(sequences, ALL, faint), subject.gradients_of(sequences, ALL, faint, policy)
    )


def gradients_on(subject: Subject, other: Kernels) -> Comparison:
    """Another implementation; of the reference, a very short step."""
    if not subject.trained:
        return Comparison()
    policy = computed_by(subject, other)
    if other.name != "reference":
        return same_tensors(subject.gradients, subject.gradients_of(subject.trained, ALL, policy=policy))
    short = min(subject.trained, key=lambda scored: len(scored.tokens))
    return same_tensors(subject.gradients_of([short], ALL), subject.gradients_of([short], ALL, policy=policy))


def after_publish(subject: Subject) -> Comparison:
    """The sampler adopts the trainer's next version; what it samples then is what that version scores."""
    if subject.stepped is None:
        return Comparison()
    trained = subject.stepped.policy
    sampler = subject.sampler(pages=64 * len(subject.few_requests))
    before = sampler.run(subject.few_requests)
    sampler.adopt(subject.published(trained))
    after = sampler.run(subject.few_requests)
    versions = compare_bits(
        torch.tensor([rollout.version for rollout in after]), torch.full((len(after),), trained.version), "version"
    )
    found = versions if versions.differ else compare_bits(recorded(after), subject.rescore(after, policy=trained))
    return same_rollouts(subject.few, before) + found


def shuffled_arrival(subject: Subject) -> Comparison:
    """Rollouts handed to the trainer in another order, in other micro-batches: moments and weights after the step."""
    in_order = subject.stepped
    order = random.Random(4).sample(range(len(subject.few)), len(subject.few))
    shuffled = subject.stepped_on(order, tokens_at_once=100)
    if in_order is None or shuffled is None:
        return Comparison()
    moments = same_tensors(in_order.moments, shuffled.moments)
    weights = (each.policy.transformer.parameters.stacked(subject.kernels) for each in (in_order, shuffled))
    return moments + same_tensors(*weights)


def same_tensors(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Comparison:
    return reduce(add, (compare_bits(left[name], right[name], where=name) for name in left), Comparison())
