"""The samplers of a loop: one for each dtype that its policies compute in, since pages are of one dtype."""

from __future__ import annotations

import torch

from vexact.model.policy import Policy
from vexact.recipe import SamplingSection
from vexact.rollout.sampler import Sampler


class Samplers:
    """Made when they are needed. An exact run, and most others, needs one."""

    def __init__(self, section: SamplingSection) -> None:
        self.section = section
        self._by_dtype: dict[torch.dtype, Sampler] = {}

    def adopt(self, policy: Policy, laws: bool = False) -> Sampler:
        """The one whose pages fit that policy, sampling from it. laws: whether rollouts keep their law."""
        sampler = self._by_dtype.get(policy.dtype)
        if sampler is None:
            sampler = self._by_dtype[policy.dtype] = new_sampler(policy, self.section)
        sampler.adopt(policy, laws)
        return sampler


def new_sampler(policy: Policy, section: SamplingSection) -> Sampler:
    return Sampler(
        policy,
        section.pages or None,
        tokens_per_step=section.tokens_per_step,
        chunk=section.chunk,
        running=section.running,
    )
