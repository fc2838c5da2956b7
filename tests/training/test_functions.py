"""The functions of a loss are the kernels' in every bit, and their gradients those of float64 mathematics."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import assert_same_bits, assert_within, normal
from vexact.training import functions
from vexact_kernels import Kernels, load

KERNELS = load()
Function = Callable[[Tensor, Kernels], Tensor]
X = normal(3, 700, seed=1).abs() + 0.01


def gradient(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    function(x).backward(dy)
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("function", "theirs", "bound"),
    [
        (functions.exp, torch.exp, 2.0),  # exp to 1 ulp, which a product may double, and a rounding
        (functions.log, torch.log, 0.5),  # one division
        (functions.sum, torch.sum, 0.0),
        (functions.mean, torch.mean, 0.5),  # one division
    ],
)
def test_gradients_are_those_of_float64(function: Function, theirs: Callable[[Tensor], Tensor], bound: float) -> None:
    dy = normal(*function(X, KERNELS).shape, seed=2)
    exact = gradient(theirs, X.double(), dy.double())
    assert_within(gradient(lambda x: function(x, KERNELS), X, dy), exact, bound=bound)


def test_values_are_the_kernels_own() -> None:
    assert_same_bits(functions.exp(X, KERNELS), KERNELS.exp(X))
    assert_same_bits(functions.log(X, KERNELS), KERNELS.log(X))
    assert_same_bits(functions.sum(X, KERNELS), KERNELS.sum(X))
    for count in (1, 3, 7, 1000, 2100):
        rounded = np.float32(KERNELS.sum(X.flatten()[:count]).numpy()) / np.float32(count)
        assert_same_bits(functions.mean(X.flatten()[:count], KERNELS), torch.tensor(rounded))


def test_values_and_gradients_are_those_of_the_specification() -> None:
    reference = load("reference")
    for function in (functions.exp, functions.log, functions.sum, functions.mean):
        dy = normal(*function(X, KERNELS).shape, seed=2)
        assert_same_bits(function(X, KERNELS), function(X, reference))
        ours, written = (gradient(lambda x, k=k, f=function: f(x, k), X, dy) for k in (KERNELS, reference))  # type: ignore[misc]
        assert_same_bits(ours, written)


def test_a_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one element"):
        functions.mean(torch.empty(0), KERNELS)
