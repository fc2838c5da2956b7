"""A reader of PTX: which instructions a kernel holds, and which chains its fused multiply-adds form.

Which instructions are allowed stands in `vexact_kernels.triton.instructions`. What that list cannot see is which
operands meet: that is what `chains` is for, and `emulator.py`, which runs the instructions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from vexact_kernels.triton.instructions import PORTABLE

MATRIX = re.compile(r"(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\..*")
REGISTER = re.compile(r"%[a-z]+\d+")


@dataclass(frozen=True)
class Instruction:
    """`op` with its suffixes; operands as written, vectors in braces as one; predicate "%p1", "!%p1" or empty."""

    op: str
    operands: tuple[str, ...]
    predicate: str = ""


class Program:
    """The instructions of the one kernel of a file, labels, and what is declared."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*", "", text)
        header, _, body = text.partition("{\n")
        entry = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)", header, re.S)
        if entry is None:
            raise ValueError("this text has no kernel")
        self.name = entry[1]
        self.parameters = re.findall(r"\.param\s+\.(\w+)[^,]*?\s(\w+)(?:,|\s*$)", entry[2])
        threads = re.search(r"\.reqntid\s+(\d+)", header)
        self.threads = int(threads[1]) if threads else 32
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        for statement in statements(body):
            if statement.endswith(":"):
                self.labels[statement[:-1]] = len(self.instructions)
            elif not statement.startswith("."):
                self.instructions.append(instruction(statement))

    def counts(self) -> Counter[str]:
        return Counter(one.op for one in self.instructions)

    def forbidden(self, allowed: re.Pattern[str] = PORTABLE) -> dict[str, int]:
        """The instructions that the list does not allow, with how often each occurs."""
        return {op: count for op, count in self.counts().items() if not allowed.fullmatch(op)}

    def matrix_forms(self) -> frozenset[str]:
        """The matrix instructions. tcgen05's shape stands in an operand, its descriptor, which is added to its name."""
        return frozenset(self._form(one) for one in self.instructions if MATRIX.fullmatch(one.op))

    def _form(self, one: Instruction) -> str:
        if not one.op.startswith("tcgen05"):
            return one.op
        descriptor = one.operands[3]
        return f"{one.op} {self.constants.get(descriptor, descriptor)}"

    @cached_property
    def constants(self) -> dict[str, str]:
        """Registers that are set to one number and never to anything else."""
        values: dict[str, set[str]] = {}
        for one in self.instructions:
            if one.op.startswith("mov."):
                values.setdefault(one.operands[0], set()).add(one.operands[1])
        return {r: v for r, (v, *rest) in values.items() if not rest and not v.startswith(("%", "{"))}

    def chains(self) -> list[list[Instruction]]:
        """The fused multiply-adds, linked where one's sum is the next one's addend.

        Raises ValueError where a sum is continued twice: that would be a tree, or a sum that is used half-way. Halves
        of a pair (.f32x2) are followed one by one, through the moves that pack and unpack them.
        """
        same = self._aliases()
        made: dict[str, int] = {}  # value → index of the fma that makes it
        links: dict[int, int] = {}
        order: list[Instruction] = []
        for value, addend, one in self._fmas():
            index = len(order)
            order.append(one)
            before = made.get(same(addend))
            if before is not None:
                if before in links:
                    raise ValueError(f"{self.name}: the sum {order[before].operands[0]} is continued twice")
                links[before] = index
            made[same(value)] = index
        chains, later = [], set(links.values())
        for first in (i for i in range(len(order)) if i not in later):
            chain = [first]
            while chain[-1] in links:
                chain.append(links[chain[-1]])
            chains.append([order[i] for i in chain])
        return chains

    def _fmas(self) -> Iterator[tuple[str, str, Instruction]]:
        """(result, addend, instruction), once for each half of a pair."""
        for one in self.instructions:
            if one.op in ("fma.rn.f32", "fma.rn.f32.bf16", "fma.rn.f32.f16"):
                yield one.operands[0], one.operands[3], one
            elif one.op == "fma.rn.f32x2":
                for half in (".lo", ".hi"):
                    yield one.operands[0] + half, one.operands[3] + half, one

    def _aliases(self) -> Aliases:
        """Names of one value: halves of pairs and what is packed into them or taken out."""
        same = Aliases()
        for one in self.instructions:
            if one.op == "mov.b64" and "{" in "".join(one.operands):
                to, source = one.operands
                pair, parts = (source, to) if to.startswith("{") else (to, source)
                for part, half in zip(parts.strip("{} ").split(","), (".lo", ".hi"), strict=True):
                    if part.strip() != "_":
                        same.join(part.strip(), pair + half)
        return same


class Aliases:
    """Sets of names that are one value."""

    def __init__(self) -> None:
        self.parent: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        while name in self.parent:
            name = self.parent[name]
        return name

    def join(self, a: str, b: str) -> None:
        a, b = self(a), self(b)
        if a != b:
            self.parent[a] = b


def statements(body: str) -> Iterator[str]:
    """Instructions, directives and labels (these end with a colon); the braces of inner scopes are taken away."""
    body = re.sub(r"^\s*\.(loc|file|section)\b.*$", "", body, flags=re.M)
    for part in re.split(r"(;|\n\s*\$?[\w$]+:)", body):
        part = " ".join(part.split())
        if re.fullmatch(r"\$?[\w$]+:", part):
            yield part
            continue
        while part.startswith(("{", "}")):
            part = part[1:].strip()
        if part not in ("", ";"):
            yield part


def instruction(text: str) -> Instruction:
    """One statement."""
    match = re.fullmatch(r"(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text)
    if match is None:
        raise ValueError(f"not an instruction: {text!r}")
    predicate, op, rest = match.groups()
    operands = tuple(part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", rest))
    return Instruction(op, operands, predicate or "")
