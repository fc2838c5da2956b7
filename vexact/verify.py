"""`verify`: the theorem on one checkpoint, inside a given time, with an answer that may be *inconclusive*."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vexact.errors import BadInput
from vexact.model.checkpoint import shapes
from vexact.model.config import ModelConfig
from vexact.model.policy import TOKENS_AT_ONCE, Policy
from vexact.model.rollout import Rollout
from vexact.recipe import MismatchSection
from vexact.study.mismatch import Mismatch
from vexact.verification.checks import Planned, forward_plan
from vexact.verification.control import control
from vexact.verification.mutants import mutants
from vexact.verification.result import (
    CHUNKED,
    CHUNKS,
    GRADIENTS,
    KINDS,
    SAMPLED,
    Caught,
    Check,
    Control,
    Line,
    Verification,
)
from vexact.verification.subject import Sizes, Subject, itself
from vexact.verification.updates import update_plan
from vexact_kernels import Kernels

SMALL = 10_000_000  # parameters; below, a model is cheap enough for more samples and for the slow implementations
LOGITS = 1_000_000  # fewest logits compared, each counted once
SAMPLED_SMALL, SAMPLED_LARGE = 10_000, 1_000  # fewest sampled log-probabilities
CONTROLLED = 8  # rollouts of the control, each of another prompt
MUTANT_SIZES = Sizes(requests=8, samples=2, tokens=12, few=8, sequences=2, length=100)
DOSED = Sizes(requests=16, samples=4, tokens=16, few=8, sequences=1, length=8)  # what a dose is solved on
SHARE = 0.1  # of the time that the samples compared with their re-scoring may take


def verify(
    model: str | Path,
    kernels: Kernels,
    dtypes: Sequence[torch.dtype] = (),
    seconds: float = 60.0,
    with_mutants: bool = False,
    begin: Callable[[str], None] = lambda name: None,
    done: Callable[[Line], None] = lambda line: None,
    sizes: Sizes | None = None,
    mismatch: MismatchSection | None = None,
) -> Verification:
    """Run every check on `model` (a folder, or `tiny`) in each dtype, by default the checkpoint's own.

    seconds: of wall clock for all of it; the checks of every kind, and what the minima need, run in any case. begin
    hears the name of what starts, done the finished line. sizes: how much is sampled and compared, by default what the
    time affords; less than the minima is inconclusive. mismatch: verify the engine so disturbed, both sides alike: it
    must be as repeatable as an exact one. Raises ConfigError or CheckpointError (ValueError) on a model that cannot be
    loaded.
    """
    if not 0 < seconds < float("inf"):
        raise BadInput(f"seconds is {seconds}, must be a positive number")
    checks: list[Check] = []
    controls: list[Control] = []
    caught: list[Caught] = []
    reasons: list[str] = []
    for dtype in dtypes or (None,):
        ends = time.monotonic() + seconds / max(1, len(dtypes))
        policy = Policy.load(model, kernels, dtype)
        run = _Run(policy, ends, begin, done, sizes, disturbance(mismatch, policy))
        checks += run.checks()
        controls.append(run.control())
        reasons += shortfalls(parameter_count(run.policy.config), checks, controls[-1])
        if with_mutants:
            caught += run.mutants()
    name = str(model) if mismatch is None or mismatch.off else f"{model} under {described(mismatch)}"
    return Verification(name, checks, controls, caught, reasons, kernels.name, kernels.profile)


def shortfalls(parameters: int, checks: Sequence[Check], control: Control) -> list[str]:
    """Why equality would not be a conclusion in the control's dtype.

    A kind or a check compared nothing, too little was compared, or the control did not differ.
    """
    dtype = control.dtype
    ran = [check for check in checks if check.dtype == dtype and not check.skipped and not check.absent]
    absent = {check.kind for check in checks if check.absent}
    compared: Counter[str] = Counter()
    for check in ran:
        compared[check.kind] += check.found.compared
    needed = [kind for kind in KINDS if kind not in absent]
    reasons = [f"not compared in {dtype}: {', '.join(names)}" for names in [_missing(needed, compared, ran)] if names]
    minima = [
        (compared[SAMPLED], least_sampled(parameters), "sampled log-probabilities"),
        (sum(compared[kind] for kind in CHUNKED), LOGITS, "logits"),
        (max((c.found.compared for c in ran if c.kind == GRADIENTS), default=0), parameters, "gradient values"),
    ]
    reasons += [
        f"{count:,} of at least {least:,} {words} compared in {dtype}"
        for count, least, words in minima
        if count < least
    ]
    if not control.differ:
        reasons.append(f"the control must differ and {control.compared} values of torch's own paths do not in {dtype}")
    return reasons


def _missing(needed: Sequence[str], compared: Counter[str], ran: Sequence[Check]) -> list[str]:
    """Needed kinds without a value, and further checks without one."""
    kinds = [kind for kind in needed if not compared[kind]]
    return kinds + [check.name for check in ran if not check.found.compared and check.kind not in kinds]


def described(section: MismatchSection) -> str:
    """What is not as in an exact engine, in the words of a recipe."""
    exact = MismatchSection()
    changed = {key: value for key, value in vars(section).items() if value != getattr(exact, key)}
    return "mismatch " + " ".join(f"{key}={value}" for key, value in changed.items())


def disturbance(section: MismatchSection | None, policy: Policy) -> Callable[[Policy], Policy]:
    """What the section makes of a policy, with the size that it has on this one. Raises BadInput for what is no
    disturbance of a forward."""
    if section is None or section.off:
        return itself
    if section.actual_site in ("gradients", "record"):
        raise BadInput(f"mismatch.site = {section.actual_site}: verify disturbs a forward, and that is none")
    mismatch = Mismatch(replace(section, side="both-shared", start=0, stop=0, ramp=0), seed=0)

    def sampled() -> list[Rollout]:
        return [r for r in Subject(policy, DOSED).rollouts if r.temperature == 1.0]

    mismatch.begin(policy, sampled, TOKENS_AT_ONCE)
    return lambda each: mismatch.sampler(each, 0)


class _Run:
    """One model in one dtype, until `ends` (monotonic seconds)."""

    def __init__(
        self,
        policy: Policy,
        ends: float,
        begin: Callable[[str], None],
        done: Callable[[Line], None],
        sizes: Sizes | None,
        view: Callable[[Policy], Policy] = itself,
    ) -> None:
        self.policy, self.ends, self.begin, self.done = policy, ends, begin, done
        self.dtype = str(policy.dtype).removeprefix("torch.")
        if sizes is None:
            self.begin("calibrating")
            sizes = sizes_for(policy.config, sampling_rate(view(policy)) * max(0.0, ends - time.monotonic()))
        self.subject = Subject(policy, sizes, view=view)

    def checks(self) -> list[Check]:
        kernels, small = self.policy.ops.kernels, parameter_count(self.policy.config) < SMALL
        plan = [*forward_plan(kernels, small), *update_plan(kernels, small)]
        return [self._check(planned) for planned in sorted(plan, key=lambda planned: not planned.kind)]

    def control(self) -> Control:
        self.begin("control")
        rollouts = self.subject.rollouts[:: self.subject.sizes.samples][:CONTROLLED]
        result = control(self.policy, rollouts, self.dtype)
        self.done(result)
        return result

    def mutants(self) -> list[Caught]:
        caught = []
        for mutant in mutants(self.policy.ops.kernels):
            self.begin(f"mutant: {mutant.name}")
            found = mutant.run(mutant.make(self.policy, MUTANT_SIZES))
            caught.append(Caught(mutant.name, mutant.check, self.dtype, found.differ))
            self.done(caught[-1])
        return caught

    def _check(self, planned: Planned) -> Check:
        begun = time.monotonic()
        if planned.absent:
            check = Check(planned.name, self.dtype, planned.kind, absent=planned.absent)
        elif begun > self.ends and not planned.kind:
            check = Check(planned.name, self.dtype, planned.kind, skipped="no time left")
        else:
            self.begin(planned.name)
            found = planned.run(self.subject)
            check = Check(planned.name, self.dtype, planned.kind, found, time.monotonic() - begun)
        self.done(check)
        return check


def parameter_count(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in shapes(config).values())


def least_sampled(parameters: int) -> int:
    """Fewest sampled log-probabilities that may be called equal."""
    return SAMPLED_SMALL if parameters < SMALL else SAMPLED_LARGE


def sampling_rate(policy: Policy) -> float:
    """Tokens a second, of eight sequences at once."""
    subject = Subject(policy, Sizes(requests=8, samples=1, tokens=6, few=8, sequences=1, length=8))
    subject.sample(subject.requests[:2])  # a first run pays for what is set up once
    begun = time.monotonic()
    drawn = sum(len(rollout.completion) for rollout in subject.sample(subject.requests))
    return max(1, drawn) / (time.monotonic() - begun)


def sizes_for(config: ModelConfig, affordable: float) -> Sizes:
    """affordable: tokens that could be sampled in all of the time."""
    parameters = parameter_count(config)
    small = parameters < SMALL
    samples, tokens = (4, 40) if small else (2, 32)
    least = least_sampled(parameters)
    wanted = min(max(least, SHARE * affordable), 20 * least)
    requests = 4 * math.ceil(wanted / (4 * samples * tokens))
    if not small:
        return Sizes(requests, samples, tokens, few=4, sequences=2, length=110, few_tokens=10, trained_tokens=4)
    rows = math.ceil(LOGITS / (config.vocab_size * len(CHUNKS)))
    return Sizes(requests, samples, tokens, few=8, sequences=max(2, math.ceil(rows / 200)), length=200)
