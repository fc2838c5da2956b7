"""How old the weights are that the sampler holds."""

from __future__ import annotations

from dataclasses import dataclass

from vexact.recipe.values import number


@dataclass(frozen=True)
class SyncSection:
    """When the sampler takes the trainer's weights. Between two of these it samples with ever older ones: a sawtooth.

    vexact/loop/versions.py has the rule, together with `delay`.
    """

    every: int = number(1, at_least=1)  # steps; 1: always the newest
