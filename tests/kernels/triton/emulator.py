"""Runs PTX on numpy arrays, all threads of a block in step: the instructions' results, not their timing.

Memory is the tensors of the launch at their own addresses; an access outside of them is an error. Copies that may be
late (cp.async) are done at once and barriers do nothing, so what is proven is arithmetic and addresses, not races.
Threads that part wait for one another at the earliest instruction. Whatever is not known here raises by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kernels.triton.arithmetic import Arithmetic, Fma
from kernels.triton.arrays import Memory, Words, fused
from kernels.triton.exchange import Exchange
from kernels.triton.ptx import Instruction, Program

DONE = 1 << 30


class Machine(Arithmetic, Exchange):
    """One kernel. `run` starts its blocks one after the other."""

    def __init__(self, program: Program, shared: int, fma: Fma = fused) -> None:
        super().__init__(program.threads, shared)
        self.program, self.fma = program, fma
        self.steps = [self._step(one) for one in program.instructions]

    def run(self, grid: Sequence[int], parameters: Sequence[int], memory: Memory) -> None:
        names = [name for _, name in self.program.parameters]
        self.parameters = dict(zip(names, [*parameters, 0, 0, 0, 0], strict=False))
        self.memory = memory
        for z in range(grid[2] if len(grid) > 2 else 1):
            for y in range(grid[1] if len(grid) > 1 else 1):
                for x in range(grid[0]):
                    self._block({"%ctaid.x": x, "%ctaid.y": y, "%ctaid.z": z})

    def _block(self, special: dict[str, int]) -> None:
        self.registers: dict[str, Words] = {
            name: np.full(self.threads, value, dtype=np.uint64) for name, value in special.items()
        }
        self.registers["%tid.x"] = self.lane
        self.shared[:] = 0xFF
        every = np.ones(self.threads, dtype=bool)
        pcs = np.zeros(self.threads, dtype=np.int64)
        pc, together = 0, True
        while pc < len(self.steps):
            one = self.program.instructions[pc]
            active = every if together else pcs == pc
            chosen = active & self._predicate(one) if one.predicate else active
            if one.op in ("bra", "bra.uni", "ret"):
                target = DONE if one.op == "ret" else self.program.labels[one.operands[0]]
                if together and chosen.all():
                    pc = target
                elif together and not chosen.any():
                    pc += 1
                else:
                    pcs = np.full(self.threads, pc, dtype=np.int64) if together else pcs
                    pcs[active], pcs[chosen] = pc + 1, target
                    pc, together = int(pcs.min()), bool((pcs == pcs[0]).all())
                continue
            if one.predicate == "" or chosen.any():
                self.steps[pc](chosen)
            if together:
                pc += 1
            else:
                pcs[active] = pc + 1
                pc, together = int(pcs.min()), bool((pcs == pcs[0]).all())

    def _step(self, one: Instruction) -> Callable[[Words], None]:
        parts = one.op.split(".")
        for known, make in (
            (("bar", "barrier", "bra", "ret", "fence", "membar"), self._nothing),
            (("ld", "st"), self._move_memory),
            (("cp",), self._copy),
            (("ldmatrix", "stmatrix"), self._matrix),
            (("shfl",), self._shuffle),
            (("redux",), self._redux),
            (("cvt",), self._convert),
            (("mov",), self._mov),
            (("setp",), self._setp),
            (("selp",), self._selp),
        ):
            if parts[0] in known:
                return make(one, parts)
        if any(p.startswith(("f32", "bf16", "f16")) for p in parts):
            return self._float(one, parts)
        return self._integer(one, parts)

    def _nothing(self, one: Instruction, parts: list[str]) -> Callable[[Words], None]:
        return lambda active: None
