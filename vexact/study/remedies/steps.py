"""Remedies of whole steps: when the sampler takes the trainer's weights, how far a step goes, whether it stands.

They weigh nothing. What they read are measures of a step by name: `ess_token`, `ess_sequence` and `lag_k3` of
`vexact/training/lag.py`, `candidate` and `acceptance` of `vexact/training/acceptance.py`, `lag`, the versions that the
sampler is older, and `tim/k3`, the discrepancy that a step's rollouts were found to have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from vexact.model.remedy import AfterUpdate, BeforeUpdate, Plain

Level = Literal["token", "sequence"]
MINIMUM = 1e-12  # what an effective sample size is at least where a root or a quotient is taken of it


class Resync(Plain):
    """The sampler takes the weights behind a step whose lag ratio is spread too far, and counting to the next
    synchronisation begins anew; rollouts that wait are thrown away.

    trigger `ess`: the effective sample size (Σℓ)²/(nΣℓ²) of the unclipped lag ratio, over tokens or over sequences, is
    below the threshold (½, that of Li, Zhou and Lan, abstract of 29 October 2026; our reading of where and when: on the
    fresh batch, before its first update). The two levels differ by a factor of about T in K3, so neither is a default.
    `k3`: mean(ℓ − 1 − log ℓ) is above the threshold, a control. `every`: the sampler is that many versions older, a
    control with a fixed number of synchronisations. What is not a number triggers.

    discard: the batch that triggers is not trained on (an option; that abstract does not say).
    """

    def __init__(
        self,
        trigger: Literal["ess", "k3", "every"],
        threshold: float = 0.5,
        level: Level = "sequence",
        every: int = 0,
        discard: bool = False,
    ) -> None:
        if trigger == "every" and every < 1:
            raise ValueError(f"a resync of a fixed rhythm needs at least 1 step, not {every}")
        if trigger != "every" and not threshold > 0.0:
            raise ValueError(f"a resync by {trigger} needs a threshold above 0, not {threshold}")
        self.trigger, self.threshold, self.level, self.every = trigger, threshold, level, every
        self.discard = discard and trigger != "every"
        self.needs_lag = trigger != "every"
        self.beforehand = self.discard  # else the first update's own forward is π_old, in every bit

    def due(self, metrics: Mapping[str, float]) -> bool:
        if self.trigger == "every":
            return metrics["lag"] + 1 >= self.every  # behind the step the sampler is one version older
        if self.trigger == "ess":
            return not metrics[f"ess_{self.level}"] >= self.threshold
        return not metrics["lag_k3"] <= self.threshold

    def before_update(self, metrics: Mapping[str, float]) -> BeforeUpdate:
        return "discard" if self.discard and self.due(metrics) else "use"

    def after_update(self, metrics: Mapping[str, float]) -> AfterUpdate:
        return "sync" if self.due(metrics) else "none"


class StepScaling(Plain):
    """Learning rate times min(cap, sqrt(ESS/ESS_on)): step-size scaling of VCPO (arXiv 2602.17616), ESS of the
    unclipped lag ratio of the batch at hand, ESS_on that of an on-policy batch, 1 in an exact engine.

    VCPO's ratios are to the sampler; ours are the lag alone, so that a constant discrepancy does not slow every step
    (our choice). cap: 1, no step is longer than scheduled.
    """

    needs_lag = True

    def __init__(self, level: Level = "sequence", on_policy: float = 1.0, cap: float = 1.0) -> None:
        if not 0.0 < on_policy <= 1.0 or cap <= 0.0:
            raise ValueError(f"step scaling needs 0 < ESS_on ≤ 1 and a cap above 0, not {on_policy} and {cap}")
        self.level, self.on_policy, self.cap = level, on_policy, cap

    def lr_scale(self, metrics: Mapping[str, float]) -> float:
        ess = metrics[f"ess_{self.level}"]
        return min(self.cap, math.sqrt(max(MINIMUM, ess) / self.on_policy))


class SurgeSchedule(Plain):
    """Learning rate halved again and again once mismatch is on its way: after arXiv 2602.01826, which takes the surge
    of response length as its sign.

    With s the first step whose value is at least `surge` times the mean over the first `window` steps, the factor of
    step t > s is max(floor, ½^⌊(t − s)/(period·s)⌋). From notes on the paper: 3 times the first 50 steps, a period of
    about 1.8·s, a floor of 0.1. by: `length`, the paper's, reads `completion_length_mean`; `k3` (ours) the discrepancy
    `tim/k3`, at the weights that sampled, without lag and drift. A value that is not a number is passed over. Its
    numbers (sum and count of the window, s, t) go on in a resumed run.
    """

    beforehand = False

    def __init__(
        self, by: Literal["length", "k3"] = "length", window: int = 50, surge: float = 3.0, period: float = 1.8,
        floor: float = 0.1,
    ) -> None:  # fmt: skip
        if window < 1 or surge <= 1.0 or period <= 0.0 or not 0.0 < floor <= 1.0:
            raise ValueError(
                f"a schedule by surge needs window ≥ 1, surge above 1, period above 0, floor in (0, 1], "
                f"not {window}, {surge}, {period}, {floor}"
            )
        self.metric = "completion_length_mean" if by == "length" else "tim/k3"
        self.window, self.surge, self.period, self.floor = window, surge, period, floor
        self.steps, self.total, self.count, self.since = 0, 0.0, 0, 0

    def after_update(self, metrics: Mapping[str, float]) -> AfterUpdate:
        value = float(metrics[self.metric])
        self.steps += 1
        if not math.isfinite(value) or self.since:
            return "none"
        if self.count < self.window:
            self.total, self.count = self.total + value, self.count + 1
        elif value > 0.0 and value >= self.surge * (self.total / self.count):  # an exact sampler's is 0 throughout
            self.since = self.steps
        return "none"

    def lr_scale(self, metrics: Mapping[str, float]) -> float:
        if not self.since:
            return 1.0
        halvings = int((self.steps - self.since) / (self.period * self.since))
        return max(self.floor, math.ldexp(1.0, -min(halvings, 1000)))

    def state(self) -> dict[str, float]:
        return {"steps": self.steps, "total": self.total, "count": self.count, "since": self.since}

    def take_up(self, state: Mapping[str, float]) -> None:
        self.steps, self.count, self.since = int(state["steps"]), int(state["count"]), int(state["since"])
        self.total = float(state["total"])


class MIPU(Plain):
    """A step stands only if a fresh batch from its own sampler says so: monotonic inference policy updates
    (arXiv 2606.29526), *our reading* of notes.

    Behind a step the policy θ' is a candidate. The next batch is sampled by it; with ρ = p_θ'/q_θ' of that batch, in
    the trainer's and the sampler's arithmetic, θ' is accepted if −mean(ρÂ) ≥ −c and the batch trains next. Else
    masters, moments, rate and version are put back, the batch is thrown away and counted, and the next batch is sampled
    by the policy of before, which is no candidate again.

    c goes linearly from `start` to `end` over `steps` steps (1e-3 to 0 over 100 for 4B, 4e-3 to 1e-3 for 1.7B, are the
    paper's), and stays at `start` with steps = 0. fold: Â is taken from its mean first, so that it sums to 0. level:
    whether the mean is over tokens or over sequences. What is not a number is rejected.
    """

    can_undo = True

    def __init__(
        self, start: float = 1e-3, end: float = 0.0, steps: int = 0, level: Level = "token", fold: bool = True
    ) -> None:
        if not fold and start <= 0.0:
            raise ValueError("MIPU needs folded advantages or c above 0: rounding would decide else")
        self.start, self.end, self.steps, self.level, self.fold = start, end, steps, level, fold
        self.done = 0

    @property
    def c(self) -> float:
        if not self.steps:
            return self.start
        return self.start + (self.end - self.start) * min(1.0, self.done / self.steps)

    def rejects(self, metrics: Mapping[str, float]) -> bool:
        """acceptance: −mean(ρÂ) of a batch; candidate: whether the weights that sampled it are one."""
        name = f"acceptance_{self.level}" if self.fold else f"acceptance_{self.level}_raw"
        return bool(metrics["candidate"]) and not metrics[name] >= -self.c

    def before_update(self, metrics: Mapping[str, float]) -> BeforeUpdate:
        return "discard" if self.rejects(metrics) else "use"

    def after_update(self, metrics: Mapping[str, float]) -> AfterUpdate:
        rejected = self.rejects(metrics)
        self.done += 1
        return "rollback" if rejected else "none"

    def state(self) -> dict[str, float]:
        return {"done": self.done}

    def take_up(self, state: Mapping[str, float]) -> None:
        self.done = int(state["done"])
