"""Split-K and tensor parallelism: whose sums, in which order, rounded where."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from caused import caused, exact, k3, recorded, sampled, scored, tokens
from helpers import assert_same_bits, differing, wild
from vexact.errors import BadInput
from vexact.model.parameters import Matrix
from vexact.study.causes.sums import SplitK, TensorParallel, projections, sliced
from vexact_kernels import load
from vexact_kernels.reference import Reference

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
families = pytest.mark.parametrize("family", ["qwen3", "qwen2"])  # the second has biases, and a head of its own
COLUMNS = 37


def ops_of(kind: type[SplitK] | type[TensorParallel], dtype: torch.dtype, degree: int, bias: bool = False) -> Tensor:
    """y [5, 11] of a product over 37 columns in that many parts."""
    kernels, matrix = load(), a_matrix(dtype, bias)
    ops = kind(exact(dtype).ops, "parts", sliced([matrix], degree, kernels))
    return ops.matmul(activations(dtype), matrix)


def a_matrix(dtype: torch.dtype, bias: bool = False) -> Matrix:
    packed = load().pack(torch.randn(11, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype))
    return Matrix("some", packed, torch.linspace(-2, 2, 11).to(dtype) if bias else None)


def activations(dtype: torch.dtype) -> Tensor:
    return torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(2)).to(dtype)


@dtypes
@families
@pytest.mark.parametrize("cause", ["split-k", "tensor-parallel"])
def test_one_part_is_the_exact_engine(cause: str, family: str, dtype: torch.dtype) -> None:
    policy = exact(dtype, family)
    rollouts = sampled(policy)
    other = sampled(caused(cause, policy, degree=1))
    assert tokens(other) == tokens(rollouts)
    assert_same_bits(recorded(other), recorded(rollouts))


@families
@pytest.mark.parametrize("cause", ["split-k", "tensor-parallel"])
def test_more_parts_are_not(cause: str, family: str) -> None:
    policy = exact(torch.bfloat16, family)
    for degree in (2, 8):
        rollouts = sampled(caused(cause, policy, degree=degree))
        assert k3(scored(policy, rollouts) - recorded(rollouts)) > 0


@dtypes
@pytest.mark.parametrize("degree", [2, 3, 8, COLUMNS])
def test_split_k_adds_unrounded_parts_in_order_and_rounds_once(dtype: torch.dtype, degree: int) -> None:
    x, reference, matrix = activations(dtype), Reference(), a_matrix(dtype, bias=True)
    weight = load().unpack(matrix.packed)
    ends = [i * COLUMNS // degree for i in range(degree + 1)]
    parts = [
        reference.matmul(x[:, a:b].contiguous(), reference.pack(weight[:, a:b].contiguous()), logits=True)
        for a, b in pairwise(ends)
    ]
    bias = matrix.bias
    assert bias is not None

    def added(parts: list[Tensor]) -> Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return (total + bias.float()).to(dtype)

    found = ops_of(SplitK, dtype, degree, bias=True)
    assert_same_bits(found, added(parts))
    if degree > 2 and dtype == torch.float32:
        assert differing(found, added(parts[::-1])) > 0  # a mutant: the parts in another order


@dtypes
def test_ranks_round_before_they_add(dtype: torch.dtype) -> None:
    x, kernels, weight = activations(dtype), load(), load().unpack(a_matrix(dtype).packed)
    ends = [0, 9, 18, 27, COLUMNS]
    parts = [
        kernels.matmul(x[:, a:b].contiguous(), kernels.pack(weight[:, a:b].contiguous())) for a, b in pairwise(ends)
    ]
    found = ops_of(TensorParallel, dtype, 4)
    assert_same_bits(found, ((parts[0] + parts[1]) + parts[2]) + parts[3])
    if dtype == torch.bfloat16:
        assert differing(found, ops_of(SplitK, dtype, 4)) > 0  # a mutant: rounded once


def test_only_row_parallel_products_are_cut_over_ranks() -> None:
    ops = caused("tensor-parallel", exact(), degree=2).ops
    assert isinstance(ops, TensorParallel)
    cut = {name.split(".")[-2] for name in ops.slices}
    assert cut == {"o_proj", "down_proj"}
    for matrix in projections(exact().transformer):
        x = wild(3, matrix.packed.columns, dtype=torch.float32, seed=1)
        changed = differing(ops.matmul(x, matrix), exact().ops.matmul(x, matrix))
        assert changed == 0 or matrix.name in ops.slices


def test_more_parts_than_columns_are_refused() -> None:
    with pytest.raises(BadInput, match=r"mismatch.degree = 65: .*qkv_proj.weight has only 64 columns"):
        caused("split-k", exact(), degree=65)
