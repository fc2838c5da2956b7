"""One policy, its float32 masters, and the step that moves them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vexact.model.centring import Centres
from vexact.model.checkpoint import fingerprint
from vexact.model.config import ModelConfig
from vexact.model.gradients import Gradients
from vexact.model.ops import Logprobs
from vexact.model.parameters import stack, stacks, unstack
from vexact.model.policy import Policy
from vexact.model.remedy import Ratios, Remedy
from vexact.model.rollout import Rollout
from vexact.ranks import Ranks
from vexact.recipe import LossSection, OptimizerSection
from vexact.training.acceptance import measure_acceptance
from vexact.training.admission import Admission, Source, TrainingError, check_remedy
from vexact.training.advantage import Advantages, advantages_of
from vexact.training.aggregation import divisors
from vexact.training.batch import TrainingBatch
from vexact.training.lag import measure_lag, no_lag
from vexact.training.loss import TokenLosses, Tokens, sequence_columns, token_losses
from vexact.training.metrics import (
    NO_TOKENS,
    StepMetrics,
    TokenRecord,
    UpdateRecord,
    measure_mismatch,
    measure_remedy,
    measure_updates,
    skipped,
)
from vexact.training.optimizer import AdamW, clip_factor
from vexact.training.reward import kl_penalties, shaped_rewards
from vexact.training.shards import Shards
from vexact.training.snapshot import Snapshot
from vexact.training.subnormals import keeping_subnormals
from vexact_kernels import Kernels


def weights_of(policy: Policy) -> dict[str, Tensor]:
    """The policy's weights under their Hugging Face names, in its compute dtype, bit for bit."""
    return unstack(policy.config, policy.transformer.parameters.stacked(policy.ops.kernels))


def policy_of(
    config: ModelConfig, masters: Mapping[str, Tensor], kernels: Kernels, dtype: torch.dtype, version: int = 0
) -> Policy:
    """The policy of float32 masters, rounded once to the dtype it computes in. It shares no memory with them."""
    return Policy.build(config, masters.__getitem__, kernels, dtype, version)


