"""Comparing bits: two tensors are equal if their integer views are, so 0.0 and -0.0 differ and a NaN equals itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """The first place where two tensors part: its index, both values in decimal and in bits (hexadecimal)."""

    index: tuple[int, ...]
    left: str
    right: str
    left_bits: str
    right_bits: str

    def __str__(self) -> str:
        return f"at {list(self.index)}: {self.left} ({self.left_bits}) and {self.right} ({self.right_bits})"


@dataclass(frozen=True)
class Comparison:
    """How many values were compared and how many differ. `where` names the tensor of the first difference."""

    compared: int = 0
    differ: int = 0
    first: Difference | None = None
    where: str = ""

    def __add__(self, other: Comparison) -> Comparison:
        leading = self if self.first is not None else other
        return Comparison(self.compared + other.compared, self.differ + other.differ, leading.first, leading.where)


def bits(x: Tensor) -> Tensor:
    """The integers of x's bytes: same shape, same width."""
    return x if not x.is_floating_point() else x.contiguous().view(_VIEWS[x.element_size()])


def hexadecimal(x: Tensor) -> str:
    """The bits of a tensor of one element."""
    size = x.element_size()
    return f"0x{int(bits(x).item()) & ((1 << 8 * size) - 1):0{2 * size}x}"


def compare_bits(left: Tensor, right: Tensor, where: str = "") -> Comparison:
    """Count the values whose bits differ; tensors of two devices are compared on the host.

    Raises ValueError where dtype or shape differ: those are not the same kind of thing.
    """
    if left.dtype != right.dtype:
        raise ValueError(f"{where or 'tensors'}: {left.dtype} cannot be compared with {right.dtype}")
    if left.shape != right.shape:
        raise ValueError(f"{where or 'tensors'}: {list(left.shape)} cannot be compared with {list(right.shape)}")
    if left.device != right.device:
        left, right = left.cpu(), right.cpu()
    unequal = (bits(left) != bits(right)).flatten()
    differ = int(unequal.sum())
    if not differ:
        return Comparison(left.numel())
    flat = int(unequal.int().argmax())
    return Comparison(left.numel(), differ, _difference(left, right, flat), where)


def assert_same_bits(left: Tensor, right: Tensor, where: str = "") -> None:
    """Raises AssertionError that says how many values differ and shows the first."""
    __tracebackhide__ = True
    found = compare_bits(left, right, where)
    if found.differ:
        raise AssertionError(
            f"{where or 'tensors'}: {found.differ} of {found.compared} values differ, first {found.first}"
        )


def _difference(left: Tensor, right: Tensor, flat: int) -> Difference:
    index = []
    rest = flat
    for size in reversed(left.shape):
        index.append(rest % size)
        rest //= size
    a, b = left.contiguous().flatten()[flat], right.contiguous().flatten()[flat]
    return Difference(tuple(reversed(index)), _decimal(a), _decimal(b), hexadecimal(a), hexadecimal(b))


def _decimal(x: Tensor) -> str:
    """Enough digits to tell any two float32 apart."""
    return f"{x.item():.9g}" if x.is_floating_point() else str(x.item())
