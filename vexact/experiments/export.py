"""A study's results small enough to be committed: no run folders, thinned curves.

    results.json     as in the study's folder; a run's `folder` is empty
    table.csv        the same
    curves.json.gz   {arm: {seed: {metric: [[step, value], …]}}}, values with DIGITS significant digits

`vexact report` reads such a folder as it reads the study's own, but for what needs rollouts. Of each curve every
evaluation stays, its first and last point, and at most POINTS others, evenly spread. Step −1 is before the first.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vexact.errors import BadInput
from vexact.experiments.results import write
from vexact.loop.folder import METRICS, draft_of, read_lines

CURVES = "curves.json.gz"
POINTS, DIGITS = 60, 4
MOST_BYTES = 5_000_000  # of a file that is to be committed
# What reports draw; a run logs four times as many.
KEPT = (
    "eval_success", "eval_sampler_success", "reward_mean", "entropy", "grad_norm", "lag", "lr", "loss",
    "mismatch_max", "mismatch_tokens", "tokens", "k3", "clip_fraction", "ratio_min", "ratio_max",
    "tim/k3", "tim/k1", "tim/abs_mean", "tim/abs_p99", "tim/abs_max", "tim/ess", "tim/ess_sequence",
    "rollout_corr/k3_kl", "rollout_corr/chi2_token", "rollout_corr/chi2_seq",
    "ess_token", "ess_sequence", "lag_k3", "policy_drift_k3", "gap/ess_sequence",
    "mismatch_sigma", "noise_projection", "gradient_bias", "gradient_cosine", "truth_cosine", "truth_split_cosine",
    "remedy_weight_mean", "remedy_weight_max", "remedy_rejected_tokens", "completion_length_mean",
)  # fmt: skip
PREFIXES = ("drift", "skew_")
EVALUATIONS = "eval_"


def export_study(results: Mapping[str, Any], root: Path, folder: Path) -> list[Path]:
    """Write the three files. root: the study's folder. Raises BadInput where one would be larger than MOST_BYTES."""
    curves: dict[str, dict[str, Any]] = {}
    for arm in results["arms"]:
        mine = curves.setdefault(arm["name"], {})
        for run in arm["runs"]:
            mine[str(run["seed"])] = dict(thinned(read_lines(root / run["folder"] / METRICS)))
    packed = gzip.compress(json.dumps(curves, separators=(",", ":")).encode(), mtime=0)
    if len(packed) > MOST_BYTES:
        raise BadInput(f"--export {folder}: the curves take {len(packed)} bytes, more than {MOST_BYTES}")
    arms = [{**arm, "runs": [{**run, "folder": ""} for run in arm["runs"]]} for arm in results["arms"]]
    write({**results, "arms": arms}, folder)
    draft = draft_of(folder / CURVES)
    draft.write_bytes(packed)
    draft.replace(folder / CURVES)
    return sorted(folder.iterdir())


def thinned(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[list[float]]]]:
    """Metric, [step, value]s. lines: of metrics.jsonl."""
    names = dict.fromkeys(name for line in lines for name in line if name in KEPT or name.startswith(PREFIXES))
    for name in names:
        points = [
            [line["step"], shortened(line[name])]
            for line in lines
            if isinstance(line.get(name), (int, float)) and not isinstance(line[name], bool)
        ]
        if points:
            yield name, points if name.startswith(EVALUATIONS) else _spread(points)


def shortened(value: float) -> float:
    """With DIGITS significant digits; whole numbers stay."""
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def _spread(points: list[list[float]]) -> list[list[float]]:
    stride = math.ceil(len(points) / POINTS)
    return [point for i, point in enumerate(points) if i % stride == 0 or i == len(points) - 1]
