"""Loggers are told numbers: they change no bit and end no run, whatever they do."""

from __future__ import annotations

import builtins
import io
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from runs import lines_of, run, small_recipe
from vexact.loop import RunError
from vexact.loop.loggers import KINDS, numbers
from vexact.recipe import CheckpointSection, Recipe
from vexact.verification.checks import thread_count


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with thread_count(1):
        yield


class Noted:
    """Keeps what it is told; fails in the call that is named."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.told, self.begun, self.closed = failing, {}, [], 0  # type: ignore[var-annotated]

    def __call__(self, folder: Path, recipe: Recipe, step: int) -> Noted:
        self.begun.append(step)
        self._fail("begin")
        return self

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.told.setdefault(step, dict(values))
        values.clear()  # type: ignore[attr-defined]
        self._fail("log")

    def close(self) -> None:
        self.closed += 1
        self._fail("close")

    def _fail(self, where: str) -> None:
        if where == self.failing:
            raise RuntimeError(f"broken\nin {where}")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if both packages were there."""
    monkeypatch.setattr("vexact.loop.loggers.imported", lambda extra, module: None)


def recipe_of(tmp_path: Path, *loggers: str, **changes: Any) -> Recipe:
    recipe = small_recipe(tmp_path / "run", tmp_path / "reward.py", **{"steps": 2, **changes})
    return replace(recipe, run=replace(recipe.run, loggers=loggers, rollouts="never"))


@pytest.mark.usefixtures("installed")
def test_a_logger_hears_every_finite_number_of_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted()
    monkeypatch.setitem(KINDS, "tensorboard", noted)
    result = run(recipe_of(tmp_path, "tensorboard"))
    assert noted.told == {line["step"] + 1: numbers(line) for line in result.lines}
    assert {"entropy", "tim/k3", "rollout_corr/kl", "sampling/sampling_logp_difference/mean"} <= noted.told[1].keys()
    assert (noted.begun, noted.closed) == ([0], 1)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("failing", ["", "begin", "log", "close"])
def test_a_logger_changes_no_bit_and_a_failing_one_is_a_line_of_warning(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(
        replace(recipe_of(tmp_path), name="quiet", run=replace(recipe_of(tmp_path).run, folder=str(tmp_path / "q")))
    )
    good, bad = Noted(), Noted(failing)
    monkeypatch.setitem(KINDS, "tensorboard", bad)
    monkeypatch.setitem(KINDS, "wandb", good)
    out = io.StringIO()
    result = run(recipe_of(tmp_path, "tensorboard", "wandb"), Console(file=out, width=100))
    assert lines_of(result.folder) == lines_of(expected.folder)
    warning = f"tensorboard: no more metrics go there (RuntimeError: broken in {failing})"
    assert out.getvalue().splitlines().count(warning) == (failing != "")
    assert len(bad.told) == {"": 2, "begin": 0, "log": 1, "close": 2}[failing]
    assert len(good.told) == 2 and good.closed == 1


@pytest.mark.usefixtures("installed")
def test_a_run_that_is_taken_up_tells_later_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted()
    monkeypatch.setitem(KINDS, "wandb", noted)
    recipe = recipe_of(tmp_path, "wandb", steps=3, checkpoint=CheckpointSection(every=2))
    run(recipe)
    assert list(noted.told) == [1, 2, 3]
    noted.told.clear()
    run(replace(recipe, steps=4))
    assert (list(noted.told), noted.begun) == ([3, 4], [0, 3])


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_logger_that_is_not_installed_is_named_before_anything_is_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary = builtins.__import__

    def without(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.split(".")[0] == name:
            raise ImportError(f"No module named '{name}'")
        return ordinary(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match=rf"run\.loggers: {name} is not installed .*pip install 'vexact\[{name}\]'$"):
        run(recipe_of(tmp_path, name))
    assert not (tmp_path / "run").exists()


def test_wandb_goes_on_under_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, Any]] = []
    logged: list[int] = []

    def init(**arguments: Any) -> Any:
        begun.append(arguments)
        return SimpleNamespace(id="abc", log=lambda values, step: logged.append(step), finish=lambda: None)

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    recipe = recipe_of(tmp_path, "wandb", steps=3, checkpoint=CheckpointSection(every=2))
    run(recipe)
    run(replace(recipe, steps=4))
    assert [each["id"] for each in begun] == [None, "abc"]
    assert {each["resume"] for each in begun} == {"allow"} and begun[0]["config"]["optimizer"]["lr"] == 1e-2
    assert logged == [1, 2, 3, 3, 4]


def test_tensorboard_writes_events_into_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, int]] = []
    scalars: list[tuple[str, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            begun.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((name, step))

        def add_text(self, name: str, text: str) -> None: ...

        def flush(self) -> None: ...

        def close(self) -> None: ...

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    run(recipe_of(tmp_path, "tensorboard"))
    assert begun == [(str(tmp_path / "run" / "tensorboard"), 0)]
    assert ("tim/k3", 1) in scalars and ("rollout_corr/chi2_seq", 2) in scalars
