"""Weights in fewer bits, quantised when they are published and widened again, rounded to the compute dtype.

The projections of all layers; embedding, head and norms stay, as engines that quantise on the fly leave them.

- `fp8-weights`: float8 e4m3 with a scale for each row (output channel).
- `int8-weights`: int8 with a scale for each row.
- `int4-weights`: −7 … 7 with a scale for each 32 columns of a row.

Scales are symmetric, of the largest value, and float32. Activations keep their precision.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vexact.model.parameters import EMBEDDING, HEAD
from vexact.model.policy import Policy
from vexact.recipe import MismatchSection
from vexact.study.causes.caused import labelled
from vexact.study.causes.quantised import INT4_LARGEST, INT8_LARGEST, grouped, integers, scaled_e4m3

GROUP = 32  # columns of a row that share a scale of int4


def fp8_weights(policy: Policy, section: MismatchSection) -> Policy:
    return _quantised(policy, "fp8-weights", scaled_e4m3)


def int8_weights(policy: Policy, section: MismatchSection) -> Policy:
    return _quantised(policy, "int8-weights", lambda x: integers(x, INT8_LARGEST))


def int4_weights(policy: Policy, section: MismatchSection) -> Policy:
    return _quantised(policy, "int4-weights", lambda x: grouped(x, INT4_LARGEST, GROUP))


def _quantised(policy: Policy, label: str, quantise: Callable[[Tensor], Tensor]) -> Policy:
    kernels, transformer = policy.ops.kernels, policy.transformer
    stacked = transformer.parameters.stacked(kernels)

    def published(name: str) -> Tensor:
        tensor = stacked[name]
        if tensor.ndim != 2 or name in (EMBEDDING, HEAD):
            return tensor
        return quantise(kernels.cast(tensor.contiguous(), torch.float32))

    built = Policy.build(policy.config, published, kernels, policy.dtype, policy.version, transformer.rotary)
    return Policy(built.transformer, labelled(policy, label).ops, policy.version)
