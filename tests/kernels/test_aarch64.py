"""Goldens: the bits of every op on fixed inputs, on every instruction set here and on an emulated AArch64.

`kernels/cpu/golden.cpp` makes the inputs from integers and prints a hash an op; `golden.json` holds the hashes. A
change of meaning renews them, in a commit of its own: `.venv/bin/python tests/kernels/test_aarch64.py`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import vexact_kernels

SOURCES = Path(__file__).parents[2] / "kernels" / "cpu"
GOLDEN = Path(__file__).with_name("golden.json")
FLAGS = ("-std=c++17", "-ffp-contract=off", "-fno-fast-math", "-fno-math-errno", "-fopenmp")
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
COMPILER = shutil.which("g++") or "clang++"


def recorded() -> dict[str, str]:
    """The golden hash of each probe `<op>.<dtype>.<input>`."""
    return json.loads(GOLDEN.read_text())


def hashes(*command: str) -> dict[str, str]:
    """What the golden program prints."""
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    return dict(line.split() for line in output.splitlines())


def parted(actual: dict[str, str], expected: dict[str, str]) -> list[str]:
    """The probes whose bits differ, or that only one side has."""
    return sorted(name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name))


def compile_golden(compiler: str, folder: Path, *options: str | Path) -> str:
    """The golden program, from its source and what the options add."""
    program = folder / "golden"
    subprocess.run([compiler, *FLAGS, SOURCES / "golden.cpp", *options, "-o", program], check=True)
    return str(program)


def build_native(folder: Path) -> str:
    """Linked with the library that this project installed: all instruction sets."""
    library = next(path for entry in vexact_kernels.__path__ for path in Path(entry).glob("libvexact_kernels.so"))
    return compile_golden(COMPILER, folder, library, f"-Wl,-rpath,{library.parent}")


def build_baseline(compiler: str, folder: Path, *options: str) -> str:
    """Compiled together with the baseline kernels alone."""
    return compile_golden(compiler, folder, "-DVX_ISA=baseline", SOURCES / "all.cpp", *options)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_native(tmp_path_factory.mktemp("native"))


@pytest.mark.parametrize("isa", vexact_kernels.available())
def test_every_instruction_set_here_gives_the_golden_bits(native: str, isa: str) -> None:
    assert parted(hashes(native, isa), recorded()) == []


def test_an_emulated_aarch64_gives_the_golden_bits(tmp_path: Path) -> None:
    missing = [tool for tool in (CROSS_COMPILER, EMULATOR) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not found: {' and '.join(missing)} (Debian: apt install g++-aarch64-linux-gnu qemu-user)")
    program = build_baseline(CROSS_COMPILER, tmp_path, "-O3", "-static")  # static: no AArch64 system is needed
    assert parted(hashes(EMULATOR, program, "baseline"), recorded()) == []


@pytest.mark.skipif("avx2" not in vexact_kernels.available(), reason="the mutant needs a processor with AVX2")
def test_contraction_would_change_the_golden_bits(tmp_path: Path) -> None:
    """The mutant: a compiler that may fuse what is written as two roundings."""
    mutant = build_baseline(COMPILER, tmp_path, "-O2", "-mavx2", "-mfma", "-mf16c", "-ffp-contract=fast")
    assert parted(hashes(mutant, "baseline"), recorded())


def test_a_set_that_is_not_there_is_refused(native: str) -> None:
    refused = subprocess.run([native, "mmx"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1


def renew() -> None:
    """Write the goldens from the baseline."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        bits = hashes(build_native(Path(folder)), "baseline")
    GOLDEN.write_text(json.dumps(bits, indent=1) + "\n")


if __name__ == "__main__":
    renew()
