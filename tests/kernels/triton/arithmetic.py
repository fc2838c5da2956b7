"""Instructions that compute, compare, convert and move between registers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce

import numpy as np

from kernels.triton.arrays import (
    COMPARE,
    MASK,
    NARROW,
    SIMPLE,
    Words,
    floats,
    fused,
    permuted,
    signed,
    widened,
    words,
)
from kernels.triton.ptx import Instruction
from kernels.triton.registers import Registers, listed

Fma = Callable[[Words, Words, Words], Words]


class Arithmetic(Registers):
    """Each method makes an instruction's step, which takes the threads that are active."""

    fma: Fma = staticmethod(fused)

    def _float(self, one: Instruction, parts: list[str]) -> Callable[[Words], None]:
        table: dict[str, Callable[..., Words]] = {
            "fma": lambda a, b, c: self.fma(a, b, c), "add": operator.add, "sub": operator.sub, "mul": operator.mul,
            "div": operator.truediv, "sqrt": np.sqrt, "neg": operator.neg, "abs": np.abs,
            "max": lambda *x: reduce(np.fmax, x), "min": lambda *x: reduce(np.fmin, x),  # of three on sm_100
        }  # fmt: skip
        f, narrow = table[parts[0]], next((p for p in parts if p in NARROW), None)
        if parts[-1] not in ("f32", "f32x2", "bf16", "f16") or "NaN" in parts or parts[1] not in ("rn", "f32"):
            raise NotImplementedError(one.op)
        to, *sources = one.operands

        def step(active: Words) -> None:
            values = [self._get(s) for s in sources]
            with np.errstate(all="ignore"):
                if parts[-1] == "f32x2":
                    low = words(f(*(floats(v & MASK[32]) for v in values)))
                    high = words(f(*(floats(v >> np.uint64(32)) for v in values)))
                    self._put(to, low | high << np.uint64(32), active)
                elif narrow and "f32" in parts:  # the last operand is float32 already
                    args = [*(widened(v, narrow) for v in values[:-1]), floats(values[-1])]
                    self._put(to, words(f(*args)), active)
                elif narrow:
                    raise NotImplementedError(one.op)
                else:
                    self._put(to, words(f(*map(floats, values))), active)

        return step

    def _integer(self, one: Instruction, parts: list[str]) -> Callable[[Words], None]:
        base, kind = parts[0], parts[-1]
        bits = 1 if kind == "pred" else int(kind[1:])
        is_signed = kind.startswith("s")
        to, *sources = one.operands

        def load(name: str) -> Words:
            value = self._get(name) & MASK[bits]
            return signed(value, bits) if is_signed else value

        def value() -> Words:
            a, *rest = (load(name) for name in sources)
            with np.errstate(all="ignore"):
                if base in SIMPLE:
                    return SIMPLE[base](a, *rest)
                if base in ("mul", "mad"):
                    product = a * rest[0]
                    if "hi" in parts:
                        high = [int(x) * int(y) >> bits for x, y in zip(a, rest[0], strict=True)]
                        return np.array([v & (2**64 - 1) for v in high], dtype=np.uint64)
                    if base == "mul":
                        return product
                    return product.view(np.uint64) + self._get(sources[2])
                if base == "shl":
                    return np.where(rest[0] < bits, self._get(sources[0]) << (self._get(sources[1]) & MASK[8]), 0)
                if base == "shr":
                    amount = np.minimum(self._get(sources[1]) & MASK[32], np.uint64(bits - is_signed))
                    shifted = a >> amount.astype(a.dtype)
                    return np.where(amount >= 64, 0, shifted) if not is_signed else shifted
                if base == "bfe":
                    position, length = (self._get(s) & MASK[8] for s in sources[1:])
                    field = (self._get(sources[0]) & MASK[bits]) >> position
                    if is_signed:
                        return signed(field << (np.uint64(64) - length), 64) >> (64 - length).astype(np.int64)
                    return field & ((np.uint64(1) << length) - np.uint64(1))
                if base in ("div", "rem"):
                    q = np.array(
                        [int(x) if y == 0 else abs(int(x)) // abs(int(y)) * (1 if (x < 0) == (y < 0) else -1)
                         for x, y in zip(a, rest[0], strict=True)], dtype=a.dtype
                    )  # fmt: skip
                    return q if base == "div" else a - q * rest[0]
                if base == "prmt":
                    return permuted(a, rest[0], rest[1])
                if base == "popc":
                    return np.array([bin(int(x)).count("1") for x in a], dtype=np.uint64)
                if base == "clz":
                    return np.array([bits - int(x).bit_length() for x in a], dtype=np.uint64)
            raise NotImplementedError(one.op)

        def step(active: Words) -> None:
            result = value()
            self._put(to, result.view(np.uint64) if result.dtype == np.int64 else result, active)

        if base not in SIMPLE and base not in (
            "mul", "mad", "shl", "shr", "bfe", "div", "rem", "prmt", "popc", "clz",
        ):  # fmt: skip
            raise NotImplementedError(one.op)
        return step

    def _setp(self, one: Instruction, parts: list[str]) -> Callable[[Words], None]:
        compare, kind = parts[1], parts[-1]
        to, a, b = one.operands
        if len(parts) != 3:
            raise NotImplementedError(one.op)

        def step(active: Words) -> None:
            x, y = self._get(a), self._get(b)
            if kind == "f32":
                x, y = floats(x), floats(y)
                unordered = np.isnan(x) | np.isnan(y)
                if compare in ("num", "nan"):
                    result = ~unordered if compare == "num" else unordered
                elif compare.endswith("u") and compare != "u":
                    result = COMPARE[compare[:-1]](x, y) | unordered
                else:
                    result = COMPARE[compare](x, y) & ~unordered
            else:
                bits = int(kind[1:])
                x, y = x & MASK[bits], y & MASK[bits]
                if kind.startswith("s"):
                    x, y = signed(x, bits), signed(y, bits)
                result = COMPARE[{"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(compare, compare)](x, y)
            self._put(to, result, active)

        return step

    def _selp(self, one: Instruction, parts: list[str]) -> Callable[[Words], None]:
        to, a, b, p = one.operands
        return lambda active: self._put(to, np.where(self._get(p).astype(bool), self._get(a), self._get(b)), active)

    def _mov(self, one: Instruction, parts: list[str]) -> Callable[[Words], None]:
        to, source = one.operands
        bits = 0 if parts[1] == "pred" else int(parts[1][1:])

        def step(active: Words) -> None:
            if source.startswith("{"):
                names = listed(source)
                width = np.uint64(bits // len(names))
                value = np.zeros(self.threads, dtype=np.uint64)
                for i, name in enumerate(names):
                    value = value | (self._get(name) & MASK[int(width)]) << (width * np.uint64(i))
                self._put(to, value, active)
            elif to.startswith("{"):
                names = listed(to)
                width = np.uint64(bits // len(names))
                value = self._get(source)
                for i, name in enumerate(names):
                    self._put(name, value >> (width * np.uint64(i)) & MASK[int(width)], active)
            else:
                self._put(to, self._get(source), active)

        return step

    def _convert(self, one: Instruction, parts: list[str]) -> Callable[[Words], None]:
        to, *sources = one.operands
        target, source = parts[-2], parts[-1]

        def value() -> Words:
            a = self._get(sources[0])
            if target in ("bf16x2", "f16x2"):
                narrow = NARROW[target[:-2]]
                return narrow(floats(a)) << np.uint64(16) | narrow(floats(self._get(sources[1])))
            if target in NARROW:
                return NARROW[target](floats(a))
            if source in NARROW:
                return words(widened(a, source))
            if target == "f32":
                bits = int(source[1:])
                a = a & MASK[bits]
                return words((signed(a, bits) if source.startswith("s") else a).astype(np.float32))
            bits = int(target[1:])
            if source == "f32":
                x = np.trunc(floats(a).astype(np.float64))
                low, high = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1)) if target.startswith("s") else (0.0, 2.0**bits)
                clamped = [int(min(max(v, low), high - 1)) if v == v else 0 for v in x.tolist()]
                return np.array([v & (2**64 - 1) for v in clamped], dtype=np.uint64)
            wide = int(source[1:])
            a = a & MASK[wide]
            return (signed(a, wide).view(np.uint64) if source.startswith("s") else a) & MASK[bits]

        def step(active: Words) -> None:
            with np.errstate(all="ignore"):
                self._put(to, value(), active)

        return step
