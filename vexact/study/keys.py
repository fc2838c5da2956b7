"""64-bit keys that noise is drawn at: a function of what they name, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vexact.model.origin import EMPTY, rolled, signed

Keys = NDArray[np.uint64]


def named(text: str) -> int:
    """64 bits for a name."""
    return rolled(EMPTY, text.encode())


def mixed(first: int | Keys, *rest: int | Keys) -> Keys:
    """One key from several, in order: numbers, or columns [n] of them. By the finaliser of splitmix64."""
    key = _column(first)
    for part in rest:
        key = _finalised(key * np.uint64(0x9E3779B97F4A7C15) + _column(part) + np.uint64(0x632BE59BD9B4E019))
    return key


def column(x: Tensor) -> Keys:
    """int64 [n] on the host as unsigned bits."""
    return x.numpy().view(np.uint64)


def tensor(keys: Keys, device: torch.device) -> Tensor:
    """As kernels take them: int64 [n] of the same bits."""
    return torch.from_numpy(keys.view(np.int64)).to(device, non_blocking=True)


def uniforms(keys: Keys) -> NDArray[np.float64]:
    """In [0, 1), 53 bits of each key."""
    return (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53


def of(names: Iterable[int]) -> Keys:
    return np.array([signed(name) for name in names], dtype=np.int64).view(np.uint64)


def _column(part: int | Keys) -> Keys:
    return of([part]) if isinstance(part, int) else part


def _finalised(key: Keys) -> Keys:
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))
