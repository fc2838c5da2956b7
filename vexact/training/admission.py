"""Which rollouts a step may be trained on, and the batch that they become."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vexact.errors import BadInput
from vexact.model.policy import Policy
from vexact.model.remedy import Remedy
from vexact.model.rollout import Rollout
from vexact.recipe import LossSection
from vexact.training.batch import TrainingBatch


class TrainingError(BadInput):
    """Rollouts that cannot be trained on. One line naming the rollout."""


@dataclass(frozen=True)
class Source:
    """The policies at the weights θ_s that sampled a step's rollouts, all of one version.

    exact: in the trainer's arithmetic, p_s. sampler: as the sampler computes it, q; not asked where rollouts keep
    the law that they were drawn from.
    """

    exact: Policy
    sampler: Policy


@dataclass(frozen=True)
class Admission:
    """What a trainer takes. digests: arithmetic of the samplers whose rollouts may come; max_lag: in versions."""

    policy: Policy
    digests: Collection[str]
    max_lag: int
    source: Source | None = None

    def batch(self, kept: Sequence[tuple[Rollout, Tensor]]) -> TrainingBatch:
        """Rollouts, each with its advantage (float32 []), in order of their ids. Raises TrainingError."""
        pairs = sorted(kept, key=lambda pair: pair[0].id)
        for (rollout, _), (following, _) in zip(pairs, [*pairs[1:], (None, None)], strict=True):
            self._check(rollout)
            if following is not None and following.id == rollout.id:
                raise TrainingError(f"rollout {rollout.id}: given twice")
        lengths = [len(rollout.completion) for rollout, _ in pairs]
        behaviour = torch.cat([rollout.logprobs for rollout, _ in pairs])
        advantage = torch.stack([advantage for _, advantage in pairs]).repeat_interleave(torch.tensor(lengths))
        if not (behaviour.isfinite().all() and advantage.isfinite().all()):  # of all together: one by one takes long
            raise TrainingError(_not_finite(pairs))
        behaviour, advantage = (column.to(self.policy.device) for column in (behaviour, advantage))
        laws = {rollout.id: rollout.law for rollout, _ in pairs if rollout.law is not None}
        if laws and len(laws) < len(pairs):
            bare = next(rollout for rollout, _ in pairs if rollout.law is None)
            raise TrainingError(f"rollout {bare.id}: has no law, others keep what they were drawn from")
        return TrainingBatch([rollout.scored for rollout, _ in pairs], behaviour, advantage, laws=laws)

    def _check(self, rollout: Rollout) -> None:
        version, where = self.policy.version, f"rollout {rollout.id}"
        if rollout.digest not in self.digests:
            raise TrainingError(
                f"{where}: arithmetic digest {rollout.digest} is not the trainer's {', '.join(self.digests)}"
            )
        if not 0 <= version - rollout.version <= self.max_lag:
            raise TrainingError(
                f"{where}: sampled by version {rollout.version}, the trainer is at {version} "
                f"and takes a lag of at most {self.max_lag}"
            )
        if self.source is not None and rollout.version != self.source.sampler.version:
            raise TrainingError(
                f"{where}: sampled by version {rollout.version}, the source given is {self.source.sampler.version}"
            )
        if rollout.logprobs.shape != (len(rollout.completion),) or rollout.logprobs.dtype != torch.float32:
            raise TrainingError(f"{where}: needs {len(rollout.completion)} float32 logprobs, one a completion token")
        law, vocabulary = rollout.law, self.policy.config.vocab_size
        if law is not None and (law.rows, law.vocabulary) != (len(rollout.completion), vocabulary):
            raise TrainingError(
                f"{where}: its law is of {law.rows} tokens and {law.vocabulary} ids, "
                f"not of {len(rollout.completion)} and {vocabulary}"
            )


def _not_finite(pairs: Sequence[tuple[Rollout, Tensor]]) -> str:
    """What is wrong with the first of the rollouts of which one is not finite, or has an advantage that is not."""
    for rollout, advantage in pairs:
        if not rollout.logprobs.isfinite().all():
            return f"rollout {rollout.id}: a recorded logprob is not finite"
        if not advantage.isfinite():
            return f"rollout {rollout.id}: advantage is {advantage.item()}, must be finite"
    raise ValueError("all of them are finite")


def check_remedy(loss: LossSection, remedy: Remedy | None) -> None:
    """Raises ValueError where the loss section's remedy was not handed in, or cannot be centred under its objective."""
    if remedy is None:
        if not loss.remedy.off:
            raise ValueError("the loss section names a remedy: hand in what vexact.study.remedies.remedy_of makes")
        return
    plain = loss.name == "reinforce" and not loss.entropy_coef and not (loss.kl.coef and loss.kl.place == "loss")
    if remedy.centre is not None and not plain:
        raise ValueError("scores are centred under reinforce alone, without an entropy bonus or a KL in the loss")
