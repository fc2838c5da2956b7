"""What claims are judged on: each arm's endpoints, a value a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vexact.experiments.endpoints import STEPS
from vexact.experiments.study import reference_of


@dataclass(frozen=True)
class ArmEvidence:
    """Of one arm. endpoints: name → a value for each finished run; seeds and fingerprints (sha256 of the weights at the
    end) in the same order. overrides: dotted keys. beside: the exact arm that it is compared with, by default the
    first."""

    name: str
    role: str
    seeds: Sequence[int]
    endpoints: Mapping[str, Sequence[float | None]]
    fingerprints: Sequence[str] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    beside: str = ""

    def values(self, endpoint: str) -> list[float]:
        """Of the runs that have one; for a step, the runs that did not reach it count as infinitely late."""
        return [value for value in self.by_run(endpoint) if not math.isnan(value)]

    def by_run(self, endpoint: str) -> list[float]:
        """Of each run: NaN where it has none. A step that was not reached is infinite, unless what tells so was not
        measured."""
        given = self.endpoints.get(endpoint, [None] * len(self.seeds))
        if endpoint not in STEPS or endpoint not in self.endpoints:
            return [math.nan if value is None else float(value) for value in given]
        teller = self.endpoints.get(STEPS[endpoint], [0.0] * len(given))
        return [
            float(value) if value is not None else math.nan if told is None else math.inf
            for value, told in zip(given, teller, strict=True)
        ]


@dataclass(frozen=True)
class Evidence:
    """Of a study: arms by name."""

    arms: Mapping[str, ArmEvidence]

    def reference(self, arm: ArmEvidence) -> str:
        return reference_of(arm, self.arms.values())

    def beside(self, reference: str, role: str) -> list[ArmEvidence]:
        """The arms of a role that are compared with an exact arm, itself among those of role `exact`."""
        return [arm for arm in self.arms.values() if arm.role == role and self.reference(arm) == reference]
