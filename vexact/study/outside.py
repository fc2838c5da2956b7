"""Noise outside of a forward: on what the sampler writes down, and on what the trainer adds up."""

from __future__ import annotations

import torch
from torch import Tensor

from vexact.model.origin import Addresses, Origin
from vexact.model.rollout import Rollout
from vexact.study import keys
from vexact.study.noise import Noise, plus
from vexact_kernels import Kernels


def recorded(rollout: Rollout, noise: Noise, kernels: Kernels) -> Tensor:
    """The rollout's log-probabilities with σ·ε added to the log-odds of each token, float32 [tokens]; what was drawn
    stays. log p becomes log p − log(p + (1 − p)·e^−σε), which is 0 at most.
    """
    if not rollout.completion:
        return rollout.logprobs
    origin = Origin(rollout.request, rollout.sample, len(rollout.prompt))
    rows = torch.arange(len(rollout.prompt) - 1, len(rollout.tokens) - 1)
    at = Addresses.of([origin], [rollout.tokens], [0]).at(rows)
    epsilon = noise.epsilon(noise.row_keys("record", at), 1, kernels)[:, 0] * noise.sigma
    logprob = rollout.logprobs.to(kernels.device)
    p = kernels.exp(logprob)
    shift = -kernels.log(p + (torch.ones_like(p) - p) * kernels.exp(-epsilon))
    disturbed = plus(logprob, torch.where(epsilon == 0, 0.0, shift))
    return torch.where(disturbed > 0, 0.0, disturbed).to(rollout.logprobs.device)


def on_gradient(gradient: Tensor, noise: Noise, name: str, step: int, kernels: Kernels) -> Tensor:
    """gradient float32 [rows, columns] or [columns] of the stack of that name, with σ·RMS·ε added to each element."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    rms = (float(kernels.sum_squares(gradient.contiguous())) / gradient.numel()) ** 0.5
    row_keys = keys.mixed(noise.seed, keys.named(name), step, keys.of(range(len(rows))))
    size = torch.full((), noise.sigma * rms, dtype=torch.float32, device=gradient.device)
    return plus(gradient, (noise.epsilon(row_keys, rows.shape[1], kernels) * size).reshape(gradient.shape))
