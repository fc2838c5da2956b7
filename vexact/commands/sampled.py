"""Pairs of log-probabilities of two engines that run here: what `vexact calibrate --model` describes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vexact.arithmetic import expm1, mean, variance
from vexact.commands.model import check_ids, name_of
from vexact.errors import BadInput
from vexact.model.draws import is_temperature
from vexact.model.policy import Policy, Scored
from vexact.model.rollout import Rollout
from vexact.recipe import Recipe
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.study import keys
from vexact.study.causes.registry import FLIPPED, STALE
from vexact.study.dose import POSITIONS, VALUES, Frozen
from vexact.study.dumps import Dump, Paired
from vexact.study.metrics import Compared
from vexact.study.mismatch import Mismatch, check_mismatch
from vexact.verification.control import huggingface
from vexact.verification.padded import sample_padded
from vexact.verify import described

Rounds = Iterator[list[Request]]
Sampling = Callable[[Sequence[Request]], Sequence[Rollout]]
MUST_BE = "must be 0 or a normal float32 number"  # a temperature


@dataclass(frozen=True)
class Reached:
    """A dose that was asked for, and what became of it.

    target: K3, nats a token. divergence: KL of the disturbed side from the exact one that sigma was solved for, on so
    many positions that the exact policy sampled; fresh: on so many others, sampled under the mismatch. k3: of all
    sampled tokens, with its standard error.
    """

    target: float
    sigma: float
    divergence: float
    positions: int
    fresh: float
    fresh_positions: int
    k3: float
    k3_error: float


@dataclass(frozen=True)
class SampledPair:
    """names: of both sides. scored: float32 [tokens] of each rollout, the trainer's. reached: where a dose was solved
    for."""

    names: tuple[str, str]
    rollouts: tuple[Rollout, ...]
    scored: tuple[Tensor, ...]
    reached: Reached | None = None

    @property
    def pairs(self) -> tuple[tuple[Tensor, Tensor], ...]:
        return tuple((rollout.logprobs, scored) for rollout, scored in zip(self.rollouts, self.scored, strict=True))

    @property
    def paired(self) -> Paired:
        return Paired(self.names, tuple(map(_name, self.rollouts)), self.pairs, ((), ()), 0, 0)

    def lines(self) -> Iterator[str]:
        """JSON lines as `vexact calibrate` and `compare` read them."""
        for rollout, scored in zip(self.rollouts, self.scored, strict=True):
            record = {
                "id": _name(rollout),
                "temperature": rollout.temperature,
                "prompt_ids": list(rollout.prompt),
                "completion_ids": list(rollout.completion),
                "logprobs": rollout.logprobs.tolist(),
                "trainer_logprobs": scored.tolist(),
            }
            yield json.dumps(record) + "\n"


def under_mismatch(policy: Policy, recipe: Recipe, rounds: Rounds, tokens: int) -> SampledPair:
    """At least that many tokens sampled and scored under the recipe's `mismatch`, whatever its schedule.

    Raises BadInput for one that befalls no single forward, or whose dose no size gives.
    """
    section = replace(recipe.mismatch, start=0, stop=0, ramp=0)
    recipe = replace(recipe, mismatch=section)
    if section.actual_site == "gradients" or section.cause in (*STALE, FLIPPED):
        what = f"cause = {section.cause}" if section.cause != "none" else f"site = {section.actual_site}"
        raise BadInput(f"mismatch.{what} is seen only in a run: one version of the weights has no pairs of it")
    check_mismatch(recipe)
    at_once, mismatch = recipe.optimizer.tokens_at_once, Mismatch(section, recipe.seed)
    positions = min(tokens, max(POSITIONS, VALUES // policy.config.vocab_size))
    dose = mismatch.begin(policy, lambda: collected(_sampling(policy), rounds, positions, policy), at_once)
    views = mismatch.sampler(policy, 0), mismatch.trainer(policy, 0)
    rollouts = collected(_sampling(views[0]), rounds, tokens, policy)
    rollouts = mismatch.record(rollouts, 0, policy.ops.kernels)
    scored = rescored(views[1], rollouts, at_once)
    names = [
        f"{recipe.model.path} (vexact {name_of(policy.dtype)}{'' if each is policy else f', {described(section)}'})"
        for each in views
    ]
    if section.actual_site == "record":
        names[0] = names[0].replace(")", f", {described(section)})")
    found = SampledPair((names[0], names[1]), tuple(rollouts), tuple(scored))
    if dose is None:
        return found
    frozen = Frozen(policy, [rollout.scored for rollout in rollouts], at_once)
    fresh = frozen.divergence(views[1] if views[0] is policy else views[0])
    return replace(
        found,
        reached=Reached(
            section.target, dose.sigma, dose.divergence, dose.positions, fresh, frozen.positions, *k3_of(found)
        ),
    )


def of_transformers(
    policy: Policy, recipe: Recipe, rounds: Rounds, tokens: int, dtype: torch.dtype | None = None
) -> SampledPair:
    """At least that many tokens sampled by transformers with the policy's weights, in one padded batch a round, and
    scored by the policy. dtype: of transformers, by default the policy's."""
    model = huggingface(policy, dtype)

    def sample(requests: Sequence[Request]) -> list[Rollout]:
        return sample_padded(model, requests, int(keys.mixed(recipe.seed, requests[0].id)[0]))

    rollouts = collected(sample, rounds, tokens, policy)
    scored = rescored(policy, rollouts, recipe.optimizer.tokens_at_once)
    path = recipe.model.path
    names = (
        f"{path} (transformers {name_of(dtype or policy.dtype)}, a padded batch over a cache)",
        f"{path} (vexact {name_of(policy.dtype)})",
    )
    return SampledPair(names, tuple(rollouts), tuple(scored))


