"""What the emulator's registers and memory are: numpy arrays of 64-bit words, and the values that these hold."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]  # uint64 [threads], bool [threads] for predicates
MASK = {bits: np.uint64((1 << bits) - 1) for bits in (1, 8, 16, 32, 64)}


def floats(x: Words) -> Words:
    return x.astype(np.uint32).view(np.float32)


def words(x: Words) -> Words:
    return x.astype(np.float32).view(np.uint32).astype(np.uint64)


def signed(x: Words, bits: int) -> Words:
    """As int64."""
    return (x << np.uint64(64 - bits)).view(np.int64) >> np.int64(64 - bits)


def fused(a: Words, b: Words, c: Words) -> Words:
    """a·b + c on float32, rounded once: the double result is made odd where it is not exact (`kernels/README.md`)."""
    p, d = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    s = p + d
    t = s - p
    e = (p - (s - t)) + (d - t)
    bits = s.view(np.int64)
    step = np.where((e > 0) == (s > 0), 1, -1)
    odd = np.where(np.isfinite(s) & (e != 0) & (bits & 1 == 0), bits + step, bits)
    return odd.view(np.float64).astype(np.float32)


def to_bfloat16(x: Words) -> Words:
    bits = words(x)
    rounded = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), np.uint64(0x7FFF), rounded & np.uint64(0xFFFF))


def to_float16(x: Words) -> Words:
    return x.astype(np.float16).view(np.uint16).astype(np.uint64)


NARROW = {"bf16": to_bfloat16, "f16": to_float16}


def widened(x: Words, kind: str) -> Words:
    """16 bits as float32."""
    if kind == "bf16":
        return floats(x << np.uint64(16))
    return x.astype(np.uint16).view(np.float16).astype(np.float32)


class Memory:
    """Ranges of bytes of this process that may be read and written."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        merged: list[list[int]] = []
        for start, size in sorted(r for r in ranges if r[1]):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], start + size)
            else:
                merged.append([start, start + size])
        self.starts = np.array([start for start, _ in merged], dtype=np.uint64)
        self.ends = np.array([end for _, end in merged], dtype=np.uint64)
        self.bytes = [
            np.ctypeslib.as_array((ctypes.c_uint8 * (end - start)).from_address(start)) for start, end in merged
        ]

    def places(self, address: Words, size: int) -> tuple[NDArray[Any], Words]:
        """The range that holds all of these addresses, and the offsets in it."""
        index = int(np.searchsorted(self.starts, address[0], side="right")) - 1
        if index < 0 or (address < self.starts[index]).any() or (address + np.uint64(size) > self.ends[index]).any():
            raise IndexError(f"addresses {address.min():#x} … {address.max():#x} are outside of the launch's tensors")
        return self.bytes[index], address - self.starts[index]


SIMPLE: dict[str, Callable[..., Words]] = {
    "add": operator.add, "sub": operator.sub, "min": np.minimum, "max": np.maximum, "and": operator.and_,
    "or": operator.or_, "xor": operator.xor, "not": operator.invert, "neg": operator.neg, "abs": np.abs,
}  # fmt: skip
COMPARE: dict[str, Callable[[Words, Words], Words]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


def permuted(a: Words, b: Words, selector: Words) -> Words:
    """prmt: four bytes chosen of eight."""
    eight = a | b << np.uint64(32)
    result = np.zeros_like(a)
    for i in range(4):
        nibble = selector >> np.uint64(4 * i) & np.uint64(15)
        byte = eight >> (np.uint64(8) * (nibble & np.uint64(7))) & np.uint64(255)
        sign = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        result |= np.where(nibble >= 8, sign, byte) << np.uint64(8 * i)
    return result
