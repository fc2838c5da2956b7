"""The loss: advantages, objective, KL to the reference policy, remedies."""

from __future__ import annotations

from dataclasses import dataclass, field

from vexact.recipe.remedy import RemedySection
from vexact.recipe.values import RecipeError, choice, number


@dataclass(frozen=True)
class KLSection:
    """Penalty for leaving the reference policy: the one that a run began with. vexact/training/kl.py has the formulas.

    Raises RecipeError for k1 in the loss.
    """

    coef: float = number(0.0, at_least=0.0)  # TRL's beta; 0: no reference policy is kept
    estimator: str = choice("k2", "k3", "k3+", "k1")  # k3+: the value of k3 with the gradient of k2
    place: str = choice("loss", "reward")  # of a token in the loss, of a whole rollout in its reward
    importance: bool = True  # in the loss, off-policy: times π/π_old, held constant (TRL's use_bias_correction_kl)

    def __post_init__(self) -> None:
        if (self.place, self.estimator) == ("loss", "k1"):
            raise RecipeError(
                "loss.kl.estimator = k1 in the loss: log π − log π_ref has the gradient of log π alone, whose mean is "
                "0 whatever π_ref is: noise and no penalty; use k2 or k3+, or loss.kl.place = reward"
            )


@dataclass(frozen=True)
class LossSection:
    """Advantages, the policy loss and what is added to it, and how often a rollout batch is used.

    The names that people know are combinations, here with what their papers and TRL or verl add up to:

    - GRPO: ppo, group_std, seq-mean-token-mean, often kl k3 0.04 · Dr. GRPO: ppo, group_mean, seq-mean-token-sum-norm
    - DAPO: ppo, group_std, token-mean, epsilon_high 0.28, overlong_buffer, groups without spread sampled anew
    - REINFORCE: reinforce with batch_token (REINFORCE++), batch_sequence or leave_one_out (RLOO)
    - GSPO: gspo, group_std, seq-mean-token-mean, epsilons 3e-4 and 4e-4 for sequences of thousands of tokens
      (epsilon_length) · CISPO: cispo, group_std, token-mean
    """

    name: str = choice("ppo", "reinforce", "gspo", "cispo")  # vexact/training/surrogate.py
    advantage: str = choice("group_std", "group_mean", "leave_one_out", "batch_sequence", "batch_token", "reward")
    epsilon_low: float = number(0.2, above=0.0, below=1.0)  # ratios below 1 - epsilon_low are clipped where A < 0
    epsilon_high: float = number(0.2, above=0.0)  # ratios above 1 + epsilon_high are clipped where A > 0
    epsilon_length: float = number(0.0, at_least=0.0)  # gspo: tokens at which both hold; of T: ε·√(it/T). 0: of any
    dual_clip: float = number(0.0, at_least=0.0)  # ppo: ratios above it are clipped where A < 0; 0: off, common: 3
    cap: float = number(5.0, above=0.0)  # cispo: the largest weight itself (TRL's epsilon_high; elsewhere 1 + ε)
    aggregation: str = choice("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    loss_scale_factor: int = number(1, at_least=1)  # the constant of seq-mean-token-sum-norm: usually max_tokens
    entropy_coef: float = number(0.0, at_least=0.0)
    anchor: str = choice("bypass", "recomputation")  # π_old: as recorded by the sampler, or scored by the trainer
    epochs: int = number(1, at_least=1)  # passes over a rollout batch (TRL's num_iterations)
    mini_batches: int = number(1, at_least=1)  # updates of a pass
    overlong_buffer: int = number(0, at_least=0)  # last tokens before max_tokens in which the reward sinks; 0: off
    overlong_penalty: float = number(1.0, at_least=0.0)  # by how much at max_tokens
    kl: KLSection = field(default_factory=KLSection)
    remedy: RemedySection = field(default_factory=RemedySection)

    def __post_init__(self) -> None:
        if 0.0 < self.dual_clip <= 1.0:
            raise RecipeError(f"loss.dual_clip = {self.dual_clip} must be above 1, or 0 for none")
        if self.epsilon_length and self.name != "gspo":
            raise RecipeError(
                f"loss.epsilon_length = {self.epsilon_length:g} with loss.name = {self.name}: only the bounds of gspo, "
                "on a mean over a sequence, depend on its length"
            )
        divergence = self.kl.coef if self.kl.place == "loss" else 0.0
        updates = self.epochs * self.mini_batches
        self.remedy.check(self.name, self.anchor, self.entropy_coef, divergence, updates)
