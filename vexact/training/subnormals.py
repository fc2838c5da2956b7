"""Arithmetic that keeps subnormals, whatever the caller's floating-point mode.

The kernels shield themselves. What a step computes beside them is torch's, and that obeys the flush mode of the thread
it runs in: a loss of 1e-41 would be 0 for a caller who once called `torch.set_flush_denormal(True)`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

ALONE = 1 << 15  # elements that torch computes in the asking thread: its others keep the mode they were born in


@contextmanager
def keeping_subnormals() -> Iterator[None]:
    """Inside, this thread neither flushes results nor reads subnormals as 0; behind it, what was there is back.

    Also a decorator.
    """
    flushed = flushes()
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)


def flushes() -> bool:
    """Whether this thread loses subnormals. Python's floats live in the mode of torch's, which cannot be asked."""
    return sys.float_info.min * 0.5 == 0.0
