"""Trainers of tiny models and rollouts that their policies could have sampled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from helpers import assert_same_bits
from vexact.model.parameters import EMBEDDING, unstack
from vexact.model.policy import Policy, Scored
from vexact.model.rollout import Rollout
from vexact.model.tiny import tiny_config, tiny_weights
from vexact.ranks import Ranks
from vexact.recipe import KLSection, LossSection, OptimizerSection, RemedySection
from vexact.study.remedies import remedy_of
from vexact.training.trainer import Trainer, policy_of
from vexact_kernels import Kernels, load

LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34)  # completion tokens of a step
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"head_dim": 16, "hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1,
              "tie_word_embeddings": False},
    "llama": {"head_dim": 16, "tie_word_embeddings": False},
}  # fmt: skip
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "head_dim": 16, "num_attention_heads": 2,
         "num_key_value_heads": 1, "intermediate_size": 24}  # fmt: skip

# Every objective, and between them everything that is added to one.
EVERYTHING = {
    "gspo": LossSection(name="gspo", epsilon_low=0.05, epsilon_high=0.05, epsilon_length=12.0,
                        kl=KLSection(0.1, "k3+"), entropy_coef=0.01),
    "cispo": LossSection(name="cispo", cap=1.2, anchor="recomputation", epochs=2, mini_batches=3,
                         remedy=RemedySection(token="tis", token_high=1.3)),
    "reinforce": LossSection(name="reinforce", kl=KLSection(0.1, "k2"), mini_batches=2,
                             remedy=RemedySection(token="tis", token_high=1.3, sequence="rejection",
                                                  sequence_level="geometric", sequence_high=1.05)),
    "ppo": LossSection(anchor="recomputation", dual_clip=1.5, epochs=2, mini_batches=2, kl=KLSection(0.1, "k3"),
                       aggregation="seq-mean-token-sum", entropy_coef=0.01,
                       remedy=RemedySection(sequence="rejection", sequence_high=3.0, sequence_ratio="current")),
}  # fmt: skip


def make_trainer(
    family: str = "qwen3",
    dtype: torch.dtype = torch.float32,
    loss: LossSection | None = None,
    kernels: Kernels | None = None,
    changes: dict[str, Any] | None = None,
    ranks: Ranks | None = None,
    **optimizer: Any,
) -> Trainer:
    """A fresh trainer; the same arguments give the same bits."""
    config = tiny_config(family, **FAMILIES[family], **(changes or {}))
    section = OptimizerSection(**{"lr": 1e-3, **optimizer})
    remedy = remedy_of((loss or LossSection()).remedy)
    return Trainer.of(config, tiny_weights(config), kernels or load(), dtype, loss, section, ranks, remedy=remedy)


def make_rollouts(policy: Policy, lengths: Sequence[int] = LENGTHS, prompt: int = 4) -> list[Rollout]:
    """On-policy rollouts of given completion lengths: random tokens with the log-probabilities of the policy."""
    generator = torch.Generator().manual_seed(len(lengths))
    rollouts = []
    for index, length in enumerate(lengths):
        tokens = torch.randint(0, 256, (prompt + index + length,), generator=generator).tolist()
        first = prompt + index
        rollout = Rollout(
            request=index // 2,
            sample=index % 2,
            prompt=tokens[:first],
            completion=tokens[first:],
            logprobs=policy.logprobs([Scored(tokens, first)]).logprob,
            finish="length",
            temperature=1.0,
            version=policy.version,
            digest=policy.digest,
        )
        rollouts.append(rollout)
    return rollouts


def shifted(rollouts: Sequence[Rollout], scale: float = 0.4) -> list[Rollout]:
    """The same rollouts as another policy would have recorded them, so that ratios spread around 1."""
    generator = torch.Generator().manual_seed(7)
    return [
        replace(rollout, logprobs=rollout.logprobs + scale * torch.randn(len(rollout.completion), generator=generator))
        for rollout in rollouts
    ]


def some_advantages(count: int) -> Tensor:
    """Both signs, float32."""
    return torch.randn(count, generator=torch.Generator().manual_seed(3))


def poisoned(trainer: Trainer, tokens: Iterable[int]) -> Trainer:
    """The same trainer, but for some rows of its embedding, which hold NaN: nothing can follow those tokens."""
    masters, policy = trainer.optimizer.masters, trainer.policy
    masters[EMBEDDING][list(tokens)] = torch.nan
    trainer.policy = policy_of(policy.config, masters, policy.ops.kernels, policy.dtype)
    return trainer


def gradients_of(trainer: Trainer) -> dict[str, Tensor]:
    """Of the step before, by Hugging Face name."""
    return unstack(trainer.policy.config, trainer.gradients.totals())


def assert_same_step(trainer: Trainer, expected: Trainer) -> None:
    """Gradients, masters, moments and published weights of two trainers, in every bit."""
    for name, gradient in gradients_of(expected).items():
        assert_same_bits(gradients_of(trainer)[name], gradient, f"gradient of {name}")
    for name, master in expected.optimizer.masters.items():
        assert_same_bits(trainer.optimizer.masters[name], master, f"master of {name}")
        assert_same_bits(trainer.optimizer.second[name], expected.optimizer.second[name], f"moment of {name}")
    assert trainer.fingerprint() == expected.fingerprint()
