"""Which weights a step is sampled with, and for how long they are kept.

An asynchronous run, simulated in one process. The sampler takes the trainer's weights every K steps (`sync.every`), and
what it samples is trained D steps later (`delay`). So step t is sampled with the weights that step

    source(t) = o + K·⌊max(0, t − D − o) / K⌋

began with, where o is the step of the last sync out of turn, 0 before any. Such a sync, which a remedy asks for, throws
away what waits, and counting begins anew. The age t − source(t) is D with K = 1, and a sawtooth between D and D + K − 1
with K > 1. Rollouts are drawn when they are needed and not when an asynchronous sampler would have drawn them: with
addressed draws that is the same in every bit, and no queue is part of a run's state. A version is kept until no step to
come is sampled with it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import torch

from vexact.loop.folder import RunError
from vexact.model.checkpoint import shapes
from vexact.model.config import ModelConfig
from vexact.model.policy import Policy
from vexact.model.remedy import Remedy
from vexact.recipe import Recipe
from vexact.study.causes.registry import STALE


class Versions:
    """The policies of steps that are still to be sampled with.

    State of a run: `origin`, and `held`, the policy that each of these steps began with. spare: for how many steps a
    policy is kept after the last one that it sampled.
    """

    def __init__(self, every: int, delay: int, spare: int = 0) -> None:
        self.every, self.delay, self.spare = every, delay, spare
        self.origin = 0
        self.held: dict[int, Policy] = {}

    def source(self, step: int) -> int:
        """The step whose first weights that step is sampled with."""
        waited = max(0, step - self.delay - self.origin)
        return self.origin + waited // self.every * self.every

    def publish(self, step: int, policy: Policy) -> None:
        """The trainer begins that step with this policy. What no step from here on needs is let go."""
        if (step - self.origin) % self.every == 0:
            self.held[step] = policy
        oldest = self.source(step - self.spare)
        self.held = {source: kept for source, kept in self.held.items() if source >= oldest}

    def sync(self, step: int) -> None:
        """Sample from that step on with the weights it begins with, which are published next."""
        self.origin = step
        self.held = {}

    def policies(self) -> dict[str, Policy]:
        """What is held, by names for a state on disk."""
        return {str(step): policy for step, policy in self.held.items()}

    def restore(self, origin: int, policies: Mapping[str, Policy]) -> None:
        """Hold what `policies` named."""
        self.origin = origin
        self.held = {int(name): policy for name, policy in policies.items()}

    def policy(self, step: int) -> Policy:
        """What a step is sampled with. The step is the one that was published last."""
        return self.held[self.source(step)]

    def before(self, step: int) -> Policy:
        """What the step before was sampled with, if that is still kept; else the same as this one. A sync out of turn
        leaves nothing older."""
        return self.held.get(self.source(step - 1), self.policy(step))


def most_held(every: int, delay: int) -> int:
    """Versions that are kept at the same time at most, the trainer's own among them."""
    oldest = delay + every - 1  # what lies behind the trainer is a source each `every` steps, from the oldest on
    return -(-oldest // every) + 1


def largest_lag(recipe: Recipe) -> int:
    """Versions that a rollout may be older than the trainer."""
    return recipe.delay + recipe.sync.every - 1


def spare_of(recipe: Recipe) -> int:
    """Steps for which a mismatch needs what sampled before."""
    return int(recipe.mismatch.cause in STALE)


def check_memory(recipe: Recipe, config: ModelConfig, dtype: torch.dtype, memory: int) -> None:
    """Raises RunError where the versions that are kept do not fit into that many bytes."""
    count = min(most_held(recipe.sync.every, recipe.delay) + spare_of(recipe), recipe.steps + 1)
    each = version_bytes(config, dtype)
    if count > 1 and count * each > memory:
        raise RunError(
            f"sync.every = {recipe.sync.every} and delay = {recipe.delay} keep {count} versions of {each} bytes, "
            f"{count * each} together; there is memory of {memory} bytes"
        )


def check_accept(recipe: Recipe, remedy: Remedy | None) -> None:
    """Raises RunError where steps may be taken back and either no fresh batch could say so, or no state would hold what
    there is to go back to."""
    if remedy is None or not remedy.can_undo:
        return
    section = recipe.loss.remedy
    named = f"accept = {section.accept}" if section.accept != "off" else f"name = {section.name}"
    needs = {
        "sync.every": (recipe.sync.every, 1),
        "delay": (recipe.delay, 0),
        "checkpoint.every": (recipe.checkpoint.every, 0),
    }
    for key, (value, needed) in needs.items():
        if value != needed:
            raise RunError(f"loss.remedy.{named} needs {key} = {needed}, not {value}")


def version_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of the weights of one version in the dtype that they are computed in."""
    return sum(math.prod(shape) for shape in shapes(config).values()) * dtype.itemsize


def memory_of(device: torch.device) -> int:
    """Bytes that a device has, whoever uses them."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
