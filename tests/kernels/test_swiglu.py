"""swiglu: two roundings, as the model's own code has them, and its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import (
    LAYOUTS,
    Layout,
    agree,
    assert_same_bits,
    assert_within,
    flushing_denormals,
    gradient,
    normal,
    wild,
)
from memory import far_rows
from vexact_kernels.contract import DTYPES, Kernels, grad_dtype
from vexact_kernels.reference import Reference


def both(kernels: Kernels, gate_up: Tensor, dy: Tensor) -> list[Tensor]:
    return [kernels.swiglu(gate_up), kernels.swiglu_backward(gate_up, dy)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 15, 16, 31, 33, 127, 129, 1000, 1536])
def test_all_implementations_agree(everyone: list[Kernels], width: int, dtype: torch.dtype) -> None:
    gate_up, dy = wild(5, 2 * width, dtype=dtype, seed=1), gradient(5, width, dtype=dtype, seed=2)
    agree(lambda k: both(k, gate_up, dy), everyone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_no_bit(everyone: list[Kernels], layout: Layout, dtype: torch.dtype) -> None:
    gate_up, dy = wild(6, 70, dtype=dtype, seed=1), gradient(6, 35, dtype=dtype, seed=2)
    expected = both(everyone[0], gate_up, dy)
    for kernels in everyone:
        assert_same_bits(both(kernels, layout(gate_up), layout(dy)), expected, kernels.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_know_its_batch(everyone: list[Kernels], dtype: torch.dtype) -> None:
    gate_up, dy = wild(6, 66, dtype=dtype, seed=1), gradient(6, 33, dtype=dtype, seed=2)
    y, dx = both(everyone[0], gate_up, dy)
    gate_up[::2] = torch.nan
    for kernels in everyone:
        actual = both(kernels, gate_up, dy)
        assert_same_bits([t[1::2] for t in actual], [y[1::2], dx[1::2]], kernels.name)
        assert_same_bits([t[0] for t in both(kernels, gate_up[3:4], dy[3:4])], [y[3], dx[3]], kernels.name)


def test_rows_may_lie_further_apart_than_two_to_the_31_elements(compiled: list[Kernels]) -> None:
    gate_up, dy = wild(2, 66, dtype=torch.bfloat16, seed=1), gradient(2, 33, dtype=torch.bfloat16, seed=2)
    assert_same_bits(both(compiled[-1], far_rows(gate_up), far_rows(dy)), both(Reference(), gate_up, dy))


def test_large_and_special_gates_stay_finite(everyone: list[Kernels]) -> None:
    gates = [0.0, -0.0, 90.0, -90.0, -88.8, -87.0, 1e4, -1e4, 3e38, -3e38, 2.0**-149]
    gate_up = torch.tensor([[*gates, *[0.5] * len(gates)]])
    y, dx = agree(lambda k: both(k, gate_up, torch.ones(1, len(gates))), everyone)
    assert y.isfinite().all()
    assert dx.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_ambient_flush_of_subnormals_changes_nothing(compiled: list[Kernels], dtype: torch.dtype) -> None:
    gate_up = wild(5, 66, dtype=dtype, low=-140, high=-124)
    gate_up[:, :20] = torch.linspace(-90, -80, 20).to(dtype)
    dy = wild(5, 33, dtype=grad_dtype(dtype), low=-10, high=2)
    expected = both(Reference(), gate_up, dy)
    for kernels in compiled:
        with flushing_denormals():
            actual = both(kernels, gate_up, dy)
        assert_same_bits(actual, expected, kernels.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_against_float64(compiled: list[Kernels], dtype: torch.dtype) -> None:
    # s is stored (half an ulp, up to doubled by u) and y is stored; silu itself stays below 2.5 ulps of float32
    gate_up = normal(33, 258, dtype=dtype, seed=1, scale=3.0)
    g, u = gate_up.double().chunk(2, -1)
    bound = {torch.float32: 5.5, torch.bfloat16: 1.6, torch.float16: 1.6}[dtype]
    assert_within(compiled[-1].swiglu(gate_up), g * torch.sigmoid(g) * u, bound=bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_against_float64(compiled: list[Kernels], dtype: torch.dtype) -> None:
    # In float32 fewer than ten roundings; in bf16 and fp16 s enters du stored, and bf16 stores the result.
    grad = grad_dtype(dtype)
    gate_up, dy = normal(17, 66, dtype=dtype, seed=1, scale=3.0), normal(17, 33, dtype=grad, seed=2)
    x64 = gate_up.double().requires_grad_()
    g, u = x64.chunk(2, -1)
    (g * torch.sigmoid(g) * u).backward(dy.double())
    assert x64.grad is not None
    dx = compiled[-1].swiglu_backward(gate_up, dy).double()
    relative = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    assert ((dx - x64.grad).abs() <= relative * x64.grad.abs() + 2.0**-20).all()
