"""The set-up: what is missing is one clear line and exit code 2, and what is needed is pinned."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vexact

ROOT = Path(__file__).parents[1]
TOOLS = ("bash", "sh", "make", "mkdir", "rm", "grep", "sed", "tail", "head", "touch", "dirname")
NO_INDEX = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder in which `make` can begin, and a `bin` with no compiler in it."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or pytest.fail(f"{tool} is needed"))
    return tmp_path


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def complaint(clone: Path, *arguments: str, **environment: str) -> str:
    """The one line that a failing `make test` says."""
    environment.setdefault("PATH", str(clone / "bin"))
    command = ["make", "test", *arguments]
    result = subprocess.run(
        command, cwd=clone, env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


def test_a_wrong_python_is_one_line(clone: Path) -> None:
    old = script(clone / "bin" / "python3.9", "echo 3.9.18")
    assert f"Python 3.10 to 3.13 is needed, but {old} is 3.9.18" in complaint(clone, f"PYTHON={old}")


def test_a_missing_python_is_one_line(clone: Path) -> None:
    assert "python3 is not a Python" in complaint(clone)


def test_a_missing_compiler_is_one_line(clone: Path) -> None:
    assert "a C++ compiler is needed" in complaint(clone, f"PYTHON={sys.executable}")


def test_a_python_without_venv_is_one_line(clone: Path) -> None:
    script(clone / "bin" / "g++", "exit 1")
    bare = script(clone / "bin" / "python3", '[ "$1" = -c ] && echo 3.11.2 || exit 1')
    assert "apt install python3-venv" in complaint(clone, f"PYTHON={bare}")


def test_an_unreachable_package_is_one_line(clone: Path) -> None:
    script(clone / "bin" / "g++", "exit 1")
    said = complaint(clone, f"PYTHON={sys.executable}", **NO_INDEX)
    assert "stopped at torch: no torch to be had. Is the package index within reach?" in said
    assert "ERROR" in (clone / ".venv" / "setup.log").read_text()


def pinned() -> dict[str, set[str]]:
    """Name → versions of `constraints.txt` (two where Python 3.10 needs an older one)."""
    pins: dict[str, set[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if match := re.match(r"([a-z0-9-]+)==([^ ;]+)", line):
            pins.setdefault(match[1], set()).add(match[2])
    return pins


def test_every_dependency_is_pinned() -> None:
    names = [re.match(r"[\w-]+", need) for need in importlib.metadata.requires("vexact") or []]
    # torch for CUDA insists on a triton of its own, elsewhere the Makefile names one; the loggers are not installed
    wanted = {name[0].lower() for name in names if name} - {"vexact", "triton", "tensorboard", "wandb"}
    assert wanted - pinned().keys() == set()


def test_the_pins_are_what_is_installed() -> None:
    """So that the versions in `constraints.txt` are the ones these tests ran with."""
    other = {
        name: (versions, found)
        for name, versions in pinned().items()
        if (found := installed(name)) and found not in versions
    }
    assert other == {}


def installed(name: str) -> str | None:
    """The version without its local part, so that CPU and CUDA builds of torch are alike."""
    try:
        return importlib.metadata.version(name).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def test_the_package_and_its_metadata_name_one_version() -> None:
    assert vexact.__version__ == importlib.metadata.version("vexact")
