"""The shared library of C++ kernels: where it is, which sets this machine can run, what its functions take."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch  # noqa: F401  before the library, so that both share one libgomp and one pool of threads

import vexact_kernels

FILE = "libvexact_kernels.so"


class FloatBits(ctypes.Structure):
    """A returned float as its four bytes: as a Python float, a subnormal would pass through the caller's flush mode."""

    _fields_ = [("value", ctypes.c_float)]


_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "n": ctypes.c_int64,
    "e": ctypes.c_int32,
    "f": ctypes.c_float,
}
_RESULTS: dict[str, Any] = {
    "matmul_packed_bytes": ctypes.c_int64,
    "matmul_dx_bytes": ctypes.c_int64,
    "matmul_dw": ctypes.c_int,
    "sum": FloatBits,
    "sum_squares": FloatBits,
}

# The arguments of cpu/vexact.h in order: p pointer, i int, n int64, e int32 (an exponent), f float.
_ARGUMENTS = {
    "matmul_packed_bytes": "i nn",
    "matmul_pack": "i nn pn pp",
    "matmul_unpack": "i nn p pn",
    "matmul": "i nnn pn pe p i pn",
    "matmul_dx": "i nnn pn pe p pn",
    "matmul_dx_bytes": "i nn",
    "matmul_dw": "i nnn pn pn npp pp i",
    "matmul_db": "i nn pn npp pp",
    "embed": "i nnn p p pn",
    "embed_dw": "i nnn p pn npp ppp",
    "rmsnorm": "i nnn pn p f pn p",
    "rmsnorm_dx": "i nnn pn p p pn pn pn",
    "rmsnorm_dw": "i nnn pn p pn npp pp",
    "rope": "ii nnn pn p pp pn",
    "attention": "i n pppp nnn pn pn pn pp f pn p",
    "attention_backward": "i n p nnn pn pn pn pn pn p f pn pn pn",
    "swiglu": "i nn pn pn",
    "swiglu_backward": "i nn pn pn pn",
    "logprob": "nn pn pp ppp pp",
    "logprob_backward": "i nn pn pp pp p pp pn",
    "centre": "i nn pnpp pnpp pnpp pp p pp i pn pp",
    "noise": "nn p pn",
    "draw": "nn pn p pppp p",
    "exp": "n pp",
    "log": "n pp",
    "add": "i n ppp",
    "cast": "ii n pp",
    "sum": "n p",
    "sum_squares": "n p",
    "adamw": "n pppp fffff fff f",
}


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises FileNotFoundError naming where it was looked for.

    In an editable install it does not lie beside this file, so every folder of the package is searched.
    """
    folders = [Path(folder) for folder in vexact_kernels.__path__]
    for folder in folders:
        if (folder / FILE).is_file():
            loaded = ctypes.CDLL(str(folder / FILE))
            loaded.vx_isa_names.restype = ctypes.c_char_p
            return loaded
    raise FileNotFoundError(f"{FILE} is in none of {', '.join(map(str, folders))}: install the package to build it")


def available() -> list[str]:
    """The instruction sets that were compiled and that this machine can run, best first."""
    names = library().vx_isa_names().decode().split()
    return [name for name in reversed(names) if library().vx_isa_available(name.encode())]


def operations(isa: str) -> SimpleNamespace:
    """The C functions of one instruction set by the names of cpu/vexact.h, with argument types."""
    functions = SimpleNamespace()
    for name, letters in _ARGUMENTS.items():
        function = library()[f"vx_{isa}_{name}"]
        function.argtypes = [_TYPES[letter] for letter in letters.replace(" ", "")]
        function.restype = _RESULTS.get(name)
        setattr(functions, name, function)
    return functions
