"""AdamW: one written expression an element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import agree, assert_same_bits, flushing_denormals, normal, unaligned, wild
from vexact_kernels.contract import Kernels
from vexact_kernels.reference import Reference

LEARNING_RATE, BETA1, BETA2, EPS, WEIGHT_DECAY = 1e-3, 0.9, 0.95, 1e-8, 0.1


def scalars(t: int, clip: float = 1.0) -> dict[str, Any]:
    """What the host computes in float64 for step t = 1, 2, …"""
    return {
        "clip": clip,
        "beta1": BETA1,
        "beta2": BETA2,
        "eps": EPS,
        "decay": 1 - LEARNING_RATE * WEIGHT_DECAY,
        "step": LEARNING_RATE / (1 - BETA1**t),
        "rsqrt_correction2": 1 / (1 - BETA2**t) ** 0.5,
    }


def three_steps(kernels: Kernels, master: Tensor, gradients: list[Tensor], clip: float = 1.0) -> list[Tensor]:
    state = [master.clone(), torch.zeros_like(master), torch.zeros_like(master)]
    for t, gradient in enumerate(gradients, start=1):
        kernels.adamw(state[0], gradient, state[1], state[2], **scalars(t, clip))
    return state


@pytest.mark.parametrize("n", [1, 3, 15, 16, 17, 31, 33, 127, 129, 1000])
def test_all_implementations_agree(everyone: list[Kernels], n: int) -> None:
    master, gradients = normal(n, seed=9), [wild(n, seed=t) for t in range(3)]
    agree(lambda k: three_steps(k, master, gradients, clip=0.37), everyone)


def test_large_tensors_agree(compiled: list[Kernels]) -> None:
    master, gradients = normal(100, 1003, seed=9), [wild(100, 1003, seed=t) for t in range(3)]
    agree(lambda k: three_steps(k, master, gradients), compiled)


def test_unaligned_memory_and_its_neighbours(compiled: list[Kernels]) -> None:
    gradient = wild(33)
    for kernels in compiled:
        expected = three_steps(kernels, torch.ones(33), [gradient])
        buffers = [torch.full((35,), 7.0) for _ in range(3)]
        for buffer, start in zip(buffers, (1.0, 0.0, 0.0), strict=True):
            buffer[1:-1] = start
        kernels.adamw(buffers[0][1:-1], unaligned(gradient), buffers[1][1:-1], buffers[2][1:-1], **scalars(1))
        for buffer, value in zip(buffers, expected, strict=True):
            assert_same_bits(buffer[1:-1], value, kernels.name)
            assert (buffer[[0, -1]] == 7.0).all()


def test_zero_gradients_only_decay(everyone: list[Kernels]) -> None:
    master = normal(33)
    after, first, second = agree(lambda k: three_steps(k, master, [torch.zeros(33)]), everyone)
    assert_same_bits(after, master * torch.tensor(1 - LEARNING_RATE * WEIGHT_DECAY))
    assert first.count_nonzero() == second.count_nonzero() == 0


def test_subnormals_and_an_ambient_flush(compiled: list[Kernels]) -> None:
    master, gradients = wild(129, low=-140, high=-120), [wild(129, low=-76, high=-60, seed=t) for t in range(3)]
    expected = three_steps(Reference(), master, gradients)
    for kernels in compiled:
        with flushing_denormals():
            actual = three_steps(kernels, master, gradients)
        assert_same_bits(actual, expected, kernels.name)


def test_three_steps_against_torch_in_float64(compiled: list[Kernels]) -> None:
    # about ten float32 roundings a step; the update is the learning rate in size
    master, gradients = normal(1000, seed=9), [normal(1000, seed=t) for t in range(3)]
    exact = torch.nn.Parameter(master.double())
    optimizer = torch.optim.AdamW(
        [exact], lr=LEARNING_RATE, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY, foreach=False
    )
    for gradient in gradients:
        exact.grad = gradient.double()
        optimizer.step()
    after, *_ = three_steps(compiled[-1], master, gradients)
    difference = (after.double() - exact.detach()).abs()
    assert (difference <= 3 * 2.0**-23 * master.double().abs() + 2.0**-20 * LEARNING_RATE).all()