class Trainer:
    """Trains `policy`, which is replaced by its next version at the end of each step that moved the weights.

    masters: every stack that this rank owns, in float32 on the policy's device, updated in place; the policy is theirs,
    rounded once to its dtype. max_lag: how many versions older than the policy a rollout may be. reference: what KL is
    measured from where the loss has one, by default the policy as it is given here: a resumed run hands in the one that
    it began with. remedy: the one that the loss section names, if it names one. ranks: by default one process. With
    more, every rank makes the same calls with the same arguments, and all get the same results: shards.py says who
    computes what.

    view: what the trainer scores and differentiates in the place of its own policy, and of its reference, by default
    that very object.
    accepts: arithmetic digests of samplers that rollouts may come from beside its own. disturb: what is done to an
    update's finished gradients before anything reads them, by default nothing. scores_all: score every token before the
    first of several updates though the loss needs no π_old, so that `mismatch_*` and `scored` are of the whole batch.
    rollbacks: how many were done.

    scored: what `mismatch_*` of the step before compared with the recorded log-probabilities: float32 [tokens] of the
    rollouts that were not dropped, ids ascending; of the first ones only where no more were compared, None where none.
    replayed: the same at the weights that sampled, where the source given to the step was older, else None.
    """

    def __init__(
        self,
        policy: Policy,
        masters: Mapping[str, Tensor],
        loss: LossSection | None = None,
        optimizer: OptimizerSection | None = None,
        max_lag: int = 0,
        reference: Policy | None = None,
        remedy: Remedy | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.policy = policy
        self.kernels = policy.ops.kernels
        self.loss, self.section, self.max_lag = loss or LossSection(), optimizer or OptimizerSection(), max_lag
        self.reference = (reference or policy) if self.loss.kl.coef else None
        self.remedy = remedy
        check_remedy(self.loss, remedy)
        self.view: Callable[[Policy], Policy] = _itself
        self.accepts: set[str] = set()
        self.disturb: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
        self.scores_all = False
        self.rollbacks = 0
        self.optimizer = AdamW(masters, self.section, self.kernels)
        self.gradients = Gradients(policy.config, self.kernels)
        self.scored: Tensor | None = None
        self.replayed: Tensor | None = None
        self._before: Snapshot | None = None
        self._centres: Centres | None = None
        self.shards = Shards(policy.config, self.kernels, ranks or Ranks())

    @staticmethod
    def of(
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        kernels: Kernels,
        dtype: torch.dtype,
        loss: LossSection | None = None,
        optimizer: OptimizerSection | None = None,
        ranks: Ranks | None = None,
        **options: Any,
    ) -> Trainer:
        """From a checkpoint's tensors by Hugging Face name, widened exactly to masters. dtype: that of the policy.

        options: `max_lag`, `reference`, `remedy`.
        """
        shards = Shards(config, kernels, ranks or Ranks())
        masters = {
            name: stack(config, weights, name).to(kernels.device, torch.float32, copy=True).contiguous()
            for name in stacks(config)
            if shards.owns(name)
        }
        return Trainer(shards.published(masters, dtype, 0), masters, loss, optimizer, ranks=ranks, **options)

    @keeping_subnormals()
    def advantages(
        self, rollouts: Sequence[Rollout], rewards: Sequence[float], max_tokens: int | None = None
    ) -> Advantages:
        """What `step` wants to know of rollouts, from the rewards of their task and as the loss section names it.

        max_tokens: of a completion, needed with an overlong buffer. Groups are rollouts of one request. Raises
        ValueError where a reward is not finite.
        """
        penalties = [0.0] * len(rollouts)
        if self.reference is not None and self.loss.kl.place == "reward":
            own, reference = self.view(self.policy), self.view(self.reference)
            penalties = kl_penalties(rollouts, own, reference, self.loss, self.section.tokens_at_once)
        shaped = shaped_rewards(rollouts, rewards, penalties, self.loss, max_tokens)
        lengths = [0 if rollout.finish == "nonfinite" else len(rollout.completion) for rollout in rollouts]
        return advantages_of(self.loss.advantage, shaped, [rollout.request for rollout in rollouts], lengths)

    @keeping_subnormals()
    def step(self, rollouts: Sequence[Rollout], advantages: Tensor, source: Source | None = None) -> StepMetrics:
        """Train on rollouts in any order, with the advantage of each (float32 [rollouts], on the host): `epochs` passes
        of `mini_batches` updates each, over consecutive rollouts in order of their ids.

        source: the policies that sampled them, all of one version; by default the trainer's own. A remedy that centres
        or looks at the lag ratio needs it where rollouts are older.

        Rollouts without a token and those that ended `nonfinite` are dropped and counted. Where nothing is left, or the
        gradient is not finite, weights and version stay as they are; an update whose gradient is not finite, or all of
        whose rollouts the remedy rejects, is left out. A step is one version, however many updates it has. Raises
        TrainingError on rollouts of another arithmetic or version, two of one id, or numbers that are not finite.
        """
        if advantages.shape != (len(rollouts),):
            raise TrainingError(f"{len(rollouts)} rollouts need as many advantages, not {list(advantages.shape)}")
        whole = [pair for pair in zip(rollouts, advantages, strict=True) if pair[0].finish != "nonfinite"]
        kept = [pair for pair in whole if pair[0].completion]
        counts = {
            "rollouts": len(kept),
            "dropped_empty": len(whole) - len(kept),
            "dropped_nonfinite": len(rollouts) - len(whole),
        }
        self.scored = self.replayed = None
        if not kept:
            return self._metrics("nothing to train", counts, {})
        source = self._source(kept, source)
        admission = Admission(self.policy, [self.policy.digest, *sorted(self.accepts)], self.max_lag, source)
        batch = self._scored(admission.batch(kept), source)
        batch, measured = self._weighed(batch)
        measured = {**measured, "tokens": len(batch.behaviour), **self._ahead(batch)}
        if self.remedy is not None and self.remedy.before_update(measured) == "discard":
            return self._metrics("discarded by the remedy", counts, {**measured, **self._mismatch(batch, [])})
        scale = 1.0 if self.remedy is None else self.remedy.lr_scale(measured)
        updates = self._stepped(batch, source, scale)
        measured = {**measured, **self._mismatch(batch, updates), **measure_updates(updates, self.kernels)}
        if batch.old is None:
            measured.update(self._lag(batch))
        return self._metrics(skipped(updates), counts, {**measured, "remedy_lr": scale})

    def roll_back(self) -> None:
        """Take the last step back: masters, moments, rate, version and policy are again what it began with, in every
        bit. Raises RuntimeError where nothing was kept to go back to.
        """
        if self._before is None:
            raise RuntimeError("there is no step to take back")
        self.policy = self._before.restore(self.optimizer)
        self._before = None
        self.rollbacks += 1

    def publish(self, version: int) -> None:
        """Replace the policy by that of the masters as they are now."""
        self.policy = self.shards.published(self.optimizer.masters, self.policy.dtype, version)

    def fingerprint(self) -> str:
        """sha256 over the policy's weights, in the dtype they compute in."""
        return fingerprint(weights_of(self.policy))

    def _source(self, kept: Sequence[tuple[Rollout, Tensor]], source: Source | None) -> Source | None:
        """The policies that sampled, where they are asked for. Raises TrainingError where nobody gave older ones."""
        remedy = self.remedy
        if source is not None or remedy is None or not (remedy.needs_lag or remedy.centre is not None):
            return source
        older = [rollout for rollout, _ in kept if rollout.version != self.policy.version]
        if older:
            raise TrainingError(f"rollout {older[0].id}: the remedy needs the policies that sampled it: give a source")
        own = self.view(self.policy)
        return Source(own, own)

    def _scored(self, batch: TrainingBatch, source: Source | None) -> TrainingBatch:
        """With the log-probabilities that are needed beside those of the gradient passes.

        A single update begins at π_old: what its own forward gives is π_old in every bit.
        """
        several, remedy = self.loss.epochs * self.loss.mini_batches > 1, self.remedy
        looks = remedy is not None and (remedy.beforehand or (several and remedy.needs_lag))
        wanted = looks or (several and (self.scores_all or self.loss.anchor == "recomputation"))
        old = self._logprobs(self.view(self.policy), batch) if wanted else None
        if source is not None and source.exact.version != self.policy.version:
            self.replayed = self._logprobs(source.exact, batch)
        in_loss = self.reference is not None and self.loss.kl.place == "loss"
        begun = self.reference if in_loss else None
        reference = None if begun is None else self._logprobs(self.view(begun), batch)
        return replace(batch, old=old, reference=reference, source=self.replayed)

    def _logprobs(self, policy: Policy, batch: TrainingBatch) -> Tensor:
        found = torch.empty_like(batch.behaviour)
        cuts = batch.cuts
        for _, mine in self.shards.rounds(len(batch.sequences)):
            if mine:
                rows = slice(cuts[mine.start].start, cuts[mine.stop - 1].stop)
                sequences = batch.sequences[mine.start : mine.stop]
                found[rows] = policy.logprobs(sequences, self.section.tokens_at_once).logprob
        self.shards.share([found], batch.lengths)
        return found

    def _weighed(self, batch: TrainingBatch, current: Tensor | None = None) -> tuple[TrainingBatch, dict[str, float]]:
        """With the remedy's weights and mask, and what it measured. current: logprobs, by default those of π_old."""
        if self.remedy is None or batch.old is None or not self.remedy.beforehand:
            return batch, {}
        now = batch.old if current is None else current
        lag = now - (batch.old if batch.source is None else batch.source)
        correction, behaviour = batch.old - batch.behaviour, batch.behaviour
        ratios = Ratios(correction, now - behaviour, batch.cuts, self.kernels, lag, behaviour, now - batch.old)
        found = self.remedy.weights(ratios, torch.ones_like(now, dtype=torch.bool), batch.advantage)
        return replace(batch, weight=found.weights, mask=found.kept), measure_remedy(ratios, found)

    def _ahead(self, batch: TrainingBatch) -> dict[str, float]:
        """What is known before the first update of the lag, and of a step that may be taken back."""
        self.scored = batch.old
        measured: dict[str, float] = self._lag(batch) if batch.old is not None or batch.source is None else {}
        if self.remedy is not None and self.remedy.can_undo and batch.old is not None:
            measured["candidate"] = int(self._before is not None)
            measured.update(measure_acceptance(batch.old - batch.behaviour, batch.advantage, batch.cuts))
        return measured

    def _lag(self, batch: TrainingBatch) -> dict[str, float]:
        """Over what was scored: all tokens, or those of the first update."""
        if batch.source is None:
            return no_lag(len(batch.behaviour), len(batch.sequences))
        if self.scored is None:
            return {}
        count = len(self.scored)
        return measure_lag(self.scored, batch.source[:count], [cut for cut in batch.cuts if cut.stop <= count])

    def _stepped(self, batch: TrainingBatch, source: Source | None, scale: float) -> list[UpdateRecord]:
        """The updates of a step, with its learning rate times `scale`. What it began with is kept where a remedy may
        want it back, unless nothing moved."""
        remedy, rate = self.remedy, self.optimizer.lr
        keeps = remedy is not None and remedy.can_undo
        self._before = Snapshot.of(self.policy, self.optimizer) if keeps else None
        if remedy is not None and remedy.centre is not None and source is not None:
            self._centres = Centres(remedy.centre, source.sampler, source.exact, batch.laws)
        self.optimizer.lr = rate * scale
        try:
            updates = self._updates(batch)
        finally:
            self.optimizer.lr, self._centres = rate, None
        if not any(update.moved for update in updates):
            self._before = None
        return updates

    def _updates(self, batch: TrainingBatch) -> list[UpdateRecord]:
        version = self.policy.version + 1
        parts = batch.mini_batches(self.loss.mini_batches)
        updates: list[UpdateRecord] = []
        for _ in range(self.loss.epochs):
            for part in parts:
                if self.remedy is not None and self.remedy.every_update and updates:
                    part, _ = self._weighed(part, self._logprobs(self.view(self.policy), part))
                updates.append(self._update(part, version))
        return updates

    def _update(self, batch: TrainingBatch, version: int) -> UpdateRecord:
        """One optimizer update on what the remedy kept, to a policy of that version."""
        counts = batch.counts
        chosen = [index for index, count in enumerate(counts) if count]
        rejected = (len(counts) - len(chosen), sum(batch.lengths) - sum(counts))
        if not chosen:
            return UpdateRecord(None, *rejected)
        record = self._backward(batch.take(chosen), [counts[index] for index in chosen])
        gradients = self.disturb(self.gradients.totals() if self.shards.alone else self.shards.gradients())
        norm = self.shards.norm(gradients)
        clip = clip_factor(norm, self.section.max_grad_norm)
        moved = math.isfinite(norm)
        if moved:
            self.optimizer.step(gradients, clip)
            self.publish(version)
        return UpdateRecord(record, *rejected, moved, norm, clip)

    def _backward(self, batch: TrainingBatch, counts: Sequence[int]) -> TokenRecord:
        """Gradients of the update's loss into `self.gradients`, micro-batch by micro-batch."""
        record = TokenRecord(batch.behaviour, batch.advantage, batch.old)
        divisor = divisors(counts, batch.lengths, self.loss).to(self.kernels.device)
        if self.shards.alone:
            self.gradients.clear()
            self._passes(batch, divisor, record, range(len(batch.sequences)))
            return record
        self.shards.clear()
        for lanes, mine in self.shards.rounds(len(batch.sequences)):
            self.gradients.clear()
            if mine:
                self._passes(batch, divisor, record, mine)
            self.shards.fold(self.gradients, lanes)
        self.shards.share(record.columns, batch.lengths)
        return record

    def _passes(self, batch: TrainingBatch, divisor: Tensor, record: TokenRecord, chosen: range) -> None:
        """The chosen sequences of a step: all of them, or those of one lane."""
        first = sum(batch.lengths[: chosen.start])
        passes = self.view(self.policy).gradient_passes(
            batch.sequences[chosen.start : chosen.stop],
            self.gradients,
            self.section.tokens_at_once,
            one_lane=not self.shards.alone,
            recompute=self.section.recompute,
            centres=self._centres,
        )
        for part, result in passes:
            rows = slice(first + part.start, first + part.stop)
            tokens = self._losses(batch, divisor, rows, result)
            # The loss is the sum over tokens, so the gradient of each token's loss is 1: nothing is summed here.
            tokens.loss.backward(torch.ones_like(tokens.loss))
            record.current[rows], record.entropy[rows] = result.logprob.detach(), result.entropy.detach()
            record.loss[rows], record.ratio[rows], record.kl[rows] = tokens.loss.detach(), tokens.ratio, tokens.kl
            record.clipped[rows], record.finite[rows] = tokens.clipped, result.finite
            if self._centres is not None and self._centres.last is not None:
                record.centre[rows] = self._centres.last.weights

    def _losses(self, batch: TrainingBatch, divisor: Tensor, rows: slice, result: Logprobs) -> TokenLosses:
        """Of one micro-batch."""

        def part(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[rows]

        current, mask = result.logprob, part(batch.mask)
        anchor = batch.behaviour[rows] if self.loss.anchor == "bypass" else part(batch.old)
        if anchor is None:
            anchor = current.detach()
        sequences = {}
        if self.loss.name == "gspo":
            sequences = sequence_columns(current, anchor, batch.within(rows), mask, self.kernels)
        tokens = Tokens(
            current=current,
            anchor=anchor,
            advantage=batch.advantage[rows],
            divisor=divisor[rows],
            entropy=result.entropy if self.loss.entropy_coef else None,
            reference=part(batch.reference),
            weight=part(batch.weight),
            mask=mask,
            **sequences,
        )
        return token_losses(tokens, self.loss, self.kernels)

    def _mismatch(self, batch: TrainingBatch, updates: Sequence[UpdateRecord]) -> dict[str, Any]:
        first = updates[0].tokens if updates else None
        self.scored = batch.old if batch.old is not None or first is None else first.current
        found = self.scored if batch.source is None else batch.source  # at the weights that sampled
        return {} if found is None else measure_mismatch(found, batch.behaviour[: len(found)])

    def _metrics(self, why: str, counts: Mapping[str, int], measured: Mapping[str, Any]) -> StepMetrics:
        values = {**NO_TOKENS, **counts, "rollbacks": self.rollbacks, **measured}
        return StepMetrics(self.policy.version, why, self.loss.name, self.loss.aggregation, **values)


def _itself(policy: Policy) -> Policy:
    return policy
