"""The noise that would cause a measured mismatch: the `mismatch:` block of a recipe, fitted to pairs.

Real engines displace the log-odds of a token by nearly the same width whatever its probability (arXiv 2609.32444), so
the model of a pair is logit p' = logit p + ε with one law of ε. Its core is fitted: for each law the width at which the
recorded probabilities give the measured K3, then the law whose mean, median, 95th and 99th percentile of |Δ| come
nearest. The tail decides whether there are spikes beside it: where the top 1 % of the tokens carry more of K3 than a
Laplace law allows, tokens far outside of the core are counted out, and stated as a rate and a size. That choice is our
own.

What a dump cannot show is not fitted: persistence, the side that is wrong, and Δ's mean, which selection by the
sampler makes at second order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vexact.arithmetic import Floats, at_rank, expm1, log, mean, median_deviation
from vexact.errors import BadInput
from vexact.recipe import MismatchSection
from vexact.study.distribution import tail_share
from vexact.study.metrics import Compared, Pairs
from vexact.study.odds import displaced, log_odds

LAWS = ("gaussian", "laplace")
POINTS = 129  # of a law, at equal steps of its distribution; odd: its middle is one of them
TOKENS = 1024  # most tokens that a law is tried on: evenly many of each probability
HEAVY = 0.25  # of what a Laplace law leaves to the other 99 %: so much more of K3 in the top 1 % makes a tail heavy
FAR = 12.0  # of core widths: one token in 200,000 of a Laplace law is that far out, none of a Gaussian one
NORMAL_MAD = 1.482602218505602  # a Gaussian's standard deviation over its median deviation
LAPLACE_MAD = 2.0402788  # a Laplace law's: √2 / ln 2
TRIES, CLOSE = 200, 1e-6


@dataclass(frozen=True)
class Core:
    """Of |Δ|: mean, percentiles by rank, largest; K3 in nats a token; what of it the top 1 % of tokens carry."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float
    k3: float
    tail_share: float

    @staticmethod
    def of(delta: Floats) -> Core:
        distance, parts = np.sort(np.abs(delta)), expm1(delta) - delta
        return Core(
            mean(distance),
            at_rank(distance, 0.5),
            at_rank(distance, 0.95),
            at_rank(distance, 0.99),
            float(distance[-1]),
            mean(parts),
            tail_share(parts),
        )

    def distance(self, other: Core) -> float:
        """Between two cores of equal K3: root mean square of the logarithms of the ratios of the other four."""
        sizes = [(getattr(self, name), getattr(other, name)) for name in ("mean", "p50", "p95", "p99")]
        if any(0.0 in pair for pair in sizes):
            return math.inf
        return math.sqrt(math.fsum(math.log(mine / theirs) ** 2 for mine, theirs in sizes) / len(sizes))


@dataclass(frozen=True)
class Candidate:
    """A law of ε with its standard deviation in nats of log-odds, and what it gives on the recorded probabilities.

    What it says of the largest is that of a sample of `POINTS` a token, not of the tokens' own number.
    """

    law: str
    sigma: float
    core: Core


@dataclass(frozen=True)
class Fit:
    """What was found, the law that comes nearest, and the others. spikes: how many tokens lie far outside of the core.

    spike_rate: of a position; spike_size: their median |ε|, in nats. Where found.k3 is 0 there is no law.
    """

    tokens: int
    found: Core
    candidates: tuple[Candidate, ...]
    spikes: int = 0
    spike_size: float = 0.0

    @property
    def best(self) -> Candidate | None:
        """The nearest law. Beside spikes a Gaussian: a recipe's spikes have no other core."""
        return min(self.candidates, key=lambda each: each.core.distance(self.found), default=None)

    @cached_property
    def block(self) -> Mapping[str, Any]:
        """Keys of a recipe's `mismatch:` section. Its size is K3, which a run solves for on its own policy."""
        if self.best is None:
            return {"preset": "none"}
        shape = "spikes" if self.spikes else self.best.law
        block = {"site": "logits", "side": "sampler", "shape": shape, "law": "log-odds", "persistence": "prefix"}
        sized: dict[str, Any] = {**block, "k3": _rounded(self.found.k3)}
        if self.spikes:
            sized |= {"spike_rate": _rounded(self.spikes / self.tokens), "spike_size": _rounded(self.spike_size)}
        MismatchSection(**sized)  # what no recipe may say must not leave here
        return sized

    def as_yaml(self, source: str = "") -> str:
        """The block as text, with what it was fitted to in comments."""
        lines = [f"# {line}" for line in (*source.splitlines(), *self._said()) if line]
        return "\n".join([*lines, "mismatch:", *(f"  {key}: {value}" for key, value in self.block.items()), ""])

    def as_json(self) -> dict[str, Any]:
        best = self.best
        return {**asdict(self), "best": None if best is None else asdict(best), "mismatch": dict(self.block)}

    def _said(self) -> list[str]:
        best = self.best
        if best is None:
            return [f"{self.tokens:,} tokens, equal in every bit or nearly so: nothing to reproduce"]
        found, core = self.found, best.core
        return [
            f"{self.tokens:,} tokens; K3 {found.k3:.3g}, mean |Δ| {found.mean:.3g}, p99 {found.p99:.3g}",
            f"fitted in log-odds: {best.law}, standard deviation {best.sigma:.4g}: "
            f"mean |Δ| {core.mean:.3g}, p99 {core.p99:.3g} at that K3",
            "k3 is solved for on the policy that a run begins with; persistence cannot be seen in a dump",
        ]


