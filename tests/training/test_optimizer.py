"""Masters move by the written AdamW, and gradients are clipped to a norm that is summed in a written order."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from helpers import assert_same_bits, flushing_denormals, normal
from vexact.recipe import OptimizerSection
from vexact.training.optimizer import AdamW, clip_factor, gradient_norm, widened
from vexact_kernels import load

KERNELS = load()
SHAPES: dict[str, tuple[int, ...]] = {"b.matrix": (33, 40), "a.norm": (40,)}


def tensors(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    return {name: normal(*shape, seed=seed + i, scale=scale) for i, (name, shape) in enumerate(SHAPES.items())}


def test_five_steps_follow_torch_in_float64() -> None:
    section = OptimizerSection(lr=1e-2, weight_decay=0.1)
    masters = tensors(0)
    exact = {name: torch.nn.Parameter(master.double()) for name, master in masters.items()}
    groups = [
        {"params": [exact["b.matrix"]], "weight_decay": 0.1},
        {"params": [exact["a.norm"]], "weight_decay": 0.0},  # norms and biases are not decayed
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    ours = AdamW(masters, section, KERNELS)
    for step in range(5):
        gradients = tensors(10 * step + 10)
        for name, parameter in exact.items():
            parameter.grad = gradients[name].double()
        theirs.step()
        ours.step(gradients, clip=1.0)
    for name, master in masters.items():
        # Five updates of about 1e-2, each rounded a few times in float32 near 1: 5 · 2^-24 · a few.
        assert (master.double() - exact[name].detach()).abs().max() < 2e-6, name


def test_clipping_scales_the_gradient_before_the_moments() -> None:
    scaled, clipped = AdamW(tensors(0), OptimizerSection(), KERNELS), AdamW(tensors(0), OptimizerSection(), KERNELS)
    gradients = tensors(5)
    scaled.step({name: 0.25 * gradient for name, gradient in gradients.items()}, clip=1.0)
    clipped.step(gradients, clip=0.25)
    for name in SHAPES:
        assert_same_bits(clipped.first[name], scaled.first[name])
        assert_same_bits(clipped.second[name], scaled.second[name])
        assert_same_bits(clipped.masters[name], scaled.masters[name])


def test_a_master_that_is_not_contiguous_float32_is_refused() -> None:
    for master in (torch.zeros(4, 4).T[:2], torch.zeros(4, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"master of some\.weight"):
            AdamW({"some.weight": master[:, ::2] if master.ndim == 2 else master}, OptimizerSection(), KERNELS)


def test_the_norm_is_that_of_all_gradients_together() -> None:
    gradients = tensors(3, scale=5.0)
    exact = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients.values()))
    # halving trees over some thousand squares: a few ulps
    assert gradient_norm(gradients, KERNELS) == pytest.approx(exact, rel=2**-21)


def test_the_norm_sums_tensors_by_name_and_not_by_arrival() -> None:
    gradients = {f"layer.{i}": normal(7, seed=i, scale=10.0**i) for i in range(-3, 4)}
    backwards = dict(reversed(gradients.items()))
    assert gradient_norm(backwards, KERNELS) == gradient_norm(gradients, KERNELS)
    squares = [KERNELS.sum_squares(gradients[name]) for name in sorted(gradients)]
    total = KERNELS.sum(torch.stack(squares)).item()
    assert gradient_norm(gradients, KERNELS) == torch.tensor(math.sqrt(total)).item()


@pytest.mark.parametrize(
    ("norm", "limit", "expected"), [(0.5, 1.0, 1.0), (1.0, 1.0, 1.0), (4.0, 1.0, 0.25), (0.0, 1.0, 1.0)]
)
def test_only_a_norm_above_the_limit_is_clipped(norm: float, limit: float, expected: float) -> None:
    assert clip_factor(norm, limit) == expected


def test_the_clip_factor_is_the_correctly_rounded_float32_quotient() -> None:
    for i in range(1, 200):
        norm = torch.tensor(1.0 + i / 7).item()
        assert clip_factor(norm, 0.1) == torch.div(torch.tensor(0.1), torch.tensor(norm)).item()


@pytest.mark.parametrize(
    "bits", [0, 1, 0x007FFFFF, 0x00800000, 0x3F800001, 0x7F7FFFFF, 0x7F800000, 0x80000001, 0xFF800000]
)
def test_a_float32_is_widened_exactly_even_while_subnormals_are_flushed(bits: int) -> None:
    tensor = torch.frombuffer(bytearray(struct.pack("<I", bits)), dtype=torch.float32).reshape(())
    (expected,) = struct.unpack("<f", struct.pack("<I", bits))
    with flushing_denormals():
        assert widened(tensor).hex() == float(expected).hex()


def test_nan_is_widened_to_nan() -> None:
    assert math.isnan(widened(torch.tensor(math.nan)))
