"""Studies that really run: found again, taken up, and not stopped by a run that fails."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from vexact import cli
from vexact.experiments import Computing, Outcome, dry_run, export_study, load_study, run_study
from vexact.experiments import run as study_run
from vexact.experiments.distance import Distance
from vexact.experiments.endpoints import NAMES
from vexact.experiments.lengths import length_slope
from vexact.experiments.recipes import Job, plan
from vexact.experiments.reuse import reuse
from vexact.experiments.study import StudyError
from vexact.experiments.worker import attempt, done, serve, tidy
from vexact.loop import train
from vexact.loop.folder import RunFolder, read_lines, read_result
from vexact.model.policy import Policy
from vexact.model.tokenizer import load_tokenizer
from vexact.recipe import RunSection, load_recipe
from vexact_kernels import Kernels, load

BASE: dict[str, Any] = {
    "steps": 3,
    "model": {"path": "tiny-modsum"},
    "task": {"name": "modsum", "options": {"min_terms": 2, "max_terms": 3}, "held_out": 0.1, "reward": {"flip": 0.4}},
    "warm_start": {"steps": 2, "sequences": 4},
    "sampling": {"prompts": 4, "samples": 4, "max_tokens": 6},
    "optimizer": {"lr": 3e-2},
    "eval": {"items": 4, "every": 1},
    "checkpoint": {"every": 1},
}
ARMS: list[dict[str, Any]] = [
    {"name": "exact", "role": "exact"},
    {"name": "other draws", "role": "null", "seed_offset": 50},
    {"name": "lag", "overrides": {"sync.every": 3}},
]
CLAIMS = [
    {"id": "A1", "claim": "exact", "rule": "always", "arms": "exact", "endpoint": "delta_max"},
    {"id": "bits", "claim": "others", "rule": "equal-bits", "arms": "lag", "against": "exact", "expect": "different"},
]


def write(folder: Path, **content: Any) -> Path:
    path = folder / "made.yaml"
    path.write_text(yaml.safe_dump({"title": "Made", "recipe": BASE, "arms": ARMS, "claims": CLAIMS, **content}))
    return path


def run(path: Path, root: Path, jobs: int = 1, others: Sequence[Path] = ()) -> tuple[Outcome, str]:
    said = io.StringIO()
    console = Console(file=said, width=200)
    outcome = run_study(load_study(path), root, computing=Computing(), jobs=jobs, console=console, others=others)
    return outcome, said.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Outcome, str]:
    folder = tmp_path_factory.mktemp("study")
    path = write(folder, seeds=2)
    return (path, folder / "out", *run(path, folder / "out", jobs=2))


Made = tuple[Path, Path, Outcome, str]


def test_all_runs_of_a_study_end_and_its_results_say_what_they_came_to(made: Made) -> None:
    _, root, outcome, said = made
    results = json.loads((root / "results.json").read_text())
    assert results == outcome.results and outcome.failed == [] and results["failed"] == results["notes"] == []
    assert [(arm["name"], arm["role"], [r["seed"] for r in arm["runs"]]) for arm in results["arms"]] == [
        ("exact", "exact", [0, 1]), ("other draws", "null", [0, 1]), ("lag", "arm", [0, 1]),
    ]  # fmt: skip
    assert set(results["endpoints"]["lag"]) == set(NAMES)
    assert results["endpoints"]["exact"]["delta_max"] == [0.0, 0.0]
    assert results["endpoints"]["exact"]["parted"] == [None, None]
    # Step 1 is the first that is sampled with older weights; a step whose rewards are all equal changes none.
    assert all(step in (1, 2) for step in results["endpoints"]["lag"]["parted"])
    assert [claim["verdict"] for claim in results["claims"]] == ["confirmed here"] * 2
    assert said.count("/6  ") == 6 and "1/1  start" in said
    assert all((root / run["folder"] / "metrics.jsonl").is_file() for arm in results["arms"] for run in arm["runs"])


def test_the_table_has_a_row_an_arm_and_endpoint(made: Made) -> None:
    rows = list(csv.DictReader(io.StringIO((made[1] / "table.csv").read_text())))
    by = {(row["arm"], row["endpoint"]): row for row in rows}
    reached = made[2].results["endpoints"]["lag"]["parted"]
    assert float(by["lag", "parted"]["median"]) == sum(reached) / 2
    assert (by["lag", "parted"]["n"], by["lag", "parted"]["not_reached"]) == ("2", "0")
    assert (by["exact", "parted"]["median"], by["exact", "parted"]["not_reached"]) == ("", "2")
    assert float(by["lag", "final_trainer"]["min"]) <= float(by["lag", "final_trainer"]["median"])


def test_a_run_of_a_study_is_the_run_of_its_recipe_in_every_bit(made: Made, tmp_path: Path) -> None:
    path, root, _, _ = made
    starts, runs = plan(load_study(path), root, load())
    job = next(job for job in runs if (job.arm, job.seed) == ("lag", 1))
    alone = replace(job.recipe, run=RunSection(folder=str(tmp_path / "alone"), checkpoint=False, rollouts="never"))
    train(alone, kernels=load(), console=Console(quiet=True))
    assert read_result(tmp_path / "alone")["weights_fingerprint"] == read_result(job.folder)["weights_fingerprint"]
    assert len({r.recipe.model.path for r in runs}) == 1 == len(starts)


def test_the_shared_start_is_an_ordinary_model_folder_with_its_tokenizer(made: Made) -> None:
    path, root, _, _ = made
    (start,), _ = plan(load_study(path), root, load())
    folder = start.folder / "checkpoint"
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("3+9=") == load_tokenizer("tiny-modsum").encode("3+9=")
    assert tokenizer.decode(tokenizer.encode("3+9=")) == "3+9="
    policy, named = Policy.load(str(folder), load(), None), Policy.load("tiny-modsum", load(), None)
    assert policy.config.eos_token_ids == named.config.eos_token_ids
    trained = read_lines(start.folder / "metrics.jsonl")[0]["fingerprint"]
    assert trained == read_result(start.folder)["weights_fingerprint"]


def test_what_is_done_is_found_again_and_a_new_seed_is_all_that_is_trained(made: Made, tmp_path: Path) -> None:
    path, root, before, _ = made
    times = {file: file.stat().st_mtime_ns for file in root.glob("runs/*/metrics.jsonl")}
    again, said = run(path, root)
    assert again.results == before.results and said == ""
    assert {file: file.stat().st_mtime_ns for file in root.glob("runs/*/metrics.jsonl")} == times


def test_runs_that_another_study_trained_are_taken_but_those_that_are_to_keep_more(made: Made, tmp_path: Path) -> None:
    _, root, before, _ = made
    arms = [*ARMS, {"name": "less lag", "overrides": {"sync.every": 2}}]
    path, mine = write(tmp_path, seeds=2, arms=arms), tmp_path / "mine"
    outcome, said = run(path, mine, others=[root])
    assert "3 runs taken from other studies" in said and said.count("/8  ") == 5  # the second seeds of three arms
    assert {name: outcome.results["endpoints"][name] for name in before.results["endpoints"]} == {
        **before.results["endpoints"],
        **{name: {**values, "seconds": outcome.results["endpoints"][name]["seconds"]}
           for name, values in before.results["endpoints"].items()},
    }  # fmt: skip
    taken = [job for job in plan(load_study(path), mine, load())[1] if job.index == 1 and job.arm != "less lag"]
    for job in taken:
        theirs = root / "runs" / job.digest
        assert (job.folder / "metrics.jsonl").read_bytes() == (theirs / "metrics.jsonl").read_bytes()
        assert load_recipe(job.folder / "config.yaml", {}) == job.recipe
    assert not list(mine.glob("runs/.*"))
    assert run(path, mine, others=[root])[1].startswith("0 runs taken")


def test_a_run_that_is_not_finished_or_shorter_is_not_taken(made: Made, tmp_path: Path) -> None:
    path, root, _, _ = made
    jobs = [replace(job, keeps=False) for job in plan(load_study(path), tmp_path / "mine", load())[1]]
    assert reuse([replace(job, recipe=replace(job.recipe, steps=4)) for job in jobs], [root]) == 0
    assert reuse([replace(job, keeps_model=True) for job in jobs], [root]) == 0
    shutil.copytree(root / "runs" / jobs[0].digest, tmp_path / "other" / "runs" / jobs[0].digest)
    (tmp_path / "other" / "runs" / jobs[0].digest / "result.json").unlink()
    assert reuse(jobs, [tmp_path / "other"]) == 0 and not (tmp_path / "mine" / "runs").exists()
    jobs[1].folder.mkdir(parents=True)
    (jobs[1].folder / "metrics.jsonl").write_text("")  # begun here, and whole there
    assert reuse(jobs, [tmp_path / "other", root]) == 6 and all(map(done, jobs))
    shutil.rmtree(jobs[1].folder)
    with RunFolder(jobs[1].folder, jobs[1].recipe):  # somebody is at it
        assert reuse(jobs, [root]) == 0
    assert reuse(jobs, [root]) == 1
    with pytest.raises(StudyError, match=r"--reuse: .*made.yaml is not the folder of a study"):
        reuse(jobs, [path])


def test_a_run_parts_from_the_exact_arm_that_it_is_beside(tmp_path: Path) -> None:
    plain = {"loss.advantage": "reward"}
    arms = [
        {"name": "exact", "role": "exact"}, {"name": "plain exact", "role": "exact", "overrides": plain},
        {"name": "nothing", "beside": "plain exact",
         "overrides": {**plain, "mismatch.site": "logits", "mismatch.sigma": 0.0}},
    ]  # fmt: skip
    outcome, _ = run(write(tmp_path, arms=arms, claims=[]), tmp_path / "out")
    exact, own, nothing = outcome.results["arms"]
    assert own["runs"][0]["fingerprint"] == nothing["runs"][0]["fingerprint"] != exact["runs"][0]["fingerprint"]
    assert outcome.results["endpoints"]["nothing"]["parted"] == [None]
    assert [arm["beside"] for arm in (exact, own, nothing)] == ["exact", "plain exact", "plain exact"]


def test_distances_are_to_the_exact_arm_that_a_run_is_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = [
        {"name": "exact", "role": "exact"}, {"name": "a"},
        {"name": "plain exact", "role": "exact", "overrides": {"loss.advantage": "reward"}},
        {"name": "b", "beside": "plain exact", "overrides": {"loss.advantage": "reward", "sync.every": 2}},
    ]  # fmt: skip
    study = load_study(write(tmp_path, seeds=2, arms=arms, claims=[], keep_models=True))
    asked: list[tuple[set[str], set[str]]] = []

    def noted(own: Sequence[Job], others: Sequence[Job], kernels: Kernels) -> dict[str, Distance]:
        asked.append(({job.arm for job in own}, {job.arm for job in others}))
        return {}

    monkeypatch.setattr(study_run, "distances", noted)
    study_run._away(study, plan(study, tmp_path / "out", load())[1], load())
    assert asked == [({"exact"}, {"exact", "a"}), ({"plain exact"}, {"plain exact", "b"})]


def test_little_stays_on_the_disk(made: Made) -> None:
    _, root, outcome, _ = made
    for arm in outcome.results["arms"]:
        first, second = (root / each["folder"] for each in arm["runs"])
        assert [table.name for table in first.glob("rollouts/*")] == ["step-000002.parquet"]
        assert not (second / "rollouts").exists()
        assert not list(first.glob("checkpoint*"))


def test_rollouts_of_every_so_many_steps_may_stay(made: Made, tmp_path: Path) -> None:
    path, root, _, _ = made
    job = plan(load_study(path), root, load())[1][0]
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    for step in range(8):
        (folder / "rollouts" / f"step-{step:06d}.parquet").touch()
    recipe = replace(job.recipe, run=RunSection(folder=str(folder)))
    tidy(replace(job, recipe=recipe, every=3))
    assert sorted(int(p.name[5:11]) for p in folder.glob("rollouts/*")) == [0, 3, 6, 7]


def test_a_study_that_was_killed_goes_on_from_the_state_of_its_run(made: Made, tmp_path: Path) -> None:
    """Two steps with a state behind them are what a kill leaves; the end is that of a run that was never stopped."""
    path, root, _, _ = made
    _, runs = plan(load_study(path), root, load())
    job = next(job for job in runs if (job.arm, job.seed) == ("exact", 1))
    half = replace(job.recipe, steps=2, run=replace(job.recipe.run, folder=str(tmp_path / "run"), rollouts="never"))
    train(half, kernels=load(), console=Console(quiet=True))
    whole = replace(half, steps=3)
    taken = replace(job, recipe=whole)
    assert not done(taken)
    assert attempt(taken, load()) == ""
    assert done(taken) and not (tmp_path / "run" / "checkpoints").exists()
    resumed = json.loads((tmp_path / "run" / "env.json").read_text())["resumed"]
    assert [each["step"] for each in resumed] == [2]
    assert read_result(tmp_path / "run")["weights_fingerprint"] == read_result(job.folder)["weights_fingerprint"]


def test_a_run_that_fails_and_a_process_that_dies_are_said_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "import os\ndef dies(completions, **_):\n    os._exit(7)\n"
        "def breaks(completions, **_):\n    raise KeyError('no such thing')\n"
    )
    fatal = {"task.reward.fatal": True, "task.reward.flip": 0.0}
    arms = [
        {"name": name, "overrides": {**fatal, "task.reward.function": f"{tmp_path}/rewards.py:{name}"}}
        for name in ("dies", "breaks")
    ] + [{"name": "exact", "role": "exact"}]
    path = write(tmp_path, arms=arms, claims=[], recipe={**BASE, "warm_start": {"steps": 0}})
    outcome, said = run(path, tmp_path / "out")
    assert [arm["runs"] != [] for arm in outcome.results["arms"]] == [False, False, True]
    assert "dies, seed 0: its process ended with 7" in outcome.failed
    assert len(outcome.failed) == 2 and "no such thing" in outcome.failed[1]
    assert "1/3  dies, seed 0: failed: its process ended with 7" in said
    assert {each["arm"] for each in json.loads((tmp_path / "out" / "results.json").read_text())["failed"]} == {
        "dies", "breaks",
    }  # fmt: skip
    export_study(outcome.results, tmp_path / "out", tmp_path / "exported")


def test_without_its_start_a_run_is_not_begun(tmp_path: Path) -> None:
    path = write(tmp_path, recipe={**BASE, "warm_start": {"steps": 2, "until": 0.5}, "eval": {"items": 0}}, claims=[])
    outcome, _ = run(path, tmp_path / "out")
    assert len(outcome.failed) == 3 and all(
        "its warm start failed: warm_start.until" in line for line in outcome.failed
    )
    assert not (tmp_path / "out" / "runs").exists()


def test_a_start_that_is_worse_than_it_was_to_be_is_said_and_written_down(tmp_path: Path) -> None:
    path = write(tmp_path, recipe={**BASE, "warm_start": {"steps": 2, "until": 0.9}}, claims=[], seeds=1)
    outcome, said = run(path, tmp_path / "out")
    (note,) = outcome.results["notes"]
    assert re.fullmatch(
        r"warm start, seed 0: a success of [\d.]+ behind 2 steps, and not the 0\.9 of warm_start\.until: raise .*", note
    )
    assert note in said and json.loads((tmp_path / "out" / "results.json").read_text())["notes"] == [note]
    assert note in run(path, tmp_path / "out")[1]  # also where it was trained before


def test_a_dry_run_says_arms_seeds_and_time_and_leaves_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, seeds=3)
    said = io.StringIO()
    dry_run(load_study(path), tmp_path / "out", computing=Computing(), jobs=2, console=Console(file=said, width=200))
    assert "9 runs and 1 warm starts, 9 runs left: about" in said.getvalue()
    assert "sync.every = 3" in said.getvalue()
    assert not (tmp_path / "out").exists()


def test_a_dry_run_takes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["study", str(write(tmp_path)), "--dry-run", "--reuse", str(tmp_path)]) == 2
    assert "--dry-run trains nothing and takes nothing: leave out --reuse" in capsys.readouterr().err


def test_the_command_line_lays_its_values_over_the_file(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, root, _, _ = made
    assert cli.main(["study", str(path), "--output", str(root), "--export", str(tmp_path / "x")]) == 0
    assert "confirmed here" in capsys.readouterr().out
    assert {file.name for file in (tmp_path / "x").iterdir()} == {"results.json", "table.csv", "curves.json.gz"}
    flags = ["--seeds", "4", "--steps", "5", "--output", str(tmp_path / "dry"), "--dry-run"]
    assert cli.main(["study", str(path), *flags]) == 0
    assert "12 runs and 1 warm starts, 12 runs left" in capsys.readouterr().out
    for argv, words in [
        (["--jobs", "0"], "--jobs is 0"),
        (["--stepps", "3"], "unknown key stepps; did you mean steps"),
        (["--steps"], "--steps: values of the recipe"),
        (["--seeds", "1", "1"], "--seeds = [1, 1] names a seed twice"),
        (["--recipe", "nowhere.yaml"], "nowhere.yaml: no such file"),
    ]:
        assert cli.main(["study", str(path), *argv]) == 2
        assert words in capsys.readouterr().err


def test_a_slope_over_lengths_is_read_off_the_rollouts_that_are_kept(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    (tmp_path / "rollouts").mkdir()
    assert length_slope(tmp_path) is None
    sampled = [[-1.0] * n for n in (2, 4, 6)]
    trained = [[-1.0 - 0.25] * n for n in (2, 4, 6)]
    table = pyarrow.table({"sampler_logprobs": sampled, "trainer_logprobs": trained})
    parquet.write_table(table, tmp_path / "rollouts" / "step-000001.parquet")
    assert length_slope(tmp_path) == pytest.approx(-0.25)
    exact = table.append_column("exact_logprobs", pyarrow.array(sampled))
    parquet.write_table(exact, tmp_path / "rollouts" / "step-000001.parquet")
    assert length_slope(tmp_path) == 0.0


def test_a_worker_leaves_with_the_process_that_it_works_for() -> None:
    """As after a kill of the study: a run that goes on alone would hold its folder."""
    context = multiprocessing.get_context("spawn")
    _, theirs = context.Pipe()
    worker = context.Process(target=serve, args=(theirs, Computing(), os.getpid() + 1), daemon=True)
    worker.start()
    worker.join(60)
    assert worker.exitcode == 1
