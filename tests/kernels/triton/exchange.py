"""Instructions that read and write memory, or another thread's registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.triton.arrays import MASK, Words, floats, signed, words
from kernels.triton.ptx import Instruction
from kernels.triton.registers import Registers, listed


class Exchange(Registers):
    """Each method makes an instruction's step, which takes the threads that are active."""

    def _move_memory(self, one: Instruction, parts: list[str]) -> Callable[[Words], None]:
        space = next((p.split("::")[0] for p in parts if p.split("::")[0] in ("global", "shared", "param")), "")
        if not space:
            raise NotImplementedError(one.op)
        kind, size = parts[-1], int(parts[-1][1:]) // 8
        loads = parts[0] == "ld"
        vector, place = one.operands if loads else reversed(one.operands)
        names, (base, offset) = listed(vector), self._address(place)

        def step(active: Words) -> None:
            if space == "param":
                value = np.full(self.threads, self.parameters[base] & (2**64 - 1), dtype=np.uint64)
                self._put(names[0], self._loaded(value, kind), active)
                return
            where = (self._get(base) + np.uint64(offset & (2**64 - 1)))[active]
            if space == "shared":
                held, at = self.shared, where & MASK[32]
            else:
                held, at = self.memory.places(where, size * len(names))
            for i, name in enumerate(names):
                index = (at + np.uint64(i * size))[:, None] + np.arange(size, dtype=np.uint64)
                if loads:
                    value = np.zeros(self.threads, dtype=np.uint64)
                    value[active] = held[index].view(f"<u{size}")[:, 0]
                    self._put(name, self._loaded(value, kind), active)
                else:
                    data = self._get(name)[active].astype(f"<u{size}")
                    held[index] = data[:, None].view(np.uint8).reshape(-1, size)

        return step

    @staticmethod
    def _loaded(value: Words, kind: str) -> Words:
        bits = int(kind[1:])
        value = value & MASK[bits]
        return signed(value, bits).view(np.uint64) if kind.startswith("s") else value

    def _copy(self, one: Instruction, parts: list[str]) -> Callable[[Words], None]:
        if parts[-1] in ("commit_group", "wait_group", "wait_all"):
            return lambda active: None
        (to, to_offset), (source, offset) = (self._address(o) for o in one.operands[:2])
        size = int(one.operands[2], 0)
        count = one.operands[3] if len(one.operands) > 3 else str(size)

        def step(active: Words) -> None:
            at = (self._get(to) + np.uint64(to_offset)) & MASK[32]
            where, wanted = self._get(source) + np.uint64(offset), self._get(count) & MASK[32]
            self.shared[at[active][:, None] + np.arange(size, dtype=np.uint64)] = 0
            some = active & (wanted > 0)
            for n in np.unique(wanted[some]):
                these = some & (wanted == n)
                held, index = self.memory.places(where[these], int(n))
                span = np.arange(int(n), dtype=np.uint64)
                self.shared[at[these][:, None] + span] = held[index[:, None] + span]

        return step

    def _matrix(self, one: Instruction, parts: list[str]) -> Callable[[Words], None]:
        """ldmatrix and stmatrix: thread 8·i + r of a warp names row r of matrix i, of 8 × 8 values of 16 bits."""
        loads = parts[0] == "ldmatrix"
        vector, place = one.operands if loads else reversed(one.operands)
        names, (base, offset) = listed(vector), self._address(place)
        lane = np.arange(self.threads)
        warp, t = lane // 32 * 32, lane % 32

        def step(active: Words) -> None:
            row_at = (self._get(base) + np.uint64(offset)) & MASK[32]
            for i, name in enumerate(names):
                value = np.zeros(self.threads, dtype=np.uint64) if loads else self._get(name)
                for half in (0, 1):
                    row, column = t // 4, 2 * (t % 4) + half
                    row, column = (column, row) if "trans" in parts else (row, column)
                    at = (row_at[warp + 8 * i + row] + (2 * column).astype(np.uint64))[:, None] + np.arange(
                        2, dtype=np.uint64
                    )
                    if loads:
                        pair = self.shared[at].view("<u2")[:, 0]
                        value |= pair.astype(np.uint64) << np.uint64(16 * half)
                    else:
                        pair = (value >> np.uint64(16 * half)).astype("<u2")
                        self.shared[at] = pair[:, None].view(np.uint8).reshape(-1, 2)
                if loads:
                    self._put(name, value, active)

        return step

    def _shuffle(self, one: Instruction, parts: list[str]) -> Callable[[Words], None]:
        to, source, b, c = one.operands[:4]
        name, _, valid = to.partition("|")
        lane = np.arange(self.threads)

        def step(active: Words) -> None:
            amount, limit = self._get(b).astype(np.int64) & 31, self._get(c).astype(np.int64)
            segment, clamp = limit >> 8 & 31, limit & 31
            t = lane % 32
            highest = (t & segment) | (clamp & ~segment)
            lowest = t & segment
            other = {
                "up": t - amount, "down": t + amount, "bfly": t ^ amount, "idx": lowest | (amount & ~segment),
            }[parts[2]]  # fmt: skip
            inside = other >= highest if parts[2] == "up" else other <= highest
            self._put(name, self._get(source)[lane // 32 * 32 + np.where(inside, other, t)], active)
            if valid:
                self._put(valid, inside, active)

        return step

    def _redux(self, one: Instruction, parts: list[str]) -> Callable[[Words], None]:
        f: Any = {"max": np.max, "min": np.min, "add": np.sum}[parts[2]]
        to, source = one.operands[:2]

        def step(active: Words) -> None:
            value = self._get(source)
            value = signed(value, 32) if parts[-1] == "s32" else floats(value) if parts[-1] == "f32" else value
            result = np.repeat(f(value.reshape(-1, 32), axis=1), 32)
            result = words(result) if parts[-1] == "f32" else result
            self._put(to, result.view(np.uint64) if result.dtype == np.int64 else result, active)

        return step
