"""How the log-ratio of a whole sequence grows with its length, read off the rollouts that a run kept."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

from vexact.experiments.statistics import slope

SAMPLER = "sampler_logprobs"
TRAINER = ("exact_logprobs", "trainer_logprobs")  # at the weights that sampled, where a run has them: no lag in them


def length_slope(folder: Path) -> float | None:
    """ΣΔ of a sequence against its completion's tokens, Δ = log p_train − log q: nats a token, over all rollouts kept.

    None without rollouts, without pyarrow, or where all have one length.
    """
    tables = sorted((folder / "rollouts").glob("step-*.parquet"))
    if not tables or importlib.util.find_spec("pyarrow") is None:
        return None
    import pyarrow.parquet

    lengths: list[float] = []
    sums: list[float] = []
    for path in tables:
        names = pyarrow.parquet.read_schema(path).names
        trainer = next(name for name in TRAINER if name in names)
        found: Any = pyarrow.parquet.read_table(path, columns=[SAMPLER, trainer])
        for sampled, trained in zip(found[SAMPLER].to_pylist(), found[trainer].to_pylist(), strict=True):
            if trained:
                lengths.append(float(len(sampled)))
                sums.append(math.fsum(p - q for p, q in zip(trained, sampled, strict=True)))
    value = slope(lengths, sums) if lengths else math.nan
    return value if math.isfinite(value) else None
