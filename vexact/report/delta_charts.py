"""Charts of Δ: its histogram, and its size by the probability of a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vexact.report.deltas import PROBABILITIES, Deltas, middles
from vexact.report.figure import Axis, Line, Mark, Panel, Points
from vexact.report.number import written
from vexact.report.study import Study

LEAST = 20  # tokens of a bin whose mean is drawn


def panels(study: Study, deltas: Mapping[str, Deltas]) -> list[Panel]:
    """Both, where any arm has compared tokens."""
    known = [(i, arm.label, deltas[arm.name]) for i, arm in enumerate(study.arms) if arm.name in deltas]
    known = [(i, label, each) for i, label, each in known if each.tokens]
    if not known:
        return []
    stale = " Where the sampler's weights were older, staleness is in it." if any(d.stale for *_, d in known) else ""
    stale += _kept([each for *_, each in known])
    told = "; ".join(f"{label}: {_told(each)}" for _, label, each in known[:12])
    histogram: list[Mark] = []
    by_probability: list[Mark] = []
    for i, label, each in known:
        share = each.equal / each.tokens
        histogram.append(Points(i, label, (0.0,), (share,), tips=(f"{label}: {written(share)} equal in every bit",)))
        if any(each.counts):
            histogram.append(_histogram(i, label, each))
        near = [(_middle(k), mean) for k, (tokens, mean) in enumerate(each.near) if tokens >= LEAST]
        if near:
            by_probability.append(Line(i, label, tuple(p for p, _ in near), tuple(mean for _, mean in near)))
    drawn = [
        Panel(
            "delta", "Distribution of |Δ|", f"Histogram of |Δ| over tokens. {told}.", Axis("|Δ|", log=True),
            Axis("share of tokens", log=True), tuple(histogram),
            "Marks at 0: tokens whose two values are equal in every bit. Bins: a quarter of a decade." + stale,
        )
    ]  # fmt: skip
    if by_probability:
        drawn.append(
            Panel(
                "delta-probability", "|Δ| by token probability",
                f"Mean |Δ| of tokens by the probability that the sampler gave them. {told}.",
                Axis("probability of the token", low=0.0, high=1.0), Axis("mean |Δ|", log=True), tuple(by_probability),
                f"Bins with fewer than {LEAST} tokens are left out." + stale,
            )
        )  # fmt: skip
    return drawn


def _kept(known: Sequence[Deltas]) -> str:
    """Which rollouts it is: at the end of a run that collapsed nothing is as it was at its start."""
    steps, runs = sorted({step for each in known for step in each.steps}), {each.runs for each in known}
    if not steps:
        return ""
    some = ", ".join(map(str, steps[:6])) + (f" … {steps[-1]}" if len(steps) > 6 else "")
    some = f"step{'s' if len(steps) > 1 else ''} {some}"
    many = " to ".join(map(str, sorted({min(runs), max(runs)})))
    return f" Of the rollouts that were kept: {some}, of {many} run{'' if runs == {1} else 's'} an arm."


def _histogram(i: int, label: str, each: Deltas) -> Line:
    first = next(k for k, count in enumerate(each.counts) if count)
    last = max(k for k, count in enumerate(each.counts) if count)
    x = tuple(middles()[first : last + 1])
    nan = float("nan")
    y = tuple(count / each.tokens if count else nan for count in each.counts[first : last + 1])
    return Line(i, label, x, y)


def _middle(k: int) -> float:
    return (PROBABILITIES[k] + PROBABILITIES[k + 1]) / 2.0


def _told(each: Deltas) -> str:
    return (
        f"{written(each.tokens)} tokens, {written(each.equal / each.tokens)} equal in every bit, "
        f"mean {written(each.mean)}, largest {written(each.largest)}"
    )
