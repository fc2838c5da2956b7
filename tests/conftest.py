"""Fixtures of every test: fresh memory is NaN, and the implementations of the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import vexact_kernels
from vexact_kernels.contract import Kernels
from vexact_kernels.cpu import Cpu
from vexact_kernels.reference import Reference


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    """torch fills what `torch.empty` and its kin return with NaN (integers with their largest value)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def compiled() -> list[Kernels]:
    """The C++ of every instruction set that this machine has, the baseline first."""
    return [Cpu(name) for name in reversed(vexact_kernels.available())]


@pytest.fixture(scope="session")
def everyone(compiled: list[Kernels]) -> list[Kernels]:
    """The reference, then all compiled sets."""
    return [Reference(), *compiled]