def fit(pairs: Pairs) -> Fit:
    """pairs: of each rollout, float32 [tokens]: the sampler's, the trainer's; none empty, at least one.

    Raises BadInput where no width of a law gives the measured K3.
    """
    found = Compared.of(pairs)
    delta = found.delta
    kept = _core(found)
    measured = Core.of(delta[kept])
    if measured.k3 <= 0.0:
        return Fit(len(delta), measured, ())
    spikes = int((~kept).sum())
    size = _median_size(found, ~kept) if spikes else 0.0
    logp = _evenly(found.sampler[kept])
    laws = LAWS[:1] if spikes else LAWS
    return Fit(len(delta), measured, tuple(_solved(law, logp, measured.k3) for law in laws), spikes, size)


def _median_size(found: Compared, where: NDArray[np.bool_]) -> float:
    """Median |ε| of some tokens, or of |Δ| where none of them has a probability below 1 on both sides."""
    moved = log_odds(found.trainer[where], found.sampler[where])
    return at_rank(np.sort(np.abs(moved if len(moved) else found.delta[where])), 0.5)


def _core(found: Compared) -> NDArray[np.bool_]:
    """bool [tokens]: all, or where the tail is heavy those that are not far outside.

    How much of K3 a law leaves in its tail depends on how certain the tokens are, so it is tried on these. A token that
    is certain on one side goes by its |Δ|.
    """
    everything = np.ones(len(found.sampler), dtype=np.bool_)
    moved = found.delta.copy()
    both = (found.trainer < 0.0) & (found.sampler < 0.0)
    moved[both] = log_odds(found.trainer, found.sampler)
    deviation = median_deviation(moved[both]) if both.any() else 0.0
    laplace = displaced(_evenly(found.sampler)[:, None], LAPLACE_MAD * deviation * points("laplace")[None, :]).ravel()
    share = tail_share(expm1(laplace) - laplace)
    if deviation == 0.0 or tail_share(expm1(found.delta) - found.delta) <= share + HEAVY * (1.0 - share):
        return everything
    near: NDArray[np.bool_] = np.abs(moved) <= FAR * NORMAL_MAD * deviation
    return near


def _solved(law: str, logp: Floats, target: float) -> Candidate:
    """K3 grows with the width: nearly with its square where both are small, and never faster than e^width."""
    unit = points(law)
    certain = -expm1(np.minimum(logp, 0.0))
    square = mean(certain * certain)
    if square == 0.0:
        raise BadInput("every token is certain: no noise of log-odds gives a mismatch")
    sigma = math.sqrt(2.0 * target / square)
    for _ in range(TRIES):
        delta = displaced(logp[:, None], sigma * unit[None, :]).ravel()
        parts = expm1(delta) - delta
        ratio = target / mean(parts)
        if abs(ratio - 1.0) <= CLOSE:
            return Candidate(law, sigma, Core.of(delta))
        sigma *= math.sqrt(ratio)
    raise BadInput(f"no width of a {law} law gives K3 = {target:g} on these probabilities")


def points(law: str) -> Floats:
    """`POINTS` values of a law of mean 0 and variance 1, each as likely as the others."""
    share = (np.arange(POINTS) + 0.5) / POINTS
    if law == "gaussian":
        values = np.array([NormalDist().inv_cdf(each) for each in share.tolist()])
    else:
        values = np.where(share < 0.5, 1.0, -1.0) * log(1.0 - np.abs(2.0 * share - 1.0))
    values = (values - values[::-1]) / 2.0
    scaled: Floats = values / math.sqrt(mean(values * values))
    return scaled


def _evenly(logp: Floats) -> Floats:
    """At most `TOKENS` of them, evenly by rank."""
    if len(logp) <= TOKENS:
        return logp
    chosen: Floats = np.sort(logp)[(np.arange(TOKENS) * len(logp)) // TOKENS]
    return chosen


def _rounded(x: float) -> float:
    """Four digits: more are not measured."""
    return float(f"{x:.4g}")
