"""Tensors whose rows lie far apart, in memory that is reserved and never touched."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

DISTANCE = 2**31 + 64  # elements between rows: more than a signed 32-bit offset holds


def far_rows(x: Tensor) -> Tensor:
    """The two rows of x again, DISTANCE elements apart. Skips the test where the machine has too little memory."""
    assert len(x) == 2
    need = (DISTANCE + x[0].numel()) * x.element_size()
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < need:
        pytest.skip(f"rows 2^31 elements apart need {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
    memory = torch.from_numpy(np.empty(need, dtype=np.uint8)).view(x.dtype)  # not torch.empty: tests fill that with NaN
    rows = torch.as_strided(memory, x.shape, (DISTANCE, *x.stride()[1:]))
    rows.copy_(x)
    return rows
