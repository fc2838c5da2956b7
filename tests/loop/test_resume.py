"""A run that is stopped, however, and taken up is the run that was never stopped."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runs import assert_same_run, lines_of, run, small_recipe
from vexact.loop import RunError
from vexact.loop.folder import RunFolder, step_of
from vexact.loop.state import StateError
from vexact.recipe import CheckpointSection, EvalSection, MismatchSection, OptimizerSection, Recipe, WarmStartSection
from vexact.verification.checks import thread_count

# Where a process is killed: function, at which of its calls, and whether before or after it.
KILLS = [
    ("vexact.loop.folder.write_whole", 1, "before"),  # an empty folder with a lock
    ("vexact.loop.folder.write_whole", 2, "before"),  # no env.json
    ("vexact.loop.folder.RunFolder.append", 1, "before"),  # rollouts without a line
    ("vexact.loop.folder.RunFolder.append", 2, "after"),  # a line without a state
    ("vexact.loop.state.write_weights", 2, "before"),  # in the middle of the first state
    ("vexact.model.checkpoint.save_file", 8, "half"),  # in the middle of a file of the second one
    ("vexact.loop.state.save_folder", 2, "after"),  # all but its numbers
    ("vexact.loop.state.write_json", 4, "before"),  # all but its manifest
    ("vexact.model.checkpoint._rename", 4, "before"),  # whole, without its name (a model's folder is renamed too)
    ("vexact.model.checkpoint._rename", 4, "after"),
    ("vexact.loop.folder._remove", 1, "before"),  # an old state on its way out
    ("vexact.loop.rollouts.os.replace", 6, "before"),
    ("vexact.loop.run.remove_folder", 1, "before"),  # all steps done
    ("vexact.loop.loop.save_folder", 1, "after"),  # no result yet
]
# Forks before torch has begun any thread, so that each kill does not need a new interpreter.
KILLER = """
import io, json, os, signal, sys
import torch
from pathlib import Path
from pkgutil import resolve_name
from rich.console import Console
from vexact.loop import train
from vexact.recipe import load_recipe
from vexact_kernels import load

