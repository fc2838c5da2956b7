"""What losses are written in beside exact elementwise arithmetic: exp, log, sum and mean, by the kernels.

float32 in, float32 out. Gradients are elementwise, one rounding each, and are themselves not differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vexact_kernels import Kernels


def exp(x: Tensor, kernels: Kernels) -> Tensor:
    """Any shape; the gradient is dy·y."""
    return _Exp.apply(x, kernels)


def log(x: Tensor, kernels: Kernels) -> Tensor:
    """Any shape; the gradient is dy / x."""
    return _Log.apply(x, kernels)


def sum(x: Tensor, kernels: Kernels) -> Tensor:
    """S over the elements in logical order → []; the gradient is dy for each."""
    return _Sum.apply(x, kernels)


def mean(x: Tensor, kernels: Kernels) -> Tensor:
    """S divided by the number of elements → []; the gradient is dy / n for each. Raises ValueError on no elements."""
    if x.numel() == 0:
        raise ValueError("a mean needs at least one element")
    total = sum(x, kernels)
    # Not by a Python number: on a GPU torch would multiply by its reciprocal, which rounds twice.
    return total / torch.full_like(total, float(x.numel()))


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Kernels) -> Tensor:
        y = kernels.exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return dy * y, None


class _Log(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(x)
        return kernels.log(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return dy / x, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Kernels) -> Tensor:
        ctx.shape = x.shape
        return kernels.sum(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy.expand(ctx.shape), None
