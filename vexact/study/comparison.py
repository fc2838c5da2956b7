"""Two columns of log-probabilities judged: within the limits, outside, or too little compared to say so."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from vexact.study.dumps import Paired
from vexact.study.metrics import measure_pairs

Status = Literal["within", "outside", "inconclusive"]
EXIT_CODES: dict[Status, int] = {"within": 0, "outside": 1, "inconclusive": 3}
NAMED = 3  # ids that a reason names at most


@dataclass(frozen=True)
class Limits:
    """max_abs: of |Δ|, in nats. max_k3: of the mean of r − 1 − Δ. None: no limit; with neither, bits must be equal.

    min_tokens: fewer compared prove nothing; max_unscored: nor do more rollouts than these that one side did not score.
    """

    max_abs: float | None = None
    max_k3: float | None = None
    min_tokens: int = 1
    max_unscored: int = 0

    @property
    def bits(self) -> bool:
        return self.max_abs is None and self.max_k3 is None


@dataclass(frozen=True)
class Judged:
    """One limit. failed: of any number of tokens where `certain`, else only where enough were compared."""

    name: str
    value: float
    limit: float
    certain: bool

    @property
    def failed(self) -> bool:
        return not self.value <= self.limit

    @property
    def line(self) -> str:
        sign = ">" if self.failed else "<="
        return f"{self.name}: {self.value:g} {sign} {self.limit:g}"


@dataclass(frozen=True)
class Comparison:
    """What was compared, and what it is judged by."""

    paired: Paired
    limits: Limits

    @cached_property
    def measures(self) -> dict[str, float]:
        return measure_pairs(self.paired.pairs)

    @cached_property
    def judged(self) -> tuple[Judged, ...]:
        found, limits = self.measures, self.limits
        if limits.bits:
            return (Judged("tokens that differ in a bit", found["differing"], 0, True),)
        each = []
        if limits.max_abs is not None:
            each.append(Judged("max |Δ|", found["abs_max"], limits.max_abs, True))
        if limits.max_k3 is not None:
            each.append(Judged("K3", found["k3"], limits.max_k3, False))
        return tuple(each)

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Why what was compared proves nothing; empty where it does."""
        paired, tokens = self.paired, self.paired.tokens
        reasons = []
        if tokens < max(self.limits.min_tokens, 1):
            reasons.append(f"{tokens} tokens compared, at least {max(self.limits.min_tokens, 1)} needed")
        for ids, name in zip(paired.only, paired.names, strict=True):
            if ids:
                more = ", …" if len(ids) > NAMED else ""
                reasons.append(f"{len(ids)} rollouts only in {name}: {', '.join(ids[:NAMED])}{more}")
        if paired.at_two_temperatures:
            reasons.append(paired.at_two_temperatures)
        if paired.unscored > self.limits.max_unscored:
            reasons.append(f"{self._unscored}, at most {self.limits.max_unscored} allowed")
        return tuple(reasons)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What was not compared and is no reason: that one side did not score where it is allowed, and what is empty.

        A mask says on purpose that nothing is to be compared; where it leaves too little, `min_tokens` says so.
        """
        said = []
        if 0 < self.paired.unscored <= self.limits.max_unscored:
            said.append(self._unscored)
        if self.paired.empty:
            said.append(f"{self.paired.empty} rollouts have no token to compare")
        return tuple(said)

    @property
    def _unscored(self) -> str:
        return f"{self.paired.unscored} rollouts have no log-probabilities on one side"

    @cached_property
    def failures(self) -> tuple[Judged, ...]:
        """A single token outside proves it; a mean needs as many tokens as were asked for."""
        enough = self.paired.tokens >= max(self.limits.min_tokens, 1)
        return tuple(each for each in self.judged if each.failed and (each.certain or enough))

    @property
    def status(self) -> Status:
        return "outside" if self.failures else "inconclusive" if self.reasons else "within"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]

    @property
    def summary(self) -> str:
        paired, found = self.paired, self.measures
        rollouts = f"{paired.tokens:,} tokens of {len(paired.pairs):,} rollouts compared"
        return (
            f"compare: {self.status}, {rollouts}, {int(found['differing']):,} differ, "
            f"max |Δ| {found['abs_max']:g}, K3 {found['k3']:g}"
        )

    def as_json(self) -> dict[str, Any]:
        paired = self.paired
        return {
            "sampler": paired.names[0],
            "trainer": paired.names[1],
            "status": self.status,
            "exit_code": self.exit_code,
            "summary": self.summary,
            "reasons": list(self.reasons),
            "rollouts": len(paired.pairs),
            "unscored": paired.unscored,
            "empty": paired.empty,
            "only": [list(ids) for ids in paired.only],
            "checks": [
                {"name": each.name, "value": each.value, "limit": each.limit, "failed": each in self.failures}
                for each in self.judged
            ],
            "measures": self.measures,
        }
