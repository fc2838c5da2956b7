"""One policy, its float32 masters, and the step that moves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from vexact.errors import BadInput
from vexact.model.checkpoint import fingerprint
from vexact.model.config import ModelConfig
from vexact.model.gradients import Gradients
from vexact.model.parameters import stack, stacks, unstack
from vexact.model.policy import Policy, Scored
from vexact.model.rollout import Rollout
from vexact.recipe import LossSection, OptimizerSection
from vexact.training.loss import clipped_surrogate, divisors
from vexact.training.metrics import NO_TOKENS, StepMetrics, TokenRecord
from vexact.training.optimizer import AdamW, clip_factor, gradient_norm
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


@dataclass(frozen=True)
class _Step:
    """The rollouts of a step in order of their ids, and what their tokens need: float32 [tokens] each."""

    sequences: list[Scored]
    behaviour: Tensor
    advantage: Tensor
    divisor: Tensor


class Trainer:
    """Trains `policy`, which is replaced by its next version at the end of each step that moved the weights.

    masters: every stack in float32, updated in place; the policy is theirs, rounded once to its dtype. max_lag: how
    many versions older than the policy a rollout may be.
    """

    def __init__(
        self,
        policy: Policy,
        masters: Mapping[str, Tensor],
        loss: LossSection | None = None,
        optimizer: OptimizerSection | None = None,
        max_lag: int = 0,
    ) -> None:
        self.policy = policy
        self.kernels = policy.ops.kernels
        self.loss, self.section, self.max_lag = loss or LossSection(), optimizer or OptimizerSection(), max_lag
        self.optimizer = AdamW(masters, self.section, self.kernels)
        self.gradients = Gradients(policy.config, self.kernels)

    @staticmethod
    def of(
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        kernels: Kernels,
        dtype: torch.dtype,
        loss: LossSection | None = None,
        optimizer: OptimizerSection | None = None,
    ) -> Trainer:
        """From a checkpoint's tensors by Hugging Face name, widened exactly to masters. dtype: that of the policy."""
        masters = {
            name: stack(config, weights, name).to(torch.float32, copy=True).contiguous() for name in stacks(config)
        }
        return Trainer(policy_of(config, masters, kernels, dtype), masters, loss, optimizer)

    @keeping_subnormals()
    def step(self, rollouts: Sequence[Rollout], advantages: Tensor) -> StepMetrics:
        """One update on rollouts in any order, with the advantage of each (float32 [rollouts]).

        Rollouts without a token and those that ended `nonfinite` are dropped and counted. Where nothing is left, or the
        gradient is not finite, weights and version stay as they are. Raises TrainingError on rollouts of another
        arithmetic or version, two of one id, or numbers that are not finite.
        """
        if advantages.shape != (len(rollouts),):
            raise TrainingError(f"{len(rollouts)} rollouts need as many advantages, not {list(advantages.shape)}")
        whole = [pair for pair in zip(rollouts, advantages, strict=True) if pair[0].finish != "nonfinite"]
        kept = [pair for pair in whole if pair[0].completion]
        dropped = {"dropped_empty": len(whole) - len(kept), "dropped_nonfinite": len(rollouts) - len(whole)}
        if not kept:
            return self._metrics("nothing to train", 0, dropped, NO_TOKENS)
        record = self._backward(self._prepare(kept))
        gradients = self.gradients.totals()
        norm = gradient_norm(unstack(self.policy.config, gradients), self.kernels)
        clip = clip_factor(norm, self.section.max_grad_norm)
        if isfinite(norm):
            self.optimizer.step(gradients, clip)
            policy = self.policy
            self.policy = policy_of(
                policy.config, self.optimizer.masters, self.kernels, policy.dtype, policy.version + 1
            )
        skipped = "" if isfinite(norm) else "gradient is not finite"
        measured = {**record.measure(self.kernels), "grad_norm": norm, "clip_factor": clip}
        return self._metrics(skipped, len(kept), dropped, measured)

    def fingerprint(self) -> str:
        """sha256 over the policy's weights, in the dtype they compute in."""
        return fingerprint(weights_of(self.policy))

    def _prepare(self, kept: Sequence[tuple[Rollout, Tensor]]) -> _Step:
        pairs = sorted(kept, key=lambda pair: pair[0].id)
        for (rollout, advantage), (following, _) in zip(pairs, [*pairs[1:], (None, None)], strict=True):
            self._check(rollout, advantage)
            if following is not None and following.id == rollout.id:
                raise TrainingError(f"rollout {rollout.id}: given twice")
        lengths = [len(rollout.completion) for rollout, _ in pairs]
        return _Step(
            sequences=[rollout.scored for rollout, _ in pairs],
            behaviour=torch.cat([rollout.logprobs for rollout, _ in pairs]),
            advantage=torch.stack([advantage for _, advantage in pairs]).repeat_interleave(torch.tensor(lengths)),
            divisor=divisors(lengths, self.loss),
        )

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

    def _backward(self, step: _Step) -> TokenRecord:
        """Gradients of the step's loss into `self.gradients`, micro-batch by micro-batch."""
        self.gradients.clear()
        record = TokenRecord(step.behaviour)
        for rows, result in self.policy.gradient_passes(step.sequences, self.gradients, self.section.tokens_at_once):
            behaviour, advantage, divisor = step.behaviour[rows], step.advantage[rows], step.divisor[rows]
            tokens = clipped_surrogate(result.logprob, behaviour, advantage, divisor, self.loss, self.kernels)
            # The loss is the sum over tokens, so the gradient of each token's loss is 1: nothing is summed here.
            tokens.loss.backward(torch.ones_like(tokens.loss))
            record.current[rows], record.entropy[rows] = result.logprob.detach(), result.entropy.detach()
            record.loss[rows], record.ratio[rows] = tokens.loss.detach(), tokens.ratio
            record.clipped[rows], record.finite[rows] = tokens.clipped, result.finite
        return record

    def _metrics(
        self, skipped: str, rollouts: int, dropped: Mapping[str, int], measured: Mapping[str, Any]
    ) -> StepMetrics:
        return StepMetrics(self.policy.version, skipped, self.loss.aggregation, rollouts, **dropped, **measured)
