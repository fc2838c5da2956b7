"""AdamW on float32 masters, and the norm that gradients are clipped to. Both are written in `kernels/README.md`, §3."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from vexact.recipe import OptimizerSection
from vexact_kernels import Kernels


class AdamW:
    """Decoupled weight decay (arXiv 1711.05101). Masters are updated in place.

    masters: stack → float32. lr: of the next update, at first the section's. State: first and second moments in the
    masters' shapes; βᵗ as running products in float64.
    """

    def __init__(self, masters: Mapping[str, Tensor], section: OptimizerSection, kernels: Kernels) -> None:
        for name, master in masters.items():
            if master.dtype != torch.float32 or not master.is_contiguous() or master.device != kernels.device:
                raise ValueError(f"master of {name} must be float32 and contiguous, on {kernels.device}")
        self.masters, self.section, self.kernels = masters, section, kernels
        self.first = {name: torch.zeros_like(master) for name, master in masters.items()}
        self.second = {name: torch.zeros_like(master) for name, master in masters.items()}
        self.power1 = self.power2 = 1.0
        self.lr = section.lr

    def step(self, gradients: Mapping[str, Tensor], clip: float) -> None:
        """One update with gradients · clip. Weight decay moves matrices only, not norms and biases."""
        section = self.section
        self.power1 *= section.beta1
        self.power2 *= section.beta2
        for name, master in self.masters.items():
            self.kernels.adamw(
                master,
                gradients[name],
                self.first[name],
                self.second[name],
                clip=clip,
                beta1=section.beta1,
                beta2=section.beta2,
                eps=section.eps,
                decay=1.0 - self.lr * section.weight_decay if master.ndim > 1 else 1.0,
                step=self.lr / (1.0 - self.power1),
                rsqrt_correction2=1.0 / math.sqrt(1.0 - self.power2),
            )


def gradient_norm(gradients: Mapping[str, Tensor], kernels: Kernels) -> float:
    """The 2-norm over all tensors, by Hugging Face name: sqrt(S over names ascending of S(g·g)), a float32 value."""
    return norm_of(squares_of(gradients, kernels), kernels)


def squares_of(gradients: Mapping[str, Tensor], kernels: Kernels) -> dict[str, Tensor]:
    """S(g·g) of each tensor, float32 []."""
    return {name: kernels.sum_squares(gradient) for name, gradient in gradients.items()}


def norm_of(squares: Mapping[str, Tensor], kernels: Kernels) -> float:
    """The norm of all tensors from what `squares_of` gave for each, in parts or whole."""
    total = kernels.sum(torch.stack([squares[name] for name in sorted(squares)]))
    # float64 holds more than twice the digits of float32: root, then rounding, is the correctly rounded float32 root.
    return float(np.float32(math.sqrt(widened(total))))


def clip_factor(norm: float, max_norm: float) -> float:
    """max_norm / norm where norm is greater, else 1: a float32 value."""
    limit = float(np.float32(max_norm))
    return float(np.float32(limit / norm)) if norm > limit else 1.0


def widened(x: Tensor) -> float:
    """A float32 [] as a Python float, exactly. From the bits, because an ambient flush would take subnormals for 0."""
    bits = int(x.view(torch.int32)) & 0xFFFFFFFF
    sign, exponent, fraction = bits >> 31, bits >> 23 & 0xFF, bits & 0x7FFFFF
    if exponent == 0xFF:
        return math.nan if fraction else math.copysign(math.inf, -sign)
    magnitude = math.ldexp(fraction | (0x800000 if exponent else 0), max(exponent, 1) - 150)
    return -magnitude if sign else magnitude
