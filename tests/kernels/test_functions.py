"""exp, log, sigmoid, silu: equal bits everywhere, below their stated distance from the exact value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import agree, assert_same_bits, assert_within, flushing_denormals
from vexact_kernels import float32
from vexact_kernels.contract import Kernels
from vexact_kernels.reference import Reference

STEP = 8191  # a prime: over half a million floats, every exponent, all trailing digits


def every_few_floats() -> Tensor:
    return torch.arange(-(2**31), 2**31, STEP).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("name", ["exp", "log"])
def test_all_implementations_agree_over_the_whole_range(everyone: list[Kernels], name: str) -> None:
    x = every_few_floats()
    agree(lambda k: getattr(k, name)(x), everyone)


def test_exp_is_below_one_ulp() -> None:
    # 0.5 from the last rounding and a quarter from the polynomial and the last Horner step
    x = every_few_floats()
    x = x[(x >= float32.EXP_LOWEST) & (x <= float32.EXP_HIGHEST)]
    x = torch.cat([x, torch.linspace(float32.EXP_LOWEST, float32.EXP_HIGHEST, 400_001)])
    assert_within(float32.exp(x), x.double().exp(), bound=1.0, nearest=0.9)


def test_log_is_below_one_ulp() -> None:
    x = every_few_floats()
    x = x[(x > 0) & (x < torch.inf)]
    x = torch.cat([x, torch.linspace(0.5, 2.0, 400_001)])
    assert_within(float32.log(x), x.double().log(), bound=1.0, nearest=0.9)


def test_sigmoid_and_silu_are_below_two_and_a_half_ulps() -> None:
    # exp, the addition and the division each round: 0.75 + 0.5 + 0.5, doubled where a binade is crossed
    x = torch.linspace(-80.0, 80.0, 400_001)
    exact = torch.sigmoid(x.double())
    assert_within(float32.sigmoid(x), exact, bound=2.5)
    assert_within(float32.silu(x), x.double() * exact, bound=2.5)


def test_exp_of_special_values(everyone: list[Kernels]) -> None:
    below = torch.nextafter(torch.tensor(float32.EXP_LOWEST), torch.tensor(-torch.inf)).item()
    above = torch.nextafter(torch.tensor(float32.EXP_HIGHEST), torch.tensor(torch.inf)).item()
    x = torch.tensor([0.0, -0.0, -torch.inf, torch.inf, below, above, 2.0**-149, -(2.0**-149), torch.nan])
    y = agree(lambda k: k.exp(x), everyone)
    assert_same_bits(y, torch.tensor([1.0, 1.0, 0.0, torch.inf, 0.0, torch.inf, 1.0, 1.0, torch.nan]))
    edges = torch.tensor([float32.EXP_LOWEST, float32.EXP_HIGHEST])
    lowest, highest = agree(lambda k: k.exp(edges), everyone).tolist()
    assert lowest >= 2.0**-126
    assert highest < float("inf")


def test_log_of_special_values(everyone: list[Kernels]) -> None:
    x = torch.tensor([1.0, 0.0, -0.0, torch.inf, -torch.inf, -1.0, -(2.0**-149), torch.nan])
    y = agree(lambda k: k.log(x), everyone)
    infinity, nan = torch.inf, torch.nan
    assert_same_bits(y, torch.tensor([0.0, -infinity, -infinity, infinity, nan, nan, nan, nan]))


@pytest.mark.parametrize("n", [0, 1, 3, 15, 16, 17, 31, 33, 127, 129, 1000])
def test_odd_sizes(everyone: list[Kernels], n: int) -> None:
    x = torch.linspace(-3.0, 3.0, n)
    agree(lambda k: (k.exp(x), k.log(x)), everyone)


def test_an_ambient_flush_of_subnormals_changes_nothing(compiled: list[Kernels]) -> None:
    x = torch.arange(1, 4000, dtype=torch.int32).view(torch.float32)  # subnormal arguments of log
    expected = Reference().log(x)
    for kernels in compiled:
        with flushing_denormals():
            y = kernels.log(x)
        assert_same_bits(y, expected, kernels.name)
