"""What a run comes to: numbers that are read off its metrics.jsonl.

Success is that on held-out questions, with rewards unflipped. An endpoint is None where the run does not log what it
needs, or where it is a step that was not reached: see STEPS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from vexact.experiments.statistics import mean, median, rank_correlation

Line = Mapping[str, Any]
Endpoints = dict[str, float | int | None]

# Endpoints that are a step: None says "not up to the end", which is later than any step.
# With what a run measures wherever it can tell that it was not reached.
STEPS = {
    "collapse_step": "peak_trainer",
    "ess_below_half": "ess_min",
    "first_sync": "syncs",
    "k3_leaves": "k3_start",
    "success_falls": "peak_trainer",
    "parted": "",
}
SMOOTHED = 3  # evaluations: held-out success of few questions jumps by some points
STAYS = 20  # steps for which success must stay below half of its peak
LATE = 10  # steps whose mean reward is the endpoint `late_reward`
EARLY, TIMES, WINDOW = 20, 2.0, 10  # K3 leaves where its median of WINDOW steps is above TIMES that of the first EARLY
FALLEN = 0.9  # of its peak so far: smoothed success below it has fallen
COMPARED, NOT_FINITE = "compared", "not_finite"
OF_TOKENS = ("delta_max", "mismatch_tokens")  # endpoints that say nothing where no token was compared

WHOLE_ESS, WHOLE_CHI2 = "gap/ess_sequence", "rollout_corr/chi2_seq"
DRIFT, PROJECTION, BIAS = "drift_norm", "noise_projection", "gradient_bias"
SLOPE = ("tim/length_slope", "length_slope")
K3, DELTA = "tim/k3", "mismatch_max"

NAMES = (
    "final_trainer", "final_sampler", "late_trainer", "late_sampler", "peak_trainer", "collapse_step", "late_reward",
    "k3_start", "k3_median", "k3_max", "k3_late", "delta_max", "mismatch_tokens", "grad_norm_max", "entropy_end",
    "ess_min", "ess_below_half", "syncs", "kept", "drift", "drift_late", "noise_projection", "gradient_bias",
    "length_slope", "parted", "kl_to_exact", "js_to_exact", "compared", "not_finite", "first_sync",
    "skew_positive", "skew_negative", "k3_leaves", "success_falls", "k3_growth", "lag_with_age",
    "seconds",
)  # fmt: skip


def measure(lines: Sequence[Line], tail: int = 5) -> Endpoints:
    """lines: of metrics.jsonl. tail: how many of the last evaluations `late_*` is the mean of.

    final_*, late_*, peak_*: held-out success of the trainer's policy and of the sampler's; peak of the smoothed one.
    late_reward: what training saw, flips included. k3_*, delta_max (nats), mismatch_tokens: the discrepancy of
    arithmetic, at the weights that sampled; compared: tokens it was looked for in; not_finite: steps that compared some
    and whose largest difference is no number. skew_*: of the loss beyond ratio 1, of tokens with an advantage above and
    below 0, over the last LATE steps. k3_leaves, success_falls: see EARLY and FALLEN. k3_growth: the median K3 of the
    last EARLY steps ÷ that of the first. lag_with_age: Spearman's ρ of K3 of the lag ratio with the versions that the
    sampler is behind. ess_*: of whole sequences' ratios to the weights that sampled, unclipped. drift,
    noise_projection, gradient_bias: over the steps that `run.diagnose` looks at, the first and the last a mean, the
    second a sum. syncs: how often the sampler's weights changed; first_sync: the step before which they first did.
    kept: the share of tokens that no remedy rejected. length_slope: ΣΔ of a sequence against its length, nats a token.
    What needs other runs as well, `parted` and `*_to_exact`, is added later.
    """
    steps = [line for line in lines if line["step"] >= 0]
    success = evaluations(lines, "eval_success")
    ess = ess_of(steps)
    k3 = _column(steps, (K3,))
    drift, projection, slopes = _column(steps, (DRIFT,)), _column(steps, (PROJECTION,)), _column(steps, SLOPE)
    tokens = sum(_column(steps, ("tokens",)))
    return {
        **_success(success, "trainer", tail),
        **_success(evaluations(lines, "eval_sampler_success"), "sampler", tail),
        "peak_trainer": _largest(value for _, value in smoothed(success)),
        "collapse_step": collapse_step(success),
        "late_reward": _mean(_column(steps[-LATE:], ("reward_mean",))),
        "k3_start": k3[0] if k3 else None,
        "k3_median": median(k3) if k3 else None,
        "k3_max": _largest(k3),
        "k3_late": _mean(k3[-LATE:]),
        "delta_max": _largest(_column(steps, (DELTA,))),
        "mismatch_tokens": sum(_column(steps, ("mismatch_tokens",))) if steps else None,
        "grad_norm_max": _largest(_column(steps, ("grad_norm",))),
        "entropy_end": _mean(_column(steps[-LATE:], ("entropy",))),
        "ess_min": min((value for _, value in ess), default=None),
        "ess_below_half": next((step for step, value in ess if value < 0.5), None),
        "syncs": syncs(steps),
        "first_sync": first_sync(steps),
        COMPARED: sum(_column(steps, ("mismatch_compared",))),
        NOT_FINITE: sum(bool(line.get("mismatch_compared")) and line.get(DELTA) is None for line in steps),
        "skew_positive": _mean(_column(steps[-LATE:], ("skew_positive",))),
        "skew_negative": _mean(_column(steps[-LATE:], ("skew_negative",))),
        "k3_leaves": k3_leaves([(line["step"], line[K3]) for line in steps if line.get(K3) is not None]),
        "success_falls": success_falls(success),
        "k3_growth": _growth(k3),
        "lag_with_age": _rank(steps, "lag", "lag_k3"),
        "kept": 1.0 - sum(_column(steps, ("remedy_rejected_tokens",))) / tokens if tokens else None,
        "drift": _mean(drift),
        "drift_late": _mean(drift[-LATE:]),
        "noise_projection": math.fsum(projection) if projection else None,
        "gradient_bias": _mean(_column(steps, (BIAS,))),
        "length_slope": _mean(slopes),
        "seconds": math.fsum(_column(steps, ("seconds",))),
    }


def evaluations(lines: Sequence[Line], name: str) -> list[tuple[int, float]]:
    """(steps done, success), the evaluation before the first step included."""
    return [(line["step"] + 1, line[name]) for line in lines if line.get(name) is not None]


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Each evaluation's mean with up to SMOOTHED − 1 before it."""
    values = [value for _, value in points]
    return [(step, mean(values[max(0, i - SMOOTHED + 1) : i + 1])) for i, (step, _) in enumerate(points)]


