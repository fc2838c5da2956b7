"""Charts by step: a metric of all arms, the range of their seeds, and the null arms as a grey band."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vexact.report.curve import Band, spread
from vexact.report.figure import Axis, Grey, Line, Mark, Panel
from vexact.report.number import written
from vexact.report.study import EXACT, NULL, Arm, Study

POINTS, POINTS_OF_MANY, POINTS_OF_SMALL = 120, 48, 24  # of a line
SPIKY = 30.0  # largest over median beyond which an axis is logarithmic


@dataclass(frozen=True)
class Metric:
    """names: of metrics.jsonl, the first that a run has. log: always, never, or None where the values decide. beside:
    only drawn where it differs from the metric of these names. idle: what a run logs that has nothing to measure there;
    only drawn where any run has another value. asked: measured only where a recipe asks for it. None of these three is
    missed where it is not there."""

    id: str
    title: str
    label: str
    names: tuple[str, ...]
    meaning: str
    log: bool | None = False
    low: float | None = None
    high: float | None = None
    beside: tuple[str, ...] = ()
    idle: float | None = None
    asked: bool = False


LAG_ESS = ("gap/ess_sequence",)  # how far the sampler is from the trainer's own weights, as a share of sequences
SUCCESS = ("eval_success",)
K3 = ("tim/k3",)
ESS = ("tim/ess",)
WHOLE_K3 = ("rollout_corr/k3_kl",)
LATE = "late_trainer"  # the endpoint: mean held-out success of the last evaluations
DELTA_MAX = ("tim/abs_max", "mismatch_max")
METRICS = (
    Metric("success", "Held-out success, trainer", "success", SUCCESS,
           "Unflipped success of the trainer's policy on questions that training never asks.", low=0.0, high=1.0),
    Metric("success-sampler", "Held-out success, sampler", "success", ("eval_sampler_success",),
           "The same of the policy that samples.", low=0.0, high=1.0),
    Metric("k3", "K3", "K3", K3,
           "An estimate of KL(sampler‖trainer) of tokens at the weights that sampled; zero has a lane of its own.",
           log=True),
    Metric("delta-max", "Largest |Δ|", "max |Δ|", DELTA_MAX,
           "The largest |log p_train − log q| of a sampled token at the weights that sampled.", log=True),
    Metric("grad-norm", "Gradient norm", "norm", ("grad_norm",), "Before it is clipped.", log=None, low=0.0),
    Metric("entropy", "Entropy", "nats", ("entropy",), "Of the policy, per token.", low=0.0),
    Metric("ess", "Effective sample size", "ESS / n", ESS,
           "(Σr)² / (nΣr²) of tokens, as a share of their number n: 1 where both sides agree.", low=0.0, high=1.0),
    Metric("ess-whole", "ESS of sequences, with staleness", "ESS / n", LAG_ESS,
           "The same of whole sequences, between the trainer's own weights and the sampler.", low=0.0, high=1.0,
           beside=ESS),
    Metric("ess-lag", "ESS of lag, sequences", "ESS / n", ("ess_sequence",),
           "Of whole sequences' p_θ / p_s, as remedies read it: how old the batch is. 1 where it is not.",
           low=0.0, high=1.0, idle=1.0),
    Metric("ess-lag-token", "ESS of lag, tokens", "ESS / n", ("ess_token",),
           "The same of tokens.", low=0.0, high=1.0, idle=1.0),
    Metric("k3-whole", "K3 with staleness", "K3", WHOLE_K3,
           "Between the weights that the step began with and the sampler: staleness is in it too.", log=True,
           beside=K3),
    Metric("k3-drift", "K3 of drift", "K3", ("policy_drift_k3",),
           "Between the weights that a step began with and those of its later updates, of the tokens that they train.",
           log=True, idle=0.0),
    Metric("reward", "Training reward", "reward", ("reward_mean",), "Mean reward of the step's rollouts."),
)  # fmt: skip
# What mismatch does to the gradient of a step, most of it where `run.diagnose` asks for it.
GRADIENT = (
    Metric("drift", "Drift of the gradient", "norm", ("drift_norm",),
           "Mean of A·s̄, s̄ the mean score under the sampler: what the sampler's side adds whatever the rewards say.",
           log=None, low=0.0, asked=True),
    Metric("drift-cosine", "Drift in the gradient", "cosine", ("drift_cosine",),
           "Between the drift and the gradient that it is in.", asked=True),
    Metric("noise-projection", "Step along the sampler's error", "Σ Δθ·δW / |δW|", ("noise_projection",),
           "How far a step moved the weights along the noise of the sampler's; below 0: against it.", asked=True),
    Metric("truth-cosine", "Gradient beside that of a large batch", "cosine", ("truth_cosine",),
           "Between the step's gradient and that of many fresh rollouts which the exact policy sampled and scored.",
           high=1.0, asked=True),
    Metric("truth-split-cosine", "Gradients of that batch's halves", "cosine", ("truth_split_cosine",),
           "Between the two: what sampling alone leaves apart, with half as many rollouts on either side.",
           high=1.0, asked=True),
    Metric("skew-positive", "Loss beyond ratio 1, A above 0", "share", ("skew_positive",),
           "Mean over tokens with an advantage above 0.", idle=0.0),
    Metric("skew-negative", "Loss beyond ratio 1, A below 0", "share", ("skew_negative",),
           "Mean over tokens with an advantage below 0.", idle=0.0),
)  # fmt: skip


def success_at_end(arm: Arm) -> list[float]:
    """Of each run: what the study measured, or else the median of the last evaluations."""
    known = [value for value in arm.endpoints.get(LATE, ()) if math.isfinite(value)]
    return known or arm.ends(SUCCESS)


def lit_arms(study: Study) -> list[int]:
    """The arms that begin coloured, none of them null: all of a few; of many the exact one, and those with the least
    and the most success at the end."""
    arms = [i for i, arm in enumerate(study.arms) if arm.role != NULL]
    if not study.many:
        return sorted(arms, key=lambda i: study.arms[i].role != EXACT)
    exact = [i for i in arms if study.arms[i].role == EXACT][:1]
    others = [i for i in arms if i not in exact]
    ends = {i: spread(success_at_end(study.arms[i]))[1] for i in others}
    known = sorted((i for i in others if math.isfinite(ends[i])), key=lambda i: ends[i])
    chosen = [*known[:3], *known[max(3, len(known) - 2) :]] or others[:5]
    return exact + sorted(chosen)


def panels(study: Study, metrics: Sequence[Metric] = METRICS) -> tuple[list[Panel], list[str]]:
    """A panel a metric, and the titles of metrics that no run has."""
    drawn, missing = [], []
    for metric in metrics:
        panel = _panel(study, metric)
        if panel is not None:
            drawn.append(panel)
        elif not metric.beside and metric.idle is None and not metric.asked:
            missing.append(metric.title)
    return drawn, missing


def _panel(study: Study, metric: Metric) -> Panel | None:
    bands = [arm.band(metric.names) for arm in study.arms]
    if not any(band.steps for band in bands):
        return None
    if metric.beside and bands == [arm.band(metric.beside) for arm in study.arms]:
        return None
    if metric.idle is not None and all(value == metric.idle for band in bands for value in (*band.low, *band.high)):
        return None
    most = POINTS_OF_MANY if study.many else POINTS
    marks: list[Mark] = list(_grey(study, metric.names, most))
    marks += [_line(i, study.arms[i], band, most) for i, band in enumerate(bands) if band.steps]
    without = [arm.label for arm, band in zip(study.arms, bands, strict=True) if not band.steps]
    note = metric.meaning
    if without:
        names = ", ".join(without[:3]) + (f" and {len(without) - 3} more" if len(without) > 3 else "")
        note += f" Not measured by {names}."
    log = _spiky(bands) if metric.log is None else metric.log
    y = Axis(metric.label, log=log, low=None if log else metric.low, high=metric.high)
    return Panel(metric.id, metric.title, _described(study, bands, metric), Axis("step"), y, tuple(marks), note)


def _grey(study: Study, names: Sequence[str], most: int) -> list[Grey]:
    """Of the null arms beside the first exact arm: those of another objective say nothing of it."""
    curves = [curve for i in study.chance for curve in study.arms[i].curves(names)]
    if len(curves) < 2:
        return []
    band = Band.of(curves).thinned(most)
    exact = "" if study.exact is None or len(study.groups) == 1 else f" beside {study.exact.label}"
    return [Grey(f"range of the null arms{exact}", tuple(map(float, band.steps)), band.low, band.high)]


def _line(i: int, arm: Arm, band: Band, most: int) -> Line:
    thin = band.thinned(most)
    ranges = (thin.low, thin.high) if thin.wide else ((), ())
    return Line(i, arm.label, tuple(map(float, thin.steps)), thin.middle, *ranges)


def _spiky(bands: Sequence[Band]) -> bool:
    values = [value for band in bands for value in band.high]
    low, middle, high = spread(values)
    return low > 0 and high > SPIKY * middle


def _described(study: Study, bands: Sequence[Band], metric: Metric) -> str:
    ends = [
        f"{arm.label} {written(band.middle[-1])} at step {band.steps[-1]}"
        for arm, band in zip(study.arms, bands, strict=True)
        if band.steps
    ]
    shown = "; ".join(ends[:12]) + (f"; and {len(ends) - 12} more arms" if len(ends) > 12 else "")
    return f"{metric.title} by step, the median of each arm's seeds. It ends at: {shown}."


def small_multiples(study: Study) -> list[Panel]:
    """Of many arms: the success of each by itself before the range of its exact arm. Empty for a few."""
    if not study.many:
        return []
    drawn = []
    for i, arm in enumerate(study.arms):
        band = arm.band(SUCCESS)
        if not band.steps:
            continue
        exact = study.reference(arm)
        reference = exact.band(SUCCESS).thinned(POINTS_OF_SMALL) if exact else Band()
        grey = [Grey("the exact arm", tuple(map(float, reference.steps)), reference.low, reference.high)]
        line = _line(i, arm, band, POINTS_OF_SMALL)
        end = f"ends at {written(band.middle[-1])}"
        drawn.append(
            Panel(
                f"each-{i}", arm.label, f"Held-out success of {arm.label} by step: it {end}.", Axis("step"),
                Axis("success", low=0.0, high=1.0), (*(grey if reference.steps else []), line), end, small=True,
            )
        )  # fmt: skip
    return drawn
