"""The floating-point mode is set for a while and given back."""

from __future__ import annotations

import pytest
import torch

from helpers import flushing_denormals
from vexact.training.subnormals import flushes, keeping_subnormals


def subnormals_survive() -> bool:
    return bool((torch.tensor([2.0**-126]) * 0.5).view(torch.int32) != 0)


def test_subnormals_survive_inside_and_the_callers_mode_is_back_behind() -> None:
    for flushing in (False, True):
        torch.set_flush_denormal(flushing)
        try:
            assert (flushes(), subnormals_survive()) == (flushing, not flushing)
            with keeping_subnormals():
                assert (flushes(), subnormals_survive()) == (False, True)
            assert (flushes(), subnormals_survive()) == (flushing, not flushing)
        finally:
            torch.set_flush_denormal(False)


def test_the_callers_mode_is_back_behind_an_error() -> None:
    with flushing_denormals():
        with pytest.raises(KeyError), keeping_subnormals():
            raise KeyError
        assert flushes()
    assert not flushes()
