"""What a recipe's `mismatch` section does to policies: the switch between an exact run and a disturbed one.

Two views of the same weights, one for each side: `sampler(policy, step)` is what is sampled with, `trainer(policy,
step)` what is scored and differentiated. Off, and outside of the steps that the section names, either is that very
policy object.

- `sampler`, `trainer`: that side alone is disturbed. `both-independent`: each by noise of its own.
- `both-shared`: both by the same noise at the same addresses. Equal in every bit while noise is there: the placebo.

A real cause (vexact/study/causes) makes of a policy that of a side that computes otherwise; it has no size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vexact.model.policy import Policy, Scored
from vexact.model.rollout import Rollout
from vexact.model.transformer import Transformer
from vexact.recipe import MismatchSection, Recipe, RecipeError
from vexact.study import keys
from vexact.study.causes.flipped import flipped
from vexact.study.causes.registry import BY_SCHEDULE, CAUSES, FLIPPED, STALE
from vexact.study.dose import Dose, Frozen, solve
from vexact.study.noise import Noise, Noisy
from vexact.study.outside import on_gradient, recorded
from vexact.study.weights import disturbed, scales_of
from vexact_kernels import Kernels

SALTS = {"sampler": 0, "trainer": 1}
WEIGHT_SITES = ("weights", "head")


class Mismatch:
    """State of a run: `sigma`, solved once where the section names a dose, and `scales`, of weights as they began."""

    def __init__(self, section: MismatchSection, seed: int) -> None:
        self.section = section
        self.seed = int(keys.mixed(seed, keys.named("mismatch"), section.seed)[0])
        self.sigma: float | None = None if section.target else section.actual_sigma
        self.scales: dict[str, float] | None = None
        self._held: dict[str, tuple[Transformer, str, Policy]] = {}  # by side: of what, with which noise, the copy

    @property
    def solved(self) -> bool:
        """Whether everything that follows from the first weights is known."""
        weights = not self.section.off and self.section.actual_site in WEIGHT_SITES
        return self.section.off or (self.sigma is not None and (self.scales is not None or not weights))

    def values(self) -> dict[str, Any]:
        """The state, as JSON."""
        sigma = None if self.sigma is None else self.sigma.hex()
        scales = None if self.scales is None else {name: value.hex() for name, value in self.scales.items()}
        return {"sigma": sigma, "scales": scales}

    def restore(self, values: dict[str, Any]) -> None:
        sigma, scales = values["sigma"], values["scales"]
        self.sigma = None if sigma is None else float.fromhex(sigma)
        self.scales = None if scales is None else {name: float.fromhex(value) for name, value in scales.items()}

    @property
    def replayable(self) -> bool:
        """Whether scoring with the sampler's policy finds what was sampled in every bit, whatever the schedule was.

        Where not, q is only what rollouts hold: log-probabilities, and the law where it is wanted (`keeps_laws`).
        """
        return self.section.cause not in BY_SCHEDULE

    def keeps_laws(self, step: int) -> bool:
        """Whether the sampler's policy does not find again what that step's tokens are drawn from: then rollouts have
        to keep it, should anything be centred with it."""
        return not self.replayable and self.section.side != "trainer" and self._on(step)

    def sampler(self, policy: Policy, step: int, before: Policy | None = None) -> Policy:
        """What samples in that step with those weights. before: with which the step before was sampled, by default
        these."""
        if self.section.cause in STALE:
            stale = STALE[self.section.cause]
            return stale(policy, before or policy, self.section, step) if self._on(step) else policy
        return self._seen(policy, step, "sampler")

    def trainer(self, policy: Policy, step: int) -> Policy:
        """What scores, and is differentiated, in that step with those weights."""
        return self._seen(policy, step, "trainer")

    def size(self, step: int) -> float | None:
        """σ in that step; None where nothing is disturbed then."""
        section = self.section
        if section.off or section.cause != "none" or not self._on(step):
            return None
        if self.sigma is None:
            raise RuntimeError("the dose is not solved yet")
        return self.sigma * min(1.0, (step - section.start + 1) / section.ramp) if section.ramp else self.sigma

    def begin(self, policy: Policy, rollouts: Callable[[], Sequence[Rollout]], tokens_at_once: int) -> Dose | None:
        """Find what follows from the weights that a run begins with. rollouts: sampled by them, without noise.

        Returns the dose where one was solved for. Raises DoseError where no size gives it.
        """
        if self.section.off:
            return None
        if self.section.actual_site in WEIGHT_SITES and self.scales is None:
            self.scales = scales_of(policy, self.section.actual_site)
        if self.sigma is not None and self.section.hold != "k3":
            return None
        dose = self.solve(policy, [r.scored for r in rollouts() if r.completion], tokens_at_once)
        self.sigma = dose.sigma
        return dose

    def solve(self, policy: Policy, sequences: Sequence[Scored], tokens_at_once: int) -> Dose:
        """σ for the section's dose on those prefixes."""
        # Spikes are stated by rate and size; what is matched is the core that they are added to.
        core = self
        if self.section.actual_shape == "spikes":
            core = Mismatch(replace(self.section, shape="gaussian"), 0)
            core.seed = self.seed
        side, same_states = self.section.side, self.section.actual_site in ("logits", "head")

        def found(sigma: float) -> float:
            # Shared noise makes none: its σ is that of the sampler alone, whose placebo it is.
            sampler = policy if side == "trainer" else core._disturbed(policy, sigma, "sampler")
            alone = side in ("sampler", "both-shared")
            trainer = policy if alone else core._disturbed(policy, sigma, "trainer")
            return frozen.divergence(sampler, trainer, same_states=same_states)

        frozen = Frozen(policy, sequences, tokens_at_once)
        return solve(self.section.target, found, frozen.positions)

    def record(self, rollouts: Sequence[Rollout], step: int, kernels: Kernels) -> list[Rollout]:
        """Rollouts with the noise of site `record` on their log-probabilities: what was drawn stays.

        ε is added to the log-odds of the sampled token: log p − log(p + (1 − p)·e^−ε).
        """
        sigma = self.size(step)
        if sigma is None or self.section.actual_site != "record":
            return list(rollouts)
        noise = self._noise(sigma, "sampler", 0)
        return [replace(rollout, logprobs=recorded(rollout, noise, kernels)) for rollout in rollouts]

    def flip(self, rollouts: Sequence[Rollout], step: int, exact: Policy) -> list[Rollout]:
        """Rollouts in order of their ids; in step `degree` of the cause `flipped-token` a token of them is another."""
        due = self.section.cause == FLIPPED and step == self.section.degree
        return flipped(rollouts, exact) if due else list(rollouts)

    def gradients(self, gradients: dict[str, Tensor], kernels: Kernels, step: int) -> dict[str, Tensor]:
        """Gradients with the noise of site `gradients`, relative to each tensor's root mean square."""
        sigma = self.size(step)
        if sigma is None or self.section.actual_site != "gradients":
            return gradients
        noise = self._noise(sigma, "trainer", step)
        return {name: on_gradient(gradient, noise, name, step, kernels) for name, gradient in gradients.items()}

    def _on(self, step: int) -> bool:
        """Whether that step is one of those that the section names."""
        section = self.section
        return step >= section.start and not (section.stop and step >= section.stop)

    def direction(self, policy: Policy, step: int) -> dict[str, Tensor] | None:
        """δW of the sampler's weights by stack, float32, as it is in a step; None where other numbers are disturbed,
        or none, or the head alone, which a tied model has no stack for."""
        if self.section.actual_site != "weights" or self.section.side == "trainer" or not self.size(step):
            return None
        kernels = policy.ops.kernels
        clean, noisy = (
            each.transformer.parameters.stacked(kernels) for each in (policy, self._seen(policy, step, "sampler"))
        )
        return {
            name: kernels.cast(noisy[name], torch.float32) - kernels.cast(clean[name], torch.float32) for name in clean
        }

    def _seen(self, policy: Policy, step: int, side: str) -> Policy:
        if not self._on(step) or self.section.side not in (side, "both-shared", "both-independent"):
            return policy
        if self.section.cause in CAUSES:
            return self._caused(policy, side)
        sigma = self.size(step)
        if sigma is None:
            return policy
        if self.section.actual_site not in ("gradients", "record"):
            return self._disturbed(policy, sigma, side)
        return policy

    def _noise(self, sigma: float, side: str, version: int) -> Noise:
        salt = SALTS[side] if self.section.side == "both-independent" else 0
        return Noise(self.section, int(keys.mixed(self.seed, salt)[0]), sigma, version)

    def _caused(self, policy: Policy, side: str) -> Policy:
        cause = self.section.cause
        held = self._held.get(side)
        if held is None or held[0] is not policy.transformer or held[1] != cause:
            held = policy.transformer, cause, CAUSES[cause](policy, self.section)
            self._held[side] = held
        return replace(held[2], version=policy.version)

    def _disturbed(self, policy: Policy, sigma: float, side: str) -> Policy:
        noise = self._noise(sigma, side, policy.version)
        if self.section.actual_site not in WEIGHT_SITES:
            return replace(policy, ops=Noisy(policy.ops, noise, policy.config))
        if self.scales is None:
            raise RuntimeError("the weights that the run began with are not known yet")
        held = self._held.get(side)
        if held is None or held[0] is not policy.transformer or held[1] != noise.digest:
            held = policy.transformer, noise.digest, disturbed(policy, noise, self.scales)
            self._held[side] = held
        return replace(held[2], version=policy.version)


def check_mismatch(recipe: Recipe) -> None:
    """Raises RecipeError for what the section's own check cannot see."""
    section = recipe.mismatch
    if section.off:
        return
    if section.cause != "none":
        _check_cause(recipe)
    if section.actual_site == "logits" and section.cause == "none" and recipe.sampling.temperature == 0.0:
        raise RecipeError("mismatch.site = logits: sampling.temperature = 0 is greedy, which noise has no size for")


def _check_cause(recipe: Recipe) -> None:
    section = recipe.mismatch
    where = f"mismatch.cause = {section.cause}"
    if section.cause == "split-kv" and section.side != "sampler":
        raise RecipeError(f"{where} befalls decode, which only the sampler has: side must be sampler")
    if section.cause in BY_SCHEDULE and section.side == "both-shared":
        raise RecipeError(f"{where} gives bits that depend on the schedule: they cannot be the same on both sides")
    if section.side == "both-independent":
        raise RecipeError(f"{where} draws nothing that could be independent: say side = both-shared")
    if section.ramp:
        raise RecipeError(f"{where} has no size that could grow: mismatch.ramp must be 0")
    if section.cause == "missed-sync" and recipe.sync.every > 1:
        raise RecipeError(f"{where} counts a publish a step: sync.every must be 1")