def collapse_step(points: Sequence[tuple[int, float]]) -> int | None:
    """The first step from which on smoothed success stays below half of its own peak so far for STAYS steps.

    None where there is none; a fall less than STAYS steps before the end is not seen through, and none either.
    """
    peak, since = 0.0, None
    for step, value in smoothed(points):
        peak = max(peak, value)
        if value >= peak / 2.0:
            since = None
            continue
        since = step if since is None else since
        if step - since >= STAYS:
            return since
    return None


def ess_of(steps: Sequence[Line]) -> list[tuple[int, float]]:
    """(step, effective share 0 … 1 of a step's sequences by their lag ratio); 1 where the sampler is not older.

    `ess_sequence` is measured wherever a run has the policy that sampled: it then comes with a lag_k3 that is not 0.
    Elsewhere χ² of the whole ratio, discrepancy included, gives 1/(1 + χ²).
    """
    found = []
    for line in steps:
        if not line.get("lag"):
            found.append((line["step"], 1.0))
        elif line.get("lag_k3") and line.get("ess_sequence") is not None:
            found.append((line["step"], float(line["ess_sequence"])))
        elif line.get(WHOLE_ESS) is not None:
            found.append((line["step"], float(line[WHOLE_ESS])))
        elif line.get(WHOLE_CHI2) is not None:
            found.append((line["step"], 1.0 / (1.0 + max(float(line[WHOLE_CHI2]), 0.0))))
    return found


def syncs(steps: Sequence[Line]) -> int | None:
    """How often a step was sampled with other weights than the one before it."""
    sampled_with = _column(steps, ("sampler_version",))
    return sum(a != b for a, b in pairwise(sampled_with)) if sampled_with else None


def first_sync(steps: Sequence[Line]) -> int | None:
    """The first step that was sampled with other weights than the one before it; None where there is none."""
    known = [(line["step"], line["sampler_version"]) for line in steps if line.get("sampler_version") is not None]
    return next((step for (_, before), (step, now) in pairwise(known) if now != before), None)


def k3_leaves(points: Sequence[tuple[int, float]]) -> int | None:
    """The first step, behind the first EARLY ones, at which the median of the last WINDOW values of K3 is above TIMES
    that of the first EARLY. A single step's K3 doubles by chance. points: step, K3."""
    values = [value for _, value in points]
    limit = TIMES * median(values[:EARLY])
    late = range(EARLY, len(points))
    return next((points[i][0] for i in late if median(values[i - WINDOW + 1 : i + 1]) > limit), None)


def success_falls(points: Sequence[tuple[int, float]]) -> int | None:
    """The first evaluation at which smoothed success is below FALLEN of its peak so far."""
    peak = 0.0
    for step, value in smoothed(points):
        peak = max(peak, value)
        if value < FALLEN * peak:
            return step
    return None


def fingerprints(lines: Sequence[Line]) -> dict[int, str]:
    """Step → sha256 of the weights behind it."""
    return {line["step"]: line["fingerprint"] for line in lines if "fingerprint" in line}


def parted(a: Mapping[int, str], b: Mapping[int, str]) -> int | None:
    """The first step behind which two runs have different weights; None where they never do."""
    return next((step for step in sorted(a.keys() & b.keys()) if a[step] != b[step]), None)


def _success(points: Sequence[tuple[int, float]], whose: str, tail: int) -> Endpoints:
    values = [value for _, value in points]
    return {f"final_{whose}": values[-1] if values else None, f"late_{whose}": _mean(values[-tail:])}


def _first(line: Line, names: Sequence[str]) -> float | None:
    return next((line[name] for name in names if line.get(name) is not None), None)


def _column(steps: Sequence[Line], names: Sequence[str]) -> list[float]:
    """The values of the steps that have one; metrics.jsonl writes null for what is not finite."""
    found = (_first(line, names) for line in steps)
    return [value for value in found if value is not None]


def _rank(steps: Sequence[Line], x: str, y: str) -> float | None:
    """Spearman's ρ of two values of a step; None where either is constant or was not measured."""
    pairs = [(line[x], line[y]) for line in steps if line.get(x) is not None and line.get(y) is not None]
    found = rank_correlation(*zip(*pairs, strict=True)) if pairs else math.nan
    return found if math.isfinite(found) else None


def _growth(k3: Sequence[float]) -> float | None:
    """None of fewer steps than twice EARLY, or where there was none at first."""
    first = median(k3[:EARLY])
    return median(k3[-EARLY:]) / first if len(k3) >= 2 * EARLY and first > 0.0 else None


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def _largest(values: Iterable[float]) -> float | None:
    return max(values, default=None)