def deadly(function, call, when):
    calls = 0
    def killed(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls < call:
            return function(*args, **kwargs)
        if when == "half":
            Path(args[1]).write_bytes(b"half a file")
        if when == "after":
            function(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    return killed

for number, (name, call, when) in enumerate(json.loads(sys.argv[2])):
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        owner, _, attribute = name.rpartition(".")
        owner = resolve_name(owner)
        setattr(owner, attribute, deadly(getattr(owner, attribute), call, when))
        folder = f"{sys.argv[3]}/{number}"
        recipe = load_recipe(sys.argv[1], ["--run.folder", folder])
        train(recipe, kernels=load(), console=Console(file=io.StringIO()))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with thread_count(1):
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Its run is never stopped."""
    folder = tmp_path_factory.mktemp("run")
    return small_recipe(folder / "whole", folder / "reward.py")


@pytest.fixture(scope="module")
def whole(recipe: Recipe) -> Path:
    with thread_count(1):
        lines = run(recipe).lines
    assert sum(line["grad_norm"] > 0 for line in lines) == 6 and lines[-1]["lag"] == 1
    assert len({line["fingerprint"] for line in lines}) == 6
    assert lines[-1]["tim/differing"] == 0 < lines[-1]["sampling/sampling_logp_difference/max"]
    return Path(recipe.run.folder)


def into(recipe: Recipe, folder: Path, **changes: Any) -> Recipe:
    return replace(recipe, run=replace(recipe.run, folder=str(folder)), **changes)


def written(recipe: Recipe, path: Path) -> Path:
    path.write_text(recipe.to_yaml())
    return path


def test_three_steps_and_three_are_six(recipe: Recipe, whole: Path, tmp_path: Path) -> None:
    run(into(recipe, tmp_path / "run", steps=3, checkpoint=CheckpointSection(every=3)))
    result = run(into(recipe, tmp_path / "run"))
    assert [line["step"] for line in result.lines] == list(range(6))
    assert_same_run(tmp_path / "run", run(into(recipe, tmp_path / "again", steps=6)).folder)
    assert lines_of(tmp_path / "run") == lines_of(whole)


def test_a_process_that_is_killed_anywhere_leaves_a_run_that_goes_on(
    recipe: Recipe, whole: Path, tmp_path: Path
) -> None:
    path = written(recipe, tmp_path / "recipe.yaml")
    command = [sys.executable, "-c", KILLER, str(path), json.dumps(KILLS), str(tmp_path)]
    died = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    assert [int(code) for code in died.stdout.split()] == [-signal.SIGKILL] * len(KILLS)
    for number, kill in enumerate(KILLS):
        folder = tmp_path / str(number)
        assert not (folder / "result.json").exists(), kill
        run(into(recipe, folder))
        assert_same_run(folder, whole)


def test_a_command_that_is_killed_goes_on_in_a_new_process_on_other_threads(
    recipe: Recipe, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    path = written(into(recipe, folder), tmp_path / "recipe.yaml")
    command = [sys.executable, "-m", "vexact.cli", "train"]
    with subprocess.Popen([*command, path, "--threads", "1"], stdout=subprocess.DEVNULL) as process:
        while not list(folder.glob("checkpoints/step-*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    done = len(lines_of(folder))
    said = subprocess.run([*command, folder, "--threads", "2"], capture_output=True, text=True, check=True).stdout
    assert 2 <= done <= 6
    assert f"step {max(map(step_of, folder.glob('rollouts/*'))) + 1}/6" in said
    assert_same_run(folder, whole)
    resumed = json.loads((folder / "env.json").read_text()).get("resumed", [])
    assert [(each["step"], each["threads"]) for each in resumed] == ([] if done == 6 else [(resumed[0]["step"], 2)])


RANK = """
import os, signal, sys
from vexact.cli import main
from vexact.loop.folder import RunFolder

append, lines = RunFolder.append, 0

def deadly(self, line):
    global lines
    append(self, line)
    lines += 1
    if lines == 3:
        os.kill(os.getpid(), signal.SIGKILL)

RunFolder.append = deadly
sys.exit(main(["train", sys.argv[1]]))
"""


def test_two_ranks_of_which_one_is_killed_are_taken_up_by_one_process(
    recipe: Recipe, whole: Path, tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    path = written(into(recipe, tmp_path / "run"), tmp_path / "recipe.yaml")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000"}
    command = [*launcher, str(tmp_path / "rank.py"), str(path)]
    died = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert died.returncode != 0 and "SIGKILL" in died.stderr
    assert len(lines_of(tmp_path / "run")) == 3
    run(into(recipe, tmp_path / "run"))
    assert_same_run(tmp_path / "run", whole)


def test_a_warm_start_is_not_done_again(tmp_path: Path) -> None:
    recipe = small_recipe(
        tmp_path / "whole",
        tmp_path / "reward.py",
        steps=2,
        warm_start=WarmStartSection(steps=2, sequences=4, every=1),
        checkpoint=CheckpointSection(every=1, keep=9),
    )
    recipe = replace(recipe, task=replace(recipe.task, held_out=0.1), eval=EvalSection(items=4, every=1))
    expected = run(recipe)
    run(into(recipe, tmp_path / "run", checkpoint=CheckpointSection(every=9)))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000"]
    (tmp_path / "run" / "result.json").unlink()
    out = io.StringIO()
    result = run(into(recipe, tmp_path / "run"), Console(file=out, width=100))
    assert "warm start" not in out.getvalue()
    assert [line["step"] for line in result.lines] == [-1, 0, 1]
    assert lines_of(tmp_path / "run") == lines_of(expected.folder)


def test_without_a_cut_of_the_logs_steps_are_there_twice(
    recipe: Recipe, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: what assert_same_run is there for."""
    run(into(recipe, tmp_path / "run", steps=3))
    monkeypatch.setattr(RunFolder, "rewind", lambda self, step, sizes: None)
    run(into(recipe, tmp_path / "run"))
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [0, 1, 2, 2, 3, 4, 5]
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "run", whole)


def test_a_finished_run_is_only_shown(recipe: Recipe, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    out = io.StringIO()
    result = run(recipe, Console(file=out, width=100))
    assert [line["step"] for line in result.lines] == list(range(6))
    assert "for 6 steps" in out.getvalue() and "step 1/6" not in out.getvalue()
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"steps": 3},
        {"optimizer": OptimizerSection(lr=1e-3)},
        {"delay": 0},
        {"eval": EvalSection(items=3)},
    ],
)
def test_another_recipe_is_refused_by_the_key_that_differs(
    changes: dict[str, Any], recipe: Recipe, whole: Path
) -> None:
    key, old, new = {
        "seed": ("seed", "0", "1"),
        "optimizer": ("optimizer.lr", "0.01", "0.001"),
        "delay": ("delay", "1", "0"),
        "eval": ("eval.items", "0", "3"),
        "steps": ("", "", ""),
    }[next(iter(changes))]
    expected = f"{whole}/config.yaml: the run there has {key} = {old}, not {new}; choose another --run.folder"
    if "steps" in changes:
        expected = f"{whole}: 6 steps are done there, steps = 3 asks for fewer"
    with pytest.raises(RunError) as caught:
        run(replace(recipe, **changes))
    assert str(caught.value) == expected


