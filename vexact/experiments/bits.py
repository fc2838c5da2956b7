"""Rules about bits and values that are there or not: equality is no matter of luck, so one run is enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vexact.experiments.endpoints import COMPARED, NOT_FINITE, OF_TOKENS
from vexact.experiments.evidence import ArmEvidence, Evidence
from vexact.experiments.gaps import chosen, finite
from vexact.experiments.verdict import CONFIRMED, INCONCLUSIVE, NOT_TESTABLE, OPPOSITE, Verdict


@dataclass(frozen=True)
class EqualBits:
    """Whether runs end with the very weights of another arm's, seed by seed."""

    arms: str
    against: str
    expect: str = "equal"  # or `different`, for a control

    def text(self) -> str:
        return f"At equal seeds every run's weights at the end are {self.expect} in bits, compared with {self.against}."

    def judge(self, evidence: Evidence) -> Verdict:
        pairs = [
            (f"{arm.name}, seed {seed}", print_ == theirs[seed])
            for arm in chosen(evidence, self.arms)
            for other in chosen(evidence, self.against)
            for theirs in [dict(zip(other.seeds, other.fingerprints, strict=True))]
            for seed, print_ in zip(arm.seeds, arm.fingerprints, strict=True)
            if seed in theirs
        ]
        if not pairs:
            return Verdict(NOT_TESTABLE, {"compared": 0})
        equal = [name for name, same in pairs if same]
        wanted = len(equal) == len(pairs) if self.expect == "equal" else not equal
        numbers = {"compared": len(pairs), "equal": len(equal), "different": [n for n, same in pairs if not same][:8]}
        return Verdict(CONFIRMED if wanted else OPPOSITE, numbers)


@dataclass(frozen=True)
class Always:
    """Whether an endpoint has one value in every run (`expect: all`), or in none, as a control must (`none`).

    An endpoint of compared tokens says nothing of a run that compared none, and a difference that is no number is none
    of the values that are asked for, nor one that a control may show.
    """

    arms: str
    endpoint: str
    value: float = 0.0
    expect: str = "all"

    def text(self) -> str:
        said = f"{self.endpoint} is {self.value:g} in {'every run' if self.expect == 'all' else 'no run'}"
        if self.endpoint not in OF_TOKENS:
            return f"{said}."
        return f"{said}, tokens were compared in each, and each difference is a number."

    def judge(self, evidence: Evidence) -> Verdict:
        arms = chosen(evidence, self.arms)
        found = [each for arm in arms for each in self._compared(arm)] if self.endpoint in OF_TOKENS else []
        values = [value for arm in arms for value in arm.values(self.endpoint)]
        if self.endpoint in OF_TOKENS:
            values = [value for value, compared, _ in found if compared and value is not None]
        idle = [compared for _, compared, _ in found].count(0)
        broken = sum(compared > 0 and (lost > 0 or value is None) for value, compared, lost in found)
        equal = sum(value == self.value for value in values)
        numbers = {
            "runs": len(values),
            "equal": equal,
            "min": finite(min(values)) if values else None,
            "max": finite(max(values)) if values else None,
        }
        if self.endpoint in OF_TOKENS:
            numbers |= {"tokens": sum(c for _, c, _ in found), "runs_without_comparison": idle, "not_finite": broken}
        if not values and not broken:
            return Verdict(NOT_TESTABLE, numbers)
        if self.expect == "all":
            wrong = equal < len(values) or broken > 0
            return Verdict(OPPOSITE if wrong else INCONCLUSIVE if idle else CONFIRMED, numbers)
        return Verdict(OPPOSITE if equal else INCONCLUSIVE if idle or broken else CONFIRMED, numbers)

    def _compared(self, arm: ArmEvidence) -> Iterator[tuple[float | None, int, int]]:
        """Of each run: its value, tokens compared, and compared steps whose difference is no number."""
        for name in (self.endpoint, COMPARED, NOT_FINITE):
            if len(arm.endpoints.get(name, ())) != len(arm.seeds):
                return
        columns = (arm.endpoints[self.endpoint], arm.endpoints[COMPARED], arm.endpoints[NOT_FINITE])
        for value, compared, lost in zip(*columns, strict=True):
            yield value, int(compared or 0), int(lost or 0)
