"""The floating-point environment of a thread is its caller's own: it reaches no kernel and no kernel leaves one."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from helpers import assert_same_bits, flushing_denormals, normal, wild
from vexact_kernels.contract import Kernels

ROUNDING = {"downward": 0x400, "upward": 0x800, "toward zero": 0xC00}  # fenv.h of x86-64

BORN_FLUSHING = """
import sys
import torch
torch.set_flush_denormal(True)  # before any thread of the pool exists: each is born with it
torch.set_num_threads(4)
from vexact_kernels import load
kernels = load("cpu", sys.argv[1])
tiny = torch.full((1 << 20,), 1, dtype=torch.int32).view(torch.float32)  # each the smallest subnormal
x = torch.full((64, 256), 2.0**-70)
sums = kernels.add(tiny, tiny), kernels.matmul(x, kernels.pack(x)), kernels.sum(tiny)
torch.set_flush_denormal(False)
assert (tiny * 1.0).count_nonzero() < len(tiny), "inconclusive: no thread of the pool flushes"
print(*(sorted(set(y.flatten().view(torch.int32).tolist())) for y in sums), sep=";")
"""


@contextmanager
def rounding(mode: int) -> Iterator[ctypes.CDLL]:
    """The C library, with the calling thread's rounding mode set."""
    libm = ctypes.CDLL("libm.so.6")
    assert libm.fesetround(mode) == 0
    try:
        yield libm
    finally:
        libm.fesetround(0)


def some_of_each(kernels: Kernels, x: Tensor, w: Tensor, ids: Tensor, ones: Tensor) -> list[Tensor]:
    """Sums, products, quotients and roots."""
    logprob, _, max_, sum_, _ = kernels.logprob(x, ids, ones)
    y, rstd = kernels.rmsnorm(x, w[0], 1e-5)
    return [kernels.matmul(x, kernels.pack(w)), kernels.swiglu(x), kernels.exp(x), kernels.sum(x), y, rstd,
            logprob, max_, sum_]  # fmt: skip


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the rounding modes are those of x86-64")
@pytest.mark.parametrize("mode", ROUNDING)
def test_the_callers_rounding_mode_reaches_no_kernel_and_is_his_again(compiled: list[Kernels], mode: str) -> None:
    given = normal(33, 66, seed=1), normal(40, 66, seed=2), torch.arange(33), torch.ones(33)
    for kernels in compiled:
        expected = some_of_each(kernels, *given)
        with rounding(ROUNDING[mode]) as libm:
            actual = some_of_each(kernels, *given)
            after = libm.fegetround()
        assert after == ROUNDING[mode]
        assert_same_bits(actual, expected, kernels.name)


def test_the_callers_flush_of_subnormals_is_his_again(compiled: list[Kernels]) -> None:
    x, subnormal = wild(5, 33), torch.full((33,), 2.0**-140)
    for kernels in compiled:
        with flushing_denormals():
            kernels.exp(x)
            flushed = subnormal * 1.0
        assert flushed.count_nonzero() == 0, kernels.name
        kernels.exp(x)
        assert (subnormal * 1.0).count_nonzero() == 33, kernels.name


def test_threads_that_were_born_flushing_keep_subnormals(compiled: list[Kernels]) -> None:
    command = [sys.executable, "-c", BORN_FLUSHING, compiled[-1].name.removeprefix("cpu:")]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    product = torch.tensor(256 * 2.0**-140).view(torch.int32).item()
    assert output.strip() == f"[2];[{product}];[{1 << 20}]"
