"""Weights disturbed when they are published: a fixed δW, relative to the root mean square of each tensor.

σ of .01 on a tensor means Gaussian noise of one hundredth of that tensor's own RMS on every element. The RMS is that of
the weights that the run began with, so δW is the same from the first version to the last. Matrices only: embedding,
projections, head; the weights of norms and biases stay.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from vexact.model.parameters import HEAD, Matrix, stack, unstack
from vexact.model.policy import Policy
from vexact.model.wrapped import Labelled
from vexact.study import keys
from vexact.study.noise import Noise, plus
from vexact_kernels import Kernels

Scales = Mapping[str, float]  # by Hugging Face name; that of a tied head is HEAD


def scales_of(policy: Policy, site: str) -> dict[str, float]:
    """Root mean square of each matrix that noise at the site (`weights` or `head`) disturbs."""
    kernels = policy.ops.kernels
    if site == "head":
        return {HEAD: rms(kernels.unpack(policy.transformer.head.packed), kernels)}
    tensors = unstack(policy.config, policy.transformer.parameters.stacked(kernels))
    return {name: rms(tensor, kernels) for name, tensor in tensors.items() if tensor.ndim == 2}


def disturbed(policy: Policy, noise: Noise, scales: Scales) -> Policy:
    """The policy with noise on its weights. Known by a digest of its own; the version is the same."""
    transformer = copy.copy(policy.transformer)
    kernels = policy.ops.kernels
    if noise.site == "head":
        head = transformer.head
        noisy = _noisy(HEAD, kernels.unpack(head.packed), noise, scales[HEAD], kernels)
        transformer.head = Matrix(head.name, kernels.pack(noisy), head.bias)
    else:
        tensors = unstack(policy.config, transformer.parameters.stacked(kernels))
        changed = {
            name: _noisy(name, tensor, noise, scales[name], kernels) if name in scales else tensor
            for name, tensor in tensors.items()
        }
        built = Policy.build(policy.config, lambda name: stack(policy.config, changed, name), kernels, policy.dtype)
        transformer = built.transformer
    return Policy(transformer, Labelled(policy.ops, noise.digest), policy.version)


def rms(tensor: Tensor, kernels: Kernels) -> float:
    total = float(kernels.sum_squares(kernels.cast(tensor, torch.float32).contiguous()))
    return float((total / tensor.numel()) ** 0.5)


def _noisy(name: str, tensor: Tensor, noise: Noise, scale: float, kernels: Kernels) -> Tensor:
    """tensor [rows, columns], the noise of a row drawn at (name, row)."""
    wide = kernels.cast(tensor.contiguous(), torch.float32)
    row_keys = keys.mixed(noise.seed, keys.named(name), keys.of(range(len(tensor))))
    epsilon = noise.epsilon(row_keys, tensor.shape[1], kernels)
    size = torch.full((), noise.sigma * scale, dtype=torch.float32, device=wide.device)
    return kernels.cast(plus(wide, epsilon * size), tensor.dtype)
