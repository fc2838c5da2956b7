"""How Δ = log p_train − log q is distributed over tokens, from the rollouts that runs have kept.

The bins are fixed, so that arms, runs and machines can be added up, and a summary of a few kilobytes serves a report as
well as the rollouts themselves.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vexact.report.reading import ReportError
from vexact.report.study import Arm

Floats = NDArray[np.float64]
EDGES = tuple(k / 4.0 for k in range(-36, 9))  # of log10 |Δ|; the outer bins hold what lies beyond
PROBABILITIES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999, 1.0)  # of a token, as the sampler sees it
FILES = 24  # of a run, evenly over its steps
QUANTILES = (0.95, 0.99)
COLUMNS = ("sampler_logprobs", "trainer_logprobs", "sampler_logprobs_bits", "trainer_logprobs_bits")
EXACT_COLUMNS = ("exact_logprobs", "exact_logprobs_bits")  # at the weights that sampled, where a run has them
INSTALL = "pyarrow is not installed: pip install 'vexact[data]'"


@dataclass(frozen=True)
class Deltas:
    """Of an arm's tokens. equal: the same in every bit. counts: of |Δ| by EDGES, without the equal ones. near: a bin of
    PROBABILITIES each, (tokens, mean |Δ|). quantiles: of |Δ|, by QUANTILES. runs: that kept rollouts; steps: of which,
    none where nobody wrote it down."""

    tokens: int
    equal: int
    positive: int
    mean: float
    largest: float
    quantiles: tuple[float, ...]
    counts: tuple[int, ...]
    near: tuple[tuple[int, float], ...]
    stale: bool = False
    runs: int = 0
    steps: tuple[int, ...] = ()

    @classmethod
    def of(cls, sampler: Floats, trainer: Floats, same: NDArray[np.bool_], stale: bool = False) -> Deltas:
        """sampler, trainer: float64 [tokens], log-probabilities. same: whether their bits are."""
        with np.errstate(invalid="ignore"):
            delta = np.where(same, 0.0, trainer - sampler)
        known = np.isfinite(delta)
        delta, same, sampler = delta[known], same[known], sampler[known]
        size = np.abs(delta)
        if not len(size):
            return cls(0, 0, 0, 0.0, 0.0, (0.0,) * len(QUANTILES), (0,) * (len(EDGES) - 1), ((0, 0.0),) * 11, stale)
        moved = np.clip(np.log10(np.maximum(size[~same], 1e-300)), EDGES[0], EDGES[-1])
        place = np.clip(np.searchsorted(PROBABILITIES, np.exp(np.minimum(sampler, 0.0)), "left") - 1, 0, 10)
        near = tuple((int((place == i).sum()), _mean(size[place == i])) for i in range(len(PROBABILITIES) - 1))
        return cls(
            len(size),
            int(same.sum()),
            int((delta > 0).sum()),
            _mean(size),
            float(size.max()),
            tuple(float(q) for q in np.quantile(size, QUANTILES)),
            tuple(int(n) for n in np.histogram(moved, EDGES)[0]),
            near,
            stale,
        )

    def document(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Deltas:
        """Raises KeyError, TypeError or ValueError for what `document` did not make."""
        later = {"runs": 0, "steps": ()}  # fields that files of older versions do not have
        given = {name: document[name] for name in cls.__dataclass_fields__ if name not in later or name in document}
        lists = {name: tuple(given.get(name, ())) for name in ("quantiles", "counts", "steps")}
        return cls(**{**given, **lists, "near": tuple((int(n), float(mean)) for n, mean in given["near"])})


def deltas_of(arm: Arm) -> Deltas | None:
    """Of all runs of an arm that have kept rollouts; None where none has, or nothing was compared."""
    sides: list[list[Floats]] = [[], []]
    same, stale, runs, steps = [], False, set(), set()
    for run in arm.runs:
        for table in tables(run.folder) if run.folder else ():
            runs.add(run.seed)
            steps.update(table["step"])
            older = any(version < step for version, step in zip(table["version"], table["step"], strict=True))
            old = older and EXACT_COLUMNS[0] not in table
            for sampler, trainer, sampler_bits, trainer_bits in rows(table):
                sides[0].append(np.asarray(sampler, np.float64))
                sides[1].append(np.asarray(trainer, np.float64))
                same.append(np.asarray(sampler_bits) == np.asarray(trainer_bits))
                stale = stale or old
    if not same:
        return None
    found = Deltas.of(np.concatenate(sides[0]), np.concatenate(sides[1]), np.concatenate(same), stale)
    return replace(found, runs=len(runs), steps=tuple(sorted(steps)))


def tables(folder: Path) -> Iterator[dict[str, list[Any]]]:
    """Columns of a few steps of a run, evenly spread, the first and the last among them. Raises ReportError."""
    files = parquet_files(folder)
    picked = sorted({round(i * (len(files) - 1) / max(1, FILES - 1)) for i in range(FILES)}) if files else []
    for i in picked:
        yield read_table(files[i])


def parquet_files(folder: Path) -> list[Path]:
    """The oldest first; none where rollouts cannot be read."""
    return sorted((folder / "rollouts").glob("step-*.parquet")) if readable() else []


def readable() -> bool:
    return importlib.util.find_spec("pyarrow") is not None


def read_table(file: Path) -> dict[str, list[Any]]:
    """A file of rollouts by column. Raises ReportError."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(file)
        columns = {name: table.column(name).to_pylist() for name in table.column_names}
    except (pa.ArrowException, OSError):
        raise ReportError(f"{file}: cannot be read as parquet") from None
    missing = [name for name in (*COLUMNS, "step", "version", "completion_ids") if name not in columns]
    if missing:
        raise ReportError(f"{file}: has no column {missing[0]}")
    return columns


def rows(table: Mapping[str, list[Any]]) -> Iterator[tuple[list[float], list[float], list[int], list[int]]]:
    """Of each rollout that was compared: both log-probabilities of its tokens, and the bits of both.

    Where a run keeps what exact arithmetic gives at the weights that sampled, the comparison is with that, which has no
    staleness.
    """
    trainer = EXACT_COLUMNS if EXACT_COLUMNS[0] in table else (COLUMNS[1], COLUMNS[3])
    for q, p, q_bits, p_bits in zip(
        table[COLUMNS[0]], table[trainer[0]], table[COLUMNS[2]], table[trainer[1]], strict=True
    ):
        if q and p and len(q) == len(p) and q_bits and p_bits:
            yield q, p, q_bits, p_bits


def _mean(values: Floats) -> float:
    return math.fsum(values.tolist()) / len(values) if len(values) else 0.0


def read_deltas(documents: Mapping[str, Any]) -> dict[str, Deltas]:
    """Of arms by name, from the file of an exported study. Raises ReportError."""
    try:
        return {name: Deltas.read(document) for name, document in documents.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ReportError(f"deltas.json.gz: not what vexact report --keep writes: {error}") from None


def middles() -> Sequence[float]:
    """|Δ| at the middle of each bin."""
    return [10.0 ** ((a + b) / 2.0) for a, b in pairwise(EDGES)]
