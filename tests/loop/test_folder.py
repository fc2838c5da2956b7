"""A run folder: what is written is whole, what is others' stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import run, small_recipe
from vexact.loop import RunError
from vexact.loop.folder import RunFolder, read_lines, read_result, remove_folder, run_path, step_of, write_whole
from vexact.recipe import Recipe, RunSection


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "env.json"
    write_whole(path, "old")

    def fails(self: Path, target: Path) -> None:
        assert self.read_text() == "new" and target.read_text() == "old"
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, "new")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("env.json", "old")]


def test_a_process_that_begins_removes_drafts_and_nothing_of_others(tmp_path: Path) -> None:
    draft = f".step-000003.{'0a' * 16}"
    for name in (f".config.yaml.{'1f' * 16}", f"checkpoints/{draft}/masters.safetensors", f"rollouts/{draft}",
                 ".gitignore", "rollouts/.hidden", "notes.txt"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    with RunFolder(tmp_path, Recipe()):
        pass
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert left == [".gitignore", ".lock", "config.yaml", "notes.txt", "rollouts/.hidden"]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_the_newest_states_stay(tmp_path: Path) -> None:
    with RunFolder(tmp_path, Recipe()) as folder:
        assert folder.latest() is None
        for step in (5, 40, 1_000_000, 7):
            folder.state(step).mkdir(parents=True)
        assert folder.latest() == folder.state(1_000_000)
        folder.prune(2)
        assert sorted(map(step_of, folder.checkpoints.iterdir())) == [40, 1_000_000]
    remove_folder(tmp_path / "none")


def test_logs_are_cut_to_what_they_were_and_later_rollouts_go(tmp_path: Path) -> None:
    with RunFolder(tmp_path, Recipe()) as folder:
        folder.rollouts.mkdir()
        folder.append({"step": 0, "loss": float("nan")})
        (folder.rollouts / "step-000000.parquet").write_text("")
        sizes = folder.log_sizes()
        folder.append({"step": 1})
        (folder.rollouts / "step-000001.parquet").write_text("")
        (tmp_path / "other.jsonl").write_text("{}\n")
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "torn')
        folder.rewind(1, sizes)
        assert folder.lines() == [{"step": 0, "loss": None}]
        assert (tmp_path / "other.jsonl").read_text() == ""
        assert [path.name for path in folder.rollouts.iterdir()] == ["step-000000.parquet"]
        folder.rewind(0, {})
        assert folder.lines() == []


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step"\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl: line 2 is not JSON"):
        read_lines(tmp_path / "metrics.jsonl")
    for text in ("[", "[]", '{"steps": "many"}'):
        (tmp_path / "result.json").write_text(text)
        with pytest.raises(RunError, match=r"result\.json: (cannot be read|is not the result of a run)"):
            read_result(tmp_path)


def test_a_path_is_refused_that_is_no_folder_or_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("")
    for name, message in {"file": "file: exists already and is no folder", "full": "full: .* holds no run"}.items():
        with pytest.raises(RunError, match=message):
            run_path(Recipe(run=RunSection(folder=str(tmp_path / name))))
    with pytest.raises(RunError, match=r"name is 'a/b', must be the name of a folder without a path"):
        run_path(Recipe(name="a/b"))
    assert run_path(Recipe(name="a", run=RunSection(root=str(tmp_path)))).parent == tmp_path


def test_the_result_says_what_the_last_line_says(tmp_path: Path) -> None:
    result = run(small_recipe(tmp_path / "run", tmp_path / "reward.py", steps=1))
    found = read_result(result.folder)
    assert (found["steps"], found["version"]) == (1, 1)
    assert found["weights_fingerprint"] == result.lines[-1]["fingerprint"]