def test_fewer_steps_than_the_newest_state_has_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    run(into(recipe, tmp_path / "run", steps=4))
    (tmp_path / "run" / "result.json").unlink()  # as if it had been stopped
    with pytest.raises(RunError, match="run: 4 steps are done there, steps = 3 asks for fewer"):
        run(into(recipe, tmp_path / "run", steps=3))


def test_more_steps_are_refused_where_the_learning_rate_counts_them(recipe: Recipe, tmp_path: Path) -> None:
    decaying = into(recipe, tmp_path / "run", optimizer=replace(recipe.optimizer, schedule="cosine"), steps=2)
    run(decaying)
    with pytest.raises(RunError, match=r"the run there has steps = 2, not 3"):
        run(replace(decaying, steps=3))


def test_keys_that_change_no_bit_may_differ(recipe: Recipe, whole: Path, tmp_path: Path) -> None:
    run(into(recipe, tmp_path / "run", steps=4))
    other = into(
        recipe,
        tmp_path / "run",
        name="other",
        sampling=replace(recipe.sampling, tokens_per_step=5, chunk=2, running=2),
        optimizer=replace(recipe.optimizer, tokens_at_once=1, recompute=True),
        checkpoint=CheckpointSection(every=1, keep=1),
    )
    run(replace(other, run=replace(other.run, rollouts="never")))
    assert lines_of(tmp_path / "run") == lines_of(whole)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000006"]
    assert len(list((tmp_path / "run" / "rollouts").iterdir())) == 4
    assert "name: other" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize(("cause", "refused"), [("torch", True), ("split-k", False)])
def test_the_schedule_may_differ_but_for_a_cause_that_goes_by_it(tmp_path: Path, cause: str, refused: bool) -> None:
    recipe = small_recipe(tmp_path / "run", tmp_path / "odd.py", steps=2, mismatch=MismatchSection(cause=cause))
    run(recipe)
    other = replace(recipe, steps=3, sampling=replace(recipe.sampling, running=3))
    if refused:
        with pytest.raises(RunError, match=r"sampling\.running"):
            run(other)
    else:
        assert len(run(other).lines) == 3


def test_a_damaged_state_ends_in_one_line_that_names_its_file(recipe: Recipe, tmp_path: Path) -> None:
    run(into(recipe, tmp_path / "run", steps=4))
    path = tmp_path / "run" / "checkpoints" / "step-000004" / "first.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(StateError) as caught:
        run(into(recipe, tmp_path / "run"))
    assert str(caught.value) == f"{path}: is damaged: its bytes are not those that were written"


def test_a_folder_is_run_by_one_process_at_a_time(recipe: Recipe, tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path / "run", into(recipe, tmp_path / "run")),
        pytest.raises(RunError, match="run: another process is running in it"),
    ):
        run(into(recipe, tmp_path / "run"))
    run(into(recipe, tmp_path / "run", steps=1))


def test_without_states_a_stopped_run_begins_anew(recipe: Recipe, tmp_path: Path) -> None:
    recipe = into(recipe, tmp_path / "run", checkpoint=CheckpointSection())
    run(replace(recipe, steps=3))
    result = run(recipe)
    assert [line["step"] for line in result.lines] == list(range(6))
    assert "resumed" not in json.loads((tmp_path / "run" / "env.json").read_text())
