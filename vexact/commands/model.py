"""A policy as the command line names it, and its answers as plain data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vexact.errors import BadInput
from vexact.model.policy import Policy
from vexact.testing import bits
from vexact_kernels import Kernels

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(model: str, kernels: Kernels, dtype: str | None) -> Policy:
    return Policy.load(model, kernels, None if dtype is None else DTYPES[dtype])


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_bits(values: Tensor) -> list[str]:
    """float32 [n] as eight hexadecimal digits each."""
    return [f"{value & 0xFFFFFFFF:08x}" for value in bits(values).tolist()]


def from_bits(digits: Sequence[str]) -> Tensor:
    """The float32 tensor whose `as_bits` these are. Raises BadInput."""
    values = [int(text, 16) for text in digits]
    if any(not 0 <= value < 1 << 32 for value in values):
        raise BadInput("a log-probability's bits are eight hexadecimal digits")
    return torch.tensor([value - (value >> 31 << 32) for value in values], dtype=torch.int32).view(torch.float32)


def check_ids(ids: Sequence[int], policy: Policy, what: str, least: int = 1) -> None:
    """Raises BadInput on a sequence that is too short or too long, or an id outside the vocabulary."""
    config = policy.config
    if len(ids) < least:
        raise BadInput(f"{what}: {len(ids)} tokens, at least {least} needed")
    if len(ids) > config.max_positions:
        raise BadInput(f"{what}: {len(ids)} tokens exceed the model's {config.max_positions} positions")
    for token in ids:
        if not 0 <= token < config.vocab_size:
            raise BadInput(f"{what}: token id {token} is outside the vocabulary of {config.vocab_size}")


def check_writable(flag: str, path: Path) -> None:
    """Raises BadInput where a file cannot be written there: heard of at once and not after a minute of work."""
    if path.is_dir():
        raise BadInput(f"{flag}: {path} is a folder")
    if not path.parent.is_dir():
        raise BadInput(f"{flag}: {path.parent} is not a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInput(f"{flag}: {path} cannot be written")


def logprob_data(values: Tensor) -> dict[str, Any]:
    """Log-probabilities in decimal, which is for reading, and in bits, which are exact."""
    return {"logprobs": values.tolist(), "logprob_bits": as_bits(values)}
