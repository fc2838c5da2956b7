"""The shared library keeps its instruction sets apart."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import vexact_kernels
from vexact_kernels import available, load
from vexact_kernels.library import _ARGUMENTS, _RESULTS, FILE, FloatBits, library

SOURCES = Path(__file__).parents[2] / "kernels" / "cpu"
LETTERS = {"int": "i", "int64_t": "n", "int32_t": "e", "float": "f"}
RESULTS = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": FloatBits, "void": None}
NOT_FOR_PYTHON = {"philox", "dot_probe"}


def path() -> Path:
    return next(Path(folder) / FILE for folder in vexact_kernels.__path__ if (Path(folder) / FILE).is_file())


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
def test_no_function_is_shared_between_instruction_sets() -> None:
    """A weak definition is merged by the linker: the baseline could be given the one compiled for AVX-512."""
    symbols = subprocess.run(["nm", "-D", "-C", str(path())], capture_output=True, text=True, check=True).stdout
    assert re.search(r" T vx_baseline_matmul$", symbols, re.M)
    assert re.findall(r" [WVu] .*", symbols) == []


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump (binutils) is not installed")
@pytest.mark.skipif("avx2" not in available(), reason="not an x86-64 processor with AVX2")
def test_the_baseline_uses_no_register_of_another_set() -> None:
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", "--disassemble=vx_baseline_matmul", str(path())],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "ret" in text and not re.search(r"%[yz]mm|\bv(fmadd|add)[ps]", text)


def prototypes() -> dict[str, tuple[Any, str]]:
    """Result and letters of the arguments of every `VX_API(type, op)(…)` in the C++."""
    found = {}
    for source in SOURCES.glob("*.cpp"):
        text = re.sub(r"/\*.*?\*/", "", source.read_text())
        for result, op, arguments in re.findall(r"^VX_API\((\w+), (\w+)\)\s*\(([^)]*)\)", text, re.M):
            kinds = [argument for argument in arguments.split(",") if argument.strip()]
            found[op] = (RESULTS[result], "".join("p" if "*" in kind else LETTERS[kind.split()[0]] for kind in kinds))
    return found


def test_the_letters_of_python_are_the_prototypes_of_the_source() -> None:
    """ctypes would pass a wrong number of arguments, or a wrong size, in silence."""
    table = {op: (_RESULTS.get(op), letters.replace(" ", "")) for op, letters in _ARGUMENTS.items()}
    source = prototypes()
    assert source.keys() - NOT_FOR_PYTHON == table.keys()
    assert {op: source[op] for op in table} == table


def test_an_instruction_set_that_is_missing_is_named_with_those_that_are_there() -> None:
    with pytest.raises(ValueError, match=r"instruction set 'sse9' is not one that this machine has: .*baseline"):
        load("cpu", "sse9")


def test_every_set_of_this_machine_was_compiled() -> None:
    names = library().vx_isa_names().decode().split()
    assert set(available()) <= set(names) and available()[-1] == "baseline"
    assert isinstance(library(), ctypes.CDLL)
