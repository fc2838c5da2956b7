"""What a verification found, and the one line and exit code that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from vexact.testing import Comparison

CHUNKS = (1, 7, 16, 64, 100)
THREADS = (1, 2, 3)
RANKS = (2, 4)
# What must have been compared before anything may be called equal. A check of kind "" is one more than these.
SAMPLED = "sampler = re-scoring"
CHUNKED = tuple(f"chunks of {size}" for size in CHUNKS)
GRADIENTS = "gradients, micro-batches"
KINDS = (
    SAMPLED,
    *CHUNKED,
    "chunks whole",
    "page edges",
    "batch of one",
    "orders",
    "micro-batches",
    "page layout",
    "page contents",
    *(f"threads {count}" for count in THREADS),
    "instruction sets",
    "flush-denormal: sampler",
    "flush-denormal: logits",
    "flush-denormal: gradients",
    GRADIENTS,
    *(f"gradients, threads {count}" for count in THREADS),
    "gradients, instruction sets",
    "gradients, recomputed layers",
    "gradients, ranks",
    "gradients, shuffled arrival",
    "step and publish",
)
EQUAL, DIFFERS, INCONCLUSIVE = 0, 1, 3  # exit codes; 2 is bad input


@dataclass(frozen=True)
class Check:
    """One comparison of the table. kind: one of KINDS, or empty.

    skipped: why it did not run, or empty. absent: why there is nothing to check on this device, or empty.
    """

    name: str
    dtype: str
    kind: str
    found: Comparison = field(default_factory=Comparison)
    seconds: float = 0.0
    skipped: str = ""
    absent: str = ""

    @property
    def status(self) -> Literal["equal", "differs", "not run", "does not apply", "nothing compared"]:
        if self.absent:
            return "does not apply"
        if self.skipped:
            return "not run"
        if not self.found.compared:
            return "nothing compared"
        return "differs" if self.found.differ else "equal"


@dataclass(frozen=True)
class Control:
    """What must differ: torch's own path, of which `differ` of `compared` log-probabilities part."""

    dtype: str
    compared: int
    differ: int


@dataclass(frozen=True)
class Caught:
    """Whether a mutant was noticed by the check that must notice it."""

    mutant: str
    check: str
    dtype: str
    differ: int


Line = Check | Control | Caught


@dataclass(frozen=True)
class Verification:
    """Every check of every dtype. reasons: why it is inconclusive although nothing differed.

    kernels, profile: what was verified.
    """

    model: str
    checks: Sequence[Check]
    controls: Sequence[Control] = ()
    mutants: Sequence[Caught] = ()
    reasons: Sequence[str] = ()
    kernels: str = ""
    profile: str = ""

    @property
    def compared(self) -> int:
        return sum(check.found.compared for check in self.checks)

    @property
    def differing(self) -> Check | None:
        """The first check that found a difference."""
        return next((check for check in self.checks if check.found.differ), None)

    @property
    def skipped(self) -> int:
        """Checks for which no time was left."""
        return sum(bool(check.skipped) for check in self.checks)

    @property
    def survivors(self) -> list[str]:
        """Mutants that no check noticed."""
        return [caught.mutant for caught in self.mutants if not caught.differ]

    @property
    def exit_code(self) -> int:
        if self.differing is not None or self.survivors:
            return DIFFERS
        return INCONCLUSIVE if self.reasons else EQUAL

    @property
    def status(self) -> Literal["equal", "differs", "inconclusive"]:
        if self.exit_code == EQUAL:
            return "equal"
        return "differs" if self.exit_code == DIFFERS else "inconclusive"

    @property
    def summary(self) -> str:
        """The last line."""
        check = self.differing
        if check is not None:
            at = " ".join(part for part in (check.found.where, str(check.found.first)) if part)
            total = sum(each.found.differ for each in self.checks)
            counts = f"{self.compared:,} values compared, {total:,} differ"
            return f"verify: DIFFERS, {counts}; first {check.name} ({check.dtype}) {at}"
        if self.survivors:
            return f"verify: DIFFERS, mutants that no check noticed: {', '.join(self.survivors)}"
        if self.reasons:
            return f"verify: inconclusive, {'; '.join(self.reasons)}"
        return f"verify: equal, {self.compared:,} values compared, 0 differ"
