"""Products summed in parts: split-K inside one device, and tensor parallelism over several.

A matrix is cut along the columns that a product sums over into `degree` slices, as equal as they go, and each slice is
multiplied by the same kernel.

- `split-k`: every projection and the head. The slices' products leave the kernel as float32, unrounded, and are added
  in float32 in order; the bias follows, and one rounding to the compute dtype ends it, none for logits. Only the order
  of the additions differs.
- `tensor-parallel`: the projections whose columns a tensor-parallel engine cuts, o and down. Each rank's product is
  rounded to the compute dtype, then they are added in order of rank in that dtype, with a rounding at each addition, as
  an all-reduce in the compute dtype does. Column-parallel products (qkv, gate and up, a head cut by vocabulary) are
  whole sums on their rank, and stay exact. The cut of o does not ask whether heads divide by the degree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from vexact.errors import BadInput
from vexact.model.ops import Ops
from vexact.model.parameters import Matrix
from vexact.model.policy import Policy
from vexact.model.transformer import Transformer
from vexact.recipe import MismatchSection
from vexact.study.causes.caused import Caused, OtherHead
from vexact_kernels import Kernels, Packed

Slices = Mapping[str, Sequence[Packed]]  # of each matrix, by its name


def split_k(policy: Policy, section: MismatchSection) -> Policy:
    transformer = policy.transformer
    matrices = [*projections(transformer), transformer.head]
    slices = sliced(matrices, section.degree, policy.ops.kernels)
    return replace(policy, ops=SplitK(policy.ops, f"split-k/{section.degree}", slices))


def tensor_parallel(policy: Policy, section: MismatchSection) -> Policy:
    matrices = [matrix for layer in policy.transformer.layers for matrix in (layer.o, layer.down)]
    slices = sliced(matrices, section.degree, policy.ops.kernels)
    return replace(policy, ops=TensorParallel(policy.ops, f"tensor-parallel/{section.degree}", slices))


class SplitK(OtherHead):
    """slices: of every projection and the head."""

    def __init__(self, inner: Ops, label: str, slices: Slices) -> None:
        super().__init__(inner, label)
        self.slices = slices

    def matmul(self, x: Tensor, weight: Matrix) -> Tensor:
        y = self.kernels.cast(self._total(x, weight), x.dtype)
        return self.inner.stand_in(self.inner.matmul(x, weight), y)

    def product(self, hidden: Tensor, head: Matrix) -> Tensor:
        return self._total(hidden, head)

    def _total(self, x: Tensor, weight: Matrix) -> Tensor:
        """float32 [N, rows]."""
        parts = self.slices[weight.name]
        sums = (self.kernels.matmul(part, w, logits=True) for part, w in zip(cut(x, parts), parts, strict=True))
        y = reduce(self.kernels.add, sums)
        return y if weight.bias is None else y + self.kernels.cast(weight.bias, torch.float32)


class TensorParallel(Caused):
    """slices: of the row-parallel projections."""

    def __init__(self, inner: Ops, label: str, slices: Slices) -> None:
        super().__init__(inner, label)
        self.slices = slices

    def matmul(self, x: Tensor, weight: Matrix) -> Tensor:
        y = self.inner.matmul(x, weight)
        if weight.name not in self.slices:
            return y
        parts = self.slices[weight.name]
        ranks = (self.kernels.matmul(part, w) for part, w in zip(cut(x, parts), parts, strict=True))
        return self.inner.stand_in(y, reduce(self.kernels.add, ranks))


def projections(transformer: Transformer) -> list[Matrix]:
    """Every matrix of every layer."""
    return [matrix for layer in transformer.layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)]


def sliced(matrices: Iterable[Matrix], degree: int, kernels: Kernels) -> Slices:
    """Raises BadInput where a matrix has fewer columns than that."""
    found: dict[str, list[Packed]] = {}
    for matrix in matrices:
        columns = matrix.packed.columns
        if degree > columns:
            raise BadInput(f"mismatch.degree = {degree}: {matrix.name} has only {columns} columns to cut")
        ends = [part * columns // degree for part in range(degree + 1)]
        whole = kernels.unpack(matrix.packed)
        found[matrix.name] = [kernels.pack(whole[:, begin:end].contiguous()) for begin, end in pairwise(ends)]
    return found


def cut(x: Tensor, parts: Sequence[Packed]) -> Sequence[Tensor]:
    """x [N, columns] in the widths of the slices."""
    ends = [0, *accumulate(part.columns for part in parts)]
    return [x[:, begin:end] for begin, end in pairwise(ends)]
