"""Imports point down: a module may use its own unit and lower floors, never a sibling or a higher one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {"vexact": ROOT / "vexact", "vexact_kernels": ROOT / "kernels" / "vexact_kernels"}
FLOORS = [
    ["vexact_kernels", "vexact", "vexact.errors", "vexact.arithmetic"],  # "vexact": the version in its __init__
    ["vexact.recipe", "vexact.ranks", "vexact.testing"],
    ["vexact.model"],
    ["vexact.rollout", "vexact.training", "vexact.study", "vexact.tasks", "vexact.fetch"],
    ["vexact.loop", "vexact.verify"],
    ["vexact.experiments", "vexact.report"],
    ["vexact.cli", "vexact.integrations", "vexact.pytest_plugin"],
]
BEHIND = {"vexact.verification": "vexact.verify", "vexact.commands": "vexact.cli"}  # a folder and its front door
FLOOR_OF = {unit: floor for floor, units in enumerate(FLOORS) for unit in units}


def unit_of(module: str) -> str:
    """The unit that has a floor: `vexact.model.batch` belongs to `vexact.model`, all of the kernels are one."""
    package, *rest = module.split(".")
    unit = ".".join([package, *rest[:1]]) if package == "vexact" else package
    return BEHIND.get(unit, unit)


def imported(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[str]:
    """Full names of all modules that the source imports, inside functions too."""
    here = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            # `from vexact import model` names a unit, `from vexact import __version__` does not
            yield from (
                f"{source}.{alias.name}" if f"{source}.{alias.name}" in FLOOR_OF else source for alias in node.names
            )


def faults(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """One line for each import that does not point down."""
    unit = unit_of(module)
    wrong = []
    for name in imported(ast.parse(source), module, is_package=is_package):
        target = unit_of(name)
        if target.split(".")[0] not in SOURCES or target == unit:
            continue
        if target not in FLOOR_OF or FLOOR_OF[target] >= FLOOR_OF.get(unit, len(FLOORS)):
            wrong.append(f"{module} imports {name}")
    return wrong


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


def test_imports_point_down() -> None:
    wrong = [
        fault
        for module, path in modules()
        for fault in faults(path.read_text(), module, is_package=path.name == "__init__.py")
    ]
    assert wrong == []


def test_every_module_has_a_floor() -> None:
    assert [module for module, _ in modules() if unit_of(module) not in FLOOR_OF] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vexact.model.batch", "from vexact.rollout.sampler import Sampler"),
        ("vexact.model.batch", "from ..rollout import sampler"),
        ("vexact.rollout.sampler", "import vexact.training.loss"),
        ("vexact.rollout.sampler", "def later():\n    from vexact import training"),
        ("vexact.verification.report", "from vexact.loop import train"),
        ("vexact_kernels.reference", "import vexact.model"),
        ("vexact_kernels.reference", "from vexact import __version__"),
        ("vexact.model.batch", "import vexact.unheard_of"),
    ],
)
def test_an_import_that_points_up_or_aside_is_caught(module: str, source: str) -> None:
    assert len(faults(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vexact.model.batch", "from vexact_kernels.contract import PAGE"),
        ("vexact.model.batch", "from . import pages\nfrom .pages import Pages"),
        ("vexact.cli", "from vexact import __version__, verify\nimport torch"),
    ],
)
def test_an_import_that_points_down_passes(module: str, source: str) -> None:
    assert faults(source, module) == []


def test_the_kernels_folder_is_no_package() -> None:
    """Hugging Face has a package of that name: an __init__.py here would hide it from whoever runs in this folder."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_no_file_outgrows_its_noun() -> None:
    folders = ("vexact", "kernels", "tests", "benchmarks")
    sources = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".cpp", ".h"}
    ]
    assert [str(path) for path in sources if len(path.read_text().splitlines()) > 400] == []
