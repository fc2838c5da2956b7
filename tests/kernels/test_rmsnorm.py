"""rmsnorm: the halving tree, two roundings, and a gradient that meets the residual's before it is rounded."""

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
    segments,
    stream,
    wild,
)
from memory import far_rows
from vexact_kernels.contract import DTYPES, Kernels, grad_dtype
from vexact_kernels.reference import Reference

EPS = 1e-5
SIZES = [1, 3, 31, 33, 127, 129, 576, 1000, 1024, 1025, 1536, 2049]


def forward_and_backward(kernels: Kernels, x: Tensor, w: Tensor, dy: Tensor, residual: Tensor) -> list[Tensor]:
    y, rstd = kernels.rmsnorm(x, w, EPS)
    running = stream(x.shape[-1])
    kernels.rmsnorm_dw(x, rstd, dy, segments([len(x) // 2, len(x)], [1, 0]), running)
    plain = kernels.rmsnorm_dx(x, w, rstd, dy, None)
    met = kernels.rmsnorm_dx(x, w, rstd, dy, residual)
    return [y, rstd, plain, met, running.lane, running.total]


def inputs(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dy, residual = gradient(*shape, dtype=dtype, seed=3), gradient(*shape, dtype=dtype, seed=4)
    return wild(*shape, dtype=dtype, seed=1), 0.5 + normal(shape[-1], dtype=dtype, seed=2).abs(), dy, residual


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", SIZES)
def test_all_implementations_agree(everyone: list[Kernels], width: int, dtype: torch.dtype) -> None:
    given = inputs(5, width, dtype=dtype)
    agree(lambda k: forward_and_backward(k, *given), everyone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rows_of_a_token_run_inside_it(everyone: list[Kernels], dtype: torch.dtype) -> None:
    x, w, dy, residual = inputs(5, 3, 33, dtype=dtype)
    expected = agree(lambda k: forward_and_backward(k, x, w, dy, residual), everyone)
    flat = [t.flatten(0, 1) for t in (x, dy, residual)]
    y, rstd = everyone[0].rmsnorm(flat[0], w, EPS)
    assert_same_bits(expected[0].flatten(0, 1), y)
    assert_same_bits(expected[1].flatten(), rstd)
    running = stream(33)
    everyone[0].rmsnorm_dw(flat[0], rstd, flat[1], segments([6, 15], [1, 0]), running)
    assert_same_bits(expected[4:], [running.lane, running.total])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 35), (6, 3, 35)])
def test_layout_changes_no_bit(
    everyone: list[Kernels], layout: Layout, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, w, dy, residual = inputs(*shape, dtype=dtype)
    expected = forward_and_backward(everyone[0], x, w, dy, residual)
    for kernels in everyone:
        actual = forward_and_backward(kernels, layout(x), w, layout(dy), layout(residual))
        assert_same_bits(actual, expected, kernels.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_know_its_batch(everyone: list[Kernels], dtype: torch.dtype) -> None:
    x, w, dy, residual = inputs(9, 129, dtype=dtype)
    y, rstd, plain, met, *_ = forward_and_backward(everyone[0], x, w, dy, residual)
    x[1::2] = torch.nan
    for kernels in everyone:
        actual = forward_and_backward(kernels, x, w, dy, residual)[:4]
        assert_same_bits([t[::2] for t in actual], [t[::2] for t in (y, rstd, plain, met)], kernels.name)
        one = forward_and_backward(kernels, x[4:5], w, dy[4:5], residual[4:5])[:4]
        assert_same_bits([t[0] for t in one], [t[4] for t in (y, rstd, plain, met)], kernels.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_ambient_flush_of_subnormals_changes_nothing(compiled: list[Kernels], dtype: torch.dtype) -> None:
    low = -70 if dtype != torch.float16 else -24
    x, w = wild(5, 129, dtype=dtype, low=low - 60, high=low), wild(129, dtype=dtype, low=low, high=low + 9)
    dy = wild(5, 129, dtype=grad_dtype(dtype), low=-140, high=-120, seed=1)
    expected = forward_and_backward(Reference(), x, w, dy, dy)
    for kernels in compiled:
        with flushing_denormals():
            actual = forward_and_backward(kernels, x, w, dy, dy)
        assert_same_bits(actual, expected, kernels.name)


def test_rows_may_lie_further_apart_than_two_to_the_31_elements(compiled: list[Kernels]) -> None:
    x, w, dy, residual = inputs(2, 33, dtype=torch.bfloat16)
    expected = forward_and_backward(Reference(), x, w, dy, residual)
    far = far_rows(x), w, far_rows(dy), far_rows(residual)
    assert_same_bits(forward_and_backward(compiled[-1], *far), expected, compiled[-1].name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_against_float64(compiled: list[Kernels], dtype: torch.dtype) -> None:
    # Stored twice: half an ulp of n, up to doubled by w's scale in its binade, and half an ulp of y. In float32 the
    # tree of 10 levels, the division, the root and the reciprocal add at most (10 + 1) / 2 + 3 halves.
    x, w = normal(64, 576, dtype=dtype, seed=1), 0.5 + normal(576, dtype=dtype, seed=2).abs()
    x64 = x.double()
    exact = w.double() * x64 / torch.sqrt((x64 * x64).mean(-1, keepdim=True) + EPS)
    y, _ = compiled[-1].rmsnorm(x, w, EPS)
    assert_within(y, exact, bound=6.0 if dtype == torch.float32 else 1.6)


def test_rows_of_mixed_size_are_rounded_where_the_contract_says(everyone: list[Kernels]) -> None:
    x = torch.where(torch.arange(64) % 2 == 0, 1e-3, 1e3).bfloat16()[None]
    w = torch.linspace(0.5, 1.5, 64).bfloat16()
    y, rstd = agree(lambda k: k.rmsnorm(x, w, EPS), everyone)
    n = (x.float() * rstd[:, None]).bfloat16()
    assert_same_bits(y, (w.float() * n.float()).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_against_float64(compiled: list[Kernels], dtype: torch.dtype) -> None:
    # float32: about twenty roundings; bf16: dx is stored once and n enters dw rounded, 2^-9 each
    kernels, grad = compiled[-1], grad_dtype(dtype)
    x, w = normal(17, 129, dtype=dtype, seed=1), 0.5 + normal(129, dtype=dtype, seed=2).abs()
    dy, residual = normal(17, 129, dtype=grad, seed=3), normal(17, 129, dtype=grad, seed=4)
    x64, w64 = x.double().requires_grad_(), w.double().requires_grad_()
    y = w64 * x64 / torch.sqrt((x64 * x64).mean(-1, keepdim=True) + EPS)
    y.backward(dy.double())
    assert x64.grad is not None
    assert w64.grad is not None
    _, _, plain, met, lane, total = forward_and_backward(kernels, x, w, dy, residual)
    stored = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
    for actual, exact in ((plain, x64.grad), (met, x64.grad + residual.double()), (lane + total, w64.grad)):
        allowed = stored[actual.dtype if actual.dim() > 1 else dtype] * exact.abs().max()
        assert (actual.double() - exact).abs().max() <= allowed
