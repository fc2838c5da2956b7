"""Reinforcement learning of language models with zero training-inference mismatch, equal in every bit.

The arithmetic is `vexact_kernels`; everything built on it is here, in floors: `model`, then `rollout`, `training` and
`tasks`, then the loop and the verification, then `cli`.
"""

__version__ = "0.1.0"
