"""What a study is: arms and seeds over one base recipe, and the claims that its runs decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import yaml

from vexact.errors import BadInput
from vexact.recipe import Recipe, load_recipe

ROLES = ("exact", "null", "arm")
SEED = "seed"


class StudyError(BadInput):
    """A study that cannot be run. One line naming the file and the key."""


@dataclass(frozen=True)
class Arm:
    """One way to train. role: `exact` has no mismatch; `null` differs from it by chance alone, and shows how much that
    is; `arm` is what the study is about.

    beside: the exact arm that it is compared with, by default the study's first: an objective of its own has one.
    overrides: dotted key of the recipe → value. seed_offset: added to each seed, so that data and draws are others
    while a shared start is the same.
    """

    name: str
    role: str = "arm"
    label: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    seed_offset: int = 0
    beside: str = ""


@dataclass(frozen=True)
class ClaimSpec:
    """A claim in words and the rule that decides it: a name in `claims.RULES` and its parameters.

    needs: the id of a claim before it without which this one is inconclusive.
    """

    id: str
    claim: str
    rule: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""

    @property
    def wanting(self) -> dict[str, str]:
        """`needs` as a study file has it: only where there is one."""
        return {"needs": self.needs} if self.needs else {}


@dataclass(frozen=True)
class Rollouts:
    """Which rollouts stay on the disk: of the `first` seed of each arm, of `all` seeds or of `none`; those of the last
    step, and with `every` above 0 also of every so many steps."""

    seeds: str = "first"
    every: int = 0

    def of(self, index: int) -> bool:
        """Whether the seed at that position keeps any."""
        return self.seeds == "all" or (self.seeds == "first" and index == 0)


@dataclass(frozen=True)
class Study:
    """A study file, read. file: where it came from, for messages. base: the recipe's file, or its keys.

    common: overrides of all arms. warm_start: `shared`, one start for all seeds, or `per_seed`. tail: how many of the
    last evaluations make the endpoint `late_*`. keep_models: whether each run keeps its trained weights.
    """

    file: str
    name: str
    title: str
    question: str
    base: Path | Mapping[str, Any]
    common: Mapping[str, Any]
    arms: tuple[Arm, ...]
    claims: tuple[ClaimSpec, ...]
    seeds: tuple[int, ...]
    warm_start: str = "shared"
    rollouts: Rollouts = field(default_factory=Rollouts)
    keep_models: bool = False
    tail: int = 5

    def recipe(self, arm: Arm | None = None, seed: int | None = None) -> Recipe:
        """The recipe of an arm, by default that of none: base and common alone. Raises StudyError."""
        keys = {**self.common, **({} if arm is None else arm.overrides)}
        if seed is not None:
            keys[SEED] = seed + (0 if arm is None else arm.seed_offset)
        where = self.file if arm is None else f"{self.file}: arm {arm.name}"
        try:
            if isinstance(self.base, Path):
                return load_recipe(self.base, texts(keys))
            return load_recipe(None, texts({**self.base, **keys}))
        except BadInput as error:
            raise StudyError(f"{where}: {str(error).removeprefix('--')}") from None

    def matching(self, patterns: str) -> list[Arm]:
        """The arms whose names match one of the patterns (`*`, `?`), which commas separate; in the patterns' order."""
        found: list[Arm] = []
        for pattern in split(patterns):
            found += [arm for arm in self.arms if fnmatchcase(arm.name, pattern) and arm not in found]
        return found

    def reference(self, arm: Arm) -> str:
        return reference_of(arm, self.arms)

    def with_common(self, overrides: Mapping[str, Any]) -> Study:
        """The same study with further overrides of all arms."""
        return replace(self, common={**self.common, **overrides})

    def to_yaml(self) -> str:
        """The study with its grids expanded and its recipe resolved."""
        base = {key: value for key, value in asdict(self.recipe()).items() if key != "run"}
        content = {
            "title": self.title,
            "question": self.question,
            "recipe": _plain(base),
            "warm_start": self.warm_start,
            "seeds": list(self.seeds),
            "rollouts": asdict(self.rollouts),
            "keep_models": self.keep_models,
            "tail": self.tail,
            "arms": [
                {**asdict(arm), "label": arm.label or arm.name, "overrides": dict(arm.overrides)} for arm in self.arms
            ],
            "claims": [
                {"id": c.id, "claim": c.claim, "rule": c.rule, **_plain(dict(c.parameters)), **c.wanting}
                for c in self.claims
            ],
        }
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)


class Placed(Protocol):
    """What is known of an arm before and behind its runs alike."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def beside(self) -> str: ...


def reference_of(arm: Placed, arms: Iterable[Placed]) -> str:
    """The exact arm that an arm is compared with, by name; an exact one with itself; empty where there is none."""
    if arm.role == "exact":
        return arm.name
    return arm.beside or next((each.name for each in arms if each.role == "exact"), "")


def split(patterns: str) -> list[str]:
    """The parts between commas."""
    return [part.strip() for part in patterns.split(",") if part.strip()]


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Values as a command line would give them."""
    dump = lambda value: yaml.safe_dump(value, default_flow_style=True, width=10**6)  # noqa: E731
    return {key: dump(value).removesuffix("...\n").strip() for key, value in values.items()}


def _plain(value: Any) -> Any:
    """With lists for tuples: YAML knows no others."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
