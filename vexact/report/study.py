"""What a report is about: arms, each a few runs that differ in nothing but the seed, and what was claimed of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vexact.report.curve import Band, Curve

EXACT, NULL, ARM = "exact", "null", "arm"
FEW = 8  # arms that can all have a colour
VERDICTS = ("confirmed here", "opposite", "inconclusive", "not testable")


@dataclass(frozen=True)
class SeedRun:
    """A run of an arm. folder: where its rollouts are, if it has one."""

    seed: int
    curves: Mapping[str, Curve]
    folder: Path | None = None

    def curve(self, names: Sequence[str]) -> Curve:
        """The first of these metrics that it has; empty where it has none."""
        return next((self.curves[name] for name in names if name in self.curves), Curve())


@dataclass(frozen=True)
class Arm:
    """settings: what sets it apart, by dotted key of a recipe. endpoints: a value a run, by name. beside: the exact arm
    that it is compared with, by default the study's first."""

    name: str
    role: str
    label: str
    settings: Mapping[str, Any]
    runs: tuple[SeedRun, ...]
    endpoints: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    beside: str = ""

    def curves(self, names: Sequence[str]) -> list[Curve]:
        """Of each run that has one of these metrics."""
        return [curve for curve in (run.curve(names) for run in self.runs) if curve.steps]

    def band(self, names: Sequence[str]) -> Band:
        return Band.of(self.curves(names))

    def ends(self, names: Sequence[str]) -> list[float]:
        return [curve.end() for curve in self.curves(names)]


@dataclass(frozen=True)
class Claim:
    id: str
    claim: str
    rule: str
    verdict: str
    numbers: Any


@dataclass(frozen=True)
class Group:
    """Arms that are compared with one exact arm, by their place in the study, itself not among them."""

    exact: Arm | None
    arms: tuple[int, ...]


@dataclass(frozen=True)
class Study:
    """notes: what a reader must know of the data, a line each."""

    title: str
    question: str
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    distributions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def many(self) -> bool:
        """Whether not every arm can have a colour of its own; null arms need none."""
        return sum(arm.role != NULL for arm in self.arms) > FEW

    def of(self, role: str) -> list[Arm]:
        return [arm for arm in self.arms if arm.role == role]

    @property
    def exact(self) -> Arm | None:
        """The first: what arms stand beside that say nothing else."""
        return next(iter(self.of(EXACT)), None)

    def reference(self, arm: Arm) -> Arm | None:
        """The exact arm that an arm is compared with; an exact one stands for itself."""
        if arm.role == EXACT:
            return arm
        return next((each for each in self.of(EXACT) if each.name == arm.beside), self.exact)

    @property
    def chance(self) -> list[int]:
        """The places of the null arms beside the first exact arm: a grey band stands for them."""
        beside = [(i, arm) for i, arm in enumerate(self.arms) if arm.role == NULL]
        return [i for i, arm in beside if self.reference(arm) is self.exact]

    @property
    def groups(self) -> list[Group]:
        """An exact arm each, and the places of the arms beside it; one without an exact arm where there is none."""
        exact: list[Arm | None] = [*self.of(EXACT)] or [None]
        beside = [(i, self.reference(arm)) for i, arm in enumerate(self.arms) if arm.role != EXACT]
        found = [Group(each, tuple(i for i, reference in beside if reference is each)) for each in exact]
        return [group for group in found if group.arms] or found[:1]

    def titled(self, words: str, group: Group) -> str:
        """What a chart of one group is called: of several groups each names its exact arm."""
        return words if group.exact is None or len(self.groups) == 1 else f"{words}: {group.exact.label}"
