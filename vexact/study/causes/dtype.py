"""A side that computes in another dtype: `other-dtype`.

Weights are those that the policy computes with, in its dtype, and are rounded again: what an engine does that is sent
published weights, not masters. Activations, keys and values are of the other dtype too, so it needs pages of its own.
"""

from __future__ import annotations

from vexact.model.config import DTYPES
from vexact.model.policy import Policy
from vexact.recipe import MismatchSection


def other_dtype(policy: Policy, section: MismatchSection) -> Policy:
    """The policy itself where that is its dtype already. Its arithmetic digest says which dtype it is."""
    dtype, transformer, kernels = DTYPES[section.dtype], policy.transformer, policy.ops.kernels
    if dtype == policy.dtype:
        return policy
    stacked = transformer.parameters.stacked(kernels)
    built = Policy.build(policy.config, stacked.__getitem__, kernels, dtype, policy.version, transformer.rotary)
    return Policy(built.transformer, policy.ops, policy.version)
