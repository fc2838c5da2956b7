"""Sampler age: which weights a step is sampled with, against a queue and a clock that are simulated outright."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from vexact.loop.folder import RunError
from vexact.loop.versions import Versions, check_memory, largest_lag, most_held, version_bytes
from vexact.model.tiny import tiny_config, tiny_weights
from vexact.recipe import Recipe, SyncSection

STEPS = 60
CASES = [(1, 0), (4, 0), (1, 3), (4, 1), (4, 2), (3, 7), (16, 5), (100, 2)]


@dataclass(frozen=True)
class Named:
    """A policy of which only the step that it belongs to is looked at."""

    step: int


def simulated(every: int, delay: int, syncs: tuple[int, ...] = ()) -> list[int]:
    """The weights that each trained batch was sampled with: an asynchronous run with a queue of `delay` batches.

    A batch is sampled at each step with the sampler's weights, which are renewed each `every` steps, and joins the
    queue; the oldest in the queue is trained. At the start, and behind a sync out of turn, the queue is filled with
    batches of the newest weights.
    """
    trained, queue, sampler, counted = [], deque[int](), 0, 0
    for step in range(STEPS):
        if step == 0 or step in syncs:
            queue, sampler, counted = deque([step] * delay), step, 0
        if counted % every == 0:
            sampler = step
        queue.append(sampler)
        trained.append(queue.popleft())
        counted += 1
    return trained


def run(every: int, delay: int, syncs: tuple[int, ...] = ()) -> tuple[list[int], int]:
    """The same by Versions, and the most policies that were alive at a time."""
    versions, found, alive = Versions(every, delay), [], 0
    for step in range(STEPS):
        if step in syncs:
            versions.sync(step)
        current: Any = Named(step)
        versions.publish(step, current)
        alive = max(alive, len({*versions.held.values(), current}))
        found.append(versions.policy(step).step)  # type: ignore[attr-defined]
    return found, alive


@pytest.mark.parametrize(("every", "delay"), CASES)
def test_a_step_is_sampled_with_the_weights_that_a_queue_would_give_it(every: int, delay: int) -> None:
    found, _ = run(every, delay)
    assert found == simulated(every, delay)
    ages = [step - source for step, source in enumerate(found)][delay + every :]
    assert not ages or (min(ages), max(ages)) == (delay, delay + every - 1)
    recipe = Recipe(sync=SyncSection(every), delay=delay)
    assert max(step - source for step, source in enumerate(found)) <= largest_lag(recipe)


@pytest.mark.parametrize(("every", "delay"), CASES)
def test_a_sync_out_of_turn_throws_away_what_waits_and_counts_anew(every: int, delay: int) -> None:
    syncs = (5, 6, 21)
    found, _ = run(every, delay, syncs)
    assert found == simulated(every, delay, syncs)
    assert all(found[step] == step for step in syncs)


@pytest.mark.parametrize(("every", "delay"), CASES)
def test_the_number_of_versions_that_is_checked_is_the_number_that_is_kept(every: int, delay: int) -> None:
    _, alive = run(every, delay)
    assert alive == min(most_held(every, delay), 2 if every > STEPS else STEPS)


def test_versions_that_do_not_fit_are_refused_before_the_run() -> None:
    config = tiny_config()
    each = version_bytes(config, torch.bfloat16)
    assert each == sum(weight.numel() for weight in tiny_weights(config).values()) * 2
    recipe = Recipe(steps=50, sync=SyncSection(2), delay=5)
    check_memory(recipe, config, torch.bfloat16, 4 * each)
    with pytest.raises(
        RunError, match=rf"keep 4 versions of {each} bytes, {4 * each} together; .* {4 * each - 1} bytes"
    ):
        check_memory(recipe, config, torch.bfloat16, 4 * each - 1)
    check_memory(Recipe(steps=1, sync=SyncSection(2), delay=5), config, torch.bfloat16, 2 * each)
