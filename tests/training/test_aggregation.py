"""The divisor of a token makes the sum over tokens the mean that the mode names."""

from __future__ import annotations

import pytest
import torch

from vexact.recipe import LossSection
from vexact.training.aggregation import divisors

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34)


def direct(mode: str, losses: list[torch.Tensor], scale: int) -> float:
    """The mode read aloud, in float64."""
    if mode == "token-mean":
        return float(torch.cat(losses).mean())
    if mode == "seq-mean-token-mean":
        return float(torch.stack([loss.mean() for loss in losses]).mean())
    sums = torch.stack([loss.sum() for loss in losses])
    return float(sums.mean() / (scale if mode == "seq-mean-token-sum-norm" else 1))


@pytest.mark.parametrize("mode", MODES)
def test_the_sum_over_tokens_is_the_mean_that_the_mode_names(mode: str) -> None:
    generator = torch.Generator().manual_seed(1)
    losses = [torch.randn(length, generator=generator, dtype=torch.float64) for length in LENGTHS]
    divisor = divisors(LENGTHS, LENGTHS, LossSection(aggregation=mode, loss_scale_factor=64)).double()
    found = float((torch.cat(losses) / divisor).sum())
    assert found == pytest.approx(direct(mode, losses, 64), rel=1e-12)
    for other in MODES:
        if other != mode:
            assert found != pytest.approx(direct(other, losses, 64), rel=1e-3)


@pytest.mark.parametrize(
    ("mode", "expected"), zip(MODES, ([6] * 6, [3, 6, 6, 9, 9, 9], [3] * 6, [30] * 6), strict=True)
)
def test_divisors_count_what_the_mode_names(mode: str, expected: list[int]) -> None:
    section = LossSection(aggregation=mode, loss_scale_factor=10)
    assert divisors([1, 2, 3], [1, 2, 3], section).tolist() == expected


@pytest.mark.parametrize(("mode", "expected"), zip(MODES, ([3] * 5, [2, 2, 4, 4, 4], [2] * 5, [20] * 5), strict=True))
def test_tokens_that_a_mask_leaves_out_are_not_counted(mode: str, expected: list[int]) -> None:
    """One of two and two of three tokens are trained."""
    section = LossSection(aggregation=mode, loss_scale_factor=10)
    assert divisors([1, 2], [2, 3], section).tolist() == expected