def at_temperatures(dump: Dump, given: float | None = None) -> Dump:
    """The dump, its rollouts that name no temperature at the given one.

    given: by the flag --temperature. Raises BadInput where a rollout has another one, or one that nothing is scored at.
    """
    if given is not None and not is_temperature(given):
        raise BadInput(f"--temperature is {given}, {MUST_BE}")
    rows = {}
    for key, row in dump.rows.items():
        own = given if row.temperature is None else row.temperature
        if own is not None and not is_temperature(own):
            raise BadInput(f"{dump.name}: rollout {key}: temperature is {own}, {MUST_BE}")
        if own is not None and given is not None and np.float32(own) != np.float32(given):
            raise BadInput(f"--temperature is {given}, and {dump.name} says {own} of rollout {key}: leave out the flag")
        rows[key] = replace(row, temperature=own)
    return replace(dump, rows=rows)


def of_dump(dump: Dump, policy: Policy, model: str, tokens_at_once: int) -> Paired:
    """What a dump recorded beside what the policy finds for the same tokens, after the same prompts, each at
    its own temperature; at 1 where it has none.

    Raises BadInput where it has no prompts, texts instead of ids, or tokens that the model does not know.
    """
    ids, sequences, recorded, lives, unscored, empty = [], [], [], [], 0, 0
    for key, row in dump.rows.items():
        where, values = f"{dump.name}: rollout {key}", dump.values[key]
        live = torch.ones(len(row.tokens), dtype=torch.bool) if row.live is None else torch.tensor(row.live).bool()
        if values is None or not live.any():
            unscored, empty = unscored + (values is None), empty + (values is not None)
            continue
        if row.prompt is None or any(isinstance(token, str) for token in row.tokens):
            raise BadInput(f"{where}: to be scored it needs its prompt's ids and its tokens' ids")
        whole = [*row.prompt, *(int(token) for token in row.tokens)]
        check_ids(row.prompt, policy, f"{where}: prompt")
        check_ids(whole, policy, where)
        ids.append(key)
        sequences.append(Scored(whole, len(row.prompt), 1.0 if row.temperature is None else row.temperature))
        recorded.append(torch.from_numpy(values))
        lives.append(live)
    scored = policy.logprobs(sequences, tokens_at_once).logprob.cpu().split([len(each) for each in recorded])
    pairs = tuple((q[live], p[live]) for q, p, live in zip(recorded, scored, lives, strict=True))
    names = f"{dump.name} ({dump.column})", f"{model} (vexact {name_of(policy.dtype)})"
    return Paired(names, tuple(ids), pairs, ((), ()), unscored, empty)


def collected(sample: Sampling, rounds: Rounds, tokens: int, policy: Policy) -> list[Rollout]:
    """Rollouts with at least that many tokens, those without one left out. Of a last round only what may be needed,
    evenly from all of it: files have their prompts by kind."""
    found: list[Rollout] = []
    while (missing := tokens - sum(len(rollout.completion) for rollout in found)) > 0:
        requests = next(rounds)
        longest = sum(request.n * request.max_tokens for request in requests) / len(requests)
        needed = min(len(requests), math.ceil(missing / longest))
        chosen = [i * len(requests) // needed for i in range(needed)]
        for i in chosen:
            _check_fits(requests[i], f"prompt {i}", policy)
        drawn = [rollout for rollout in sample([requests[i] for i in chosen]) if rollout.completion]
        if not drawn:
            raise BadInput("the model gives no token: its logits are not finite")
        found += drawn
    return found


def rescored(policy: Policy, rollouts: Sequence[Rollout], tokens_at_once: int) -> list[Tensor]:
    """float32 [tokens] of each rollout, on the host."""
    values = policy.logprobs([rollout.scored for rollout in rollouts], tokens_at_once).logprob.cpu()
    return list(values.split([len(rollout.completion) for rollout in rollouts]))


def k3_of(found: SampledPair) -> tuple[float, float]:
    """Mean over the tokens, and its standard error."""
    delta = Compared.of(found.pairs).delta
    parts = expm1(delta) - delta
    return mean(parts), math.sqrt(variance(parts) / max(len(parts) - 1, 1))


def _sampling(policy: Policy) -> Sampling:
    return Sampler(policy).run


def _check_fits(request: Request, where: str, policy: Policy) -> None:
    check_ids(request.prompt, policy, where)
    if len(request.prompt) + request.max_tokens > policy.config.max_positions:
        raise BadInput(
            f"{where}: {len(request.prompt)} tokens and max_tokens {request.max_tokens} exceed the model's "
            f"{policy.config.max_positions} positions"
        )


def _name(rollout: Rollout) -> str:
    return f"{rollout.request}/{rollout.sample}"
