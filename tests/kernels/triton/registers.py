"""The registers of all threads of a block: numpy arrays, one word a thread."""

from __future__ import annotations

import re

import numpy as np

from kernels.triton.arrays import MASK, Memory, Words
from kernels.triton.ptx import Instruction

BITS = {"%rs": 16, "%r": 32, "%rd": 64, "%p": 1}


class Registers:
    """What an instruction reads and writes: registers, the kernel's parameters, shared memory, the tensors' memory."""

    registers: dict[str, Words]
    parameters: dict[str, int]
    memory: Memory

    def __init__(self, threads: int, shared: int) -> None:
        self.threads = threads
        self.shared = np.full(max(shared, 1) + 64, 0xFF, dtype=np.uint8)
        self.lane = np.arange(threads, dtype=np.uint64)
        self.anything = np.full(threads, 2**64 - 1, dtype=np.uint64)

    def _predicate(self, one: Instruction) -> Words:
        value = self.registers[one.predicate.lstrip("!")].astype(bool)
        return ~value if one.predicate.startswith("!") else value

    def _get(self, name: str) -> Words:
        if name.startswith("%"):
            # a register that nothing was put in holds anything: a NaN, as everywhere in these tests
            value = self.registers.get(name, self.anything)
            return value.astype(np.uint64) if value.dtype == bool else value
        if name.startswith("0f"):
            number = int(name[2:], 16)
        elif name == "global_smem":
            number = 0
        elif name in ("true", "false"):
            number = int(name == "true")
        else:
            number = int(name, 0) & (2**64 - 1)
        return np.full(self.threads, number, dtype=np.uint64)

    def _put(self, name: str, value: Words, active: Words) -> None:
        if name == "_":
            return
        bits = BITS[re.match(r"%[a-z]+", name)[0]]  # type: ignore[index]
        value = value.astype(bool) if bits == 1 else value.astype(np.uint64, copy=False) & MASK[bits]
        if not active.all():
            old = self.registers.get(name)
            value = np.where(active, value, np.zeros_like(value) if old is None else old)
        self.registers[name] = value

    def _address(self, operand: str) -> tuple[str, int]:
        base, _, offset = operand.strip("[] ").replace(" ", "").partition("+")
        return base, int(offset or "0")


def listed(operand: str) -> list[str]:
    """The registers of a vector, or the one that stands alone."""
    return [name.strip() for name in operand.strip("{} ").split(",")]
