"""One policy, its float32 masters, and the step that moves them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vexact.errors import BadInput
from vexact.model.checkpoint import fingerprint
from vexact.model.config import ModelConfig
from vexact.model.gradients import Gradients
from vexact.model.ops import Logprobs
from vexact.model.parameters import stack, stacks, unstack
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.ranks import Ranks
from vexact.recipe import LossSection, OptimizerSection
from vexact.training.advantage import Advantages, advantages_of
from vexact.training.aggregation import divisors
from vexact.training.batch import TrainingBatch
from vexact.training.loss import TokenLosses, Tokens, sequence_log_ratios, token_losses
from vexact.training.metrics import (
    NO_TOKENS,
    StepMetrics,
    TokenRecord,
    UpdateRecord,
    measure_mismatch,
    measure_remedy,
    measure_updates,
)
from vexact.training.optimizer import AdamW, clip_factor
from vexact.training.remedy import Ratios, Remedy, remedy_of
from vexact.training.reward import kl_penalties, shaped_rewards
from vexact.training.shards import Shards
from vexact.training.subnormals import keeping_subnormals
from vexact_kernels import Kernels


class TrainingError(BadInput):
    """Rollouts that cannot be trained on. One line naming the rollout."""


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
    it began with. remedy: by default the one that the loss section names. ranks: by default one process. With more,
    every rank makes the same calls with the same arguments, and all get the same results: shards.py says who computes
    what.

    scored: what `mismatch_*` of the step before compared with the recorded log-probabilities: float32 [tokens] of the
    rollouts that were not dropped, ids ascending; of the first ones only where no more were compared, None where none.
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
        self.remedy = remedy or remedy_of(self.loss.remedy)
        if self.remedy is not None and self.remedy.centre:
            raise ValueError("this trainer cannot centre scores, which the remedy asks for")
        self.optimizer = AdamW(masters, self.section, self.kernels)
        self.gradients = Gradients(policy.config, self.kernels)
        self.scored: Tensor | None = None
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
            penalties = kl_penalties(rollouts, self.policy, self.reference, self.loss, self.section.tokens_at_once)
        shaped = shaped_rewards(rollouts, rewards, penalties, self.loss, max_tokens)
        lengths = [0 if rollout.finish == "nonfinite" else len(rollout.completion) for rollout in rollouts]
        return advantages_of(self.loss.advantage, shaped, [rollout.request for rollout in rollouts], lengths)

    @keeping_subnormals()
    def step(self, rollouts: Sequence[Rollout], advantages: Tensor) -> StepMetrics:
        """Train on rollouts in any order, with the advantage of each (float32 [rollouts], on the host): `epochs` passes
        of `mini_batches` updates each, over consecutive rollouts in order of their ids.

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
        self.scored = None
        if not kept:
            return self._metrics("nothing to train", counts, {})
        batch = self._scored(self._prepare(kept))
        batch, of_remedy = self._weighed(batch)
        measured = {**of_remedy, "tokens": len(batch.behaviour)}
        if self.remedy is not None and self.remedy.before_update(of_remedy) == "discard":
            return self._metrics("discarded by the remedy", counts, {**measured, **self._mismatch(batch, [])})
        updates = self._updates(batch)
        measured = {**measured, **self._mismatch(batch, updates), **measure_updates(updates, self.kernels)}
        return self._metrics(_skipped(updates), counts, measured)

    def publish(self, version: int) -> None:
        """Replace the policy by that of the masters as they are now."""
        self.policy = self.shards.published(self.optimizer.masters, self.policy.dtype, version)

    def fingerprint(self) -> str:
        """sha256 over the policy's weights, in the dtype they compute in."""
        return fingerprint(weights_of(self.policy))

    def _prepare(self, kept: Sequence[tuple[Rollout, Tensor]]) -> TrainingBatch:
        pairs = sorted(kept, key=lambda pair: pair[0].id)
        for (rollout, advantage), (following, _) in zip(pairs, [*pairs[1:], (None, None)], strict=True):
            self._check(rollout, advantage)
            if following is not None and following.id == rollout.id:
                raise TrainingError(f"rollout {rollout.id}: given twice")
        lengths = [len(rollout.completion) for rollout, _ in pairs]
        behaviour = torch.cat([rollout.logprobs for rollout, _ in pairs])
        advantage = torch.stack([advantage for _, advantage in pairs]).repeat_interleave(torch.tensor(lengths))
        columns = (column.to(self.kernels.device) for column in (behaviour, advantage))
        return TrainingBatch([rollout.scored for rollout, _ in pairs], *columns)

    def _check(self, rollout: Rollout, advantage: Tensor) -> None:
        policy, where = self.policy, f"rollout {rollout.id}"
        if rollout.digest != policy.digest:
            raise TrainingError(f"{where}: arithmetic digest {rollout.digest} is not the trainer's {policy.digest}")
        if not 0 <= policy.version - rollout.version <= self.max_lag:
            raise TrainingError(
                f"{where}: sampled by version {rollout.version}, the trainer is at {policy.version} "
                f"and takes a lag of at most {self.max_lag}"
            )
        if rollout.logprobs.shape != (len(rollout.completion),) or rollout.logprobs.dtype != torch.float32:
            raise TrainingError(f"{where}: needs {len(rollout.completion)} float32 logprobs, one a completion token")
        if not rollout.logprobs.isfinite().all():
            raise TrainingError(f"{where}: a recorded logprob is not finite")
        if not advantage.isfinite():
            raise TrainingError(f"{where}: advantage is {advantage.item()}, must be finite")

    def _scored(self, batch: TrainingBatch) -> TrainingBatch:
        """With the log-probabilities that are needed beside those of the gradient passes.

        A single update begins at π_old: what its own forward gives is π_old in every bit.
        """
        several = self.loss.epochs * self.loss.mini_batches > 1
        wanted = self.remedy is not None or (several and self.loss.anchor == "recomputation")
        old = self._logprobs(self.policy, batch) if wanted else None
        in_loss = self.reference is not None and self.loss.kl.place == "loss"
        reference = self._logprobs(self.reference, batch) if self.reference is not None and in_loss else None
        return replace(batch, old=old, reference=reference)

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
        if self.remedy is None or batch.old is None:
            return batch, {}
        correction = batch.old - batch.behaviour
        now = correction if current is None else current - batch.behaviour
        ratios = Ratios(correction, now, batch.cuts, self.kernels)
        found = self.remedy.weights(ratios, torch.ones_like(now, dtype=torch.bool), batch.advantage)
        return replace(batch, weight=found.weights, mask=found.kept), measure_remedy(ratios, found)

    def _updates(self, batch: TrainingBatch) -> list[UpdateRecord]:
        version = self.policy.version + 1
        parts = batch.mini_batches(self.loss.mini_batches)
        updates: list[UpdateRecord] = []
        for _ in range(self.loss.epochs):
            for part in parts:
                if self.remedy is not None and self.remedy.every_update and updates:
                    part, _ = self._weighed(part, self._logprobs(self.policy, part))
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
        gradients = self.gradients.totals() if self.shards.alone else self.shards.gradients()
        norm = self.shards.norm(gradients)
        clip = clip_factor(norm, self.section.max_grad_norm)
        moved = math.isfinite(norm)
        if moved:
            self.optimizer.step(gradients, clip)
            self.publish(version)
        return UpdateRecord(record, *rejected, moved, norm, clip)

    def _backward(self, batch: TrainingBatch, counts: Sequence[int]) -> TokenRecord:
        """Gradients of the update's loss into `self.gradients`, micro-batch by micro-batch."""
        record = TokenRecord(batch.behaviour)
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
        passes = self.policy.gradient_passes(
            batch.sequences[chosen.start : chosen.stop],
            self.gradients,
            self.section.tokens_at_once,
            one_lane=not self.shards.alone,
            recompute=self.section.recompute,
        )
        for part, result in passes:
            rows = slice(first + part.start, first + part.stop)
            tokens = self._losses(batch, divisor, rows, result)
            # The loss is the sum over tokens, so the gradient of each token's loss is 1: nothing is summed here.
            tokens.loss.backward(torch.ones_like(tokens.loss))
            record.current[rows], record.entropy[rows] = result.logprob.detach(), result.entropy.detach()
            record.loss[rows], record.ratio[rows], record.kl[rows] = tokens.loss.detach(), tokens.ratio, tokens.kl
            record.clipped[rows], record.finite[rows] = tokens.clipped, result.finite

    def _losses(self, batch: TrainingBatch, divisor: Tensor, rows: slice, result: Logprobs) -> TokenLosses:
        """Of one micro-batch."""

        def part(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[rows]

        current, mask = result.logprob, part(batch.mask)
        anchor = batch.behaviour[rows] if self.loss.anchor == "bypass" else part(batch.old)
        if anchor is None:
            anchor = current.detach()
        sequence = None
        if self.loss.name == "gspo":
            sequence = sequence_log_ratios(current, anchor, batch.within(rows), mask, self.kernels)
        tokens = Tokens(
            current=current,
            anchor=anchor,
            advantage=batch.advantage[rows],
            divisor=divisor[rows],
            entropy=result.entropy if self.loss.entropy_coef else None,
            reference=part(batch.reference),
            sequence_log_ratio=sequence,
            weight=part(batch.weight),
            mask=mask,
        )
        return token_losses(tokens, self.loss, self.kernels)

    def _mismatch(self, batch: TrainingBatch, updates: Sequence[UpdateRecord]) -> dict[str, Any]:
        first = updates[0].tokens if updates else None
        self.scored = batch.old if batch.old is not None or first is None else first.current
        return {} if self.scored is None else measure_mismatch(self.scored, batch.behaviour[: len(self.scored)])

    def _metrics(self, skipped: str, counts: Mapping[str, int], measured: Mapping[str, Any]) -> StepMetrics:
        values = {**NO_TOKENS, **counts, **measured}
        return StepMetrics(self.policy.version, skipped, self.loss.name, self.loss.aggregation, **values)


def _skipped(updates: Sequence[UpdateRecord]) -> str:
    """Why updates did not move the weights, empty where all of them did."""
    empty = sum(update.tokens is None for update in updates)
    broken = sum(update.tokens is not None and not update.moved for update in updates)
    if broken:
        return "gradient is not finite" + (f" in {broken} of {len(updates)} updates" if len(updates) > 1 else "")
    if empty:
        return "nothing to train" + (f" in {empty} of {len(updates)} updates" if empty < len(updates) else "")
    return ""
