"""What a report reads: studies, exported studies, plain runs, and folders that somebody is still writing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from made_studies import MadeArm, dose_arms, metric_lines, write_run, write_study
from vexact.report import ReportError
from vexact.report.reading import read_sources
from vexact.report.study import Study


def a_run(folder: Path, steps: int = 10, of: int = 10) -> Path:
    return write_run(folder, metric_lines(MadeArm("a"), 0, 0, steps, 5), of, {})


def test_a_study_is_read_with_its_curves_endpoints_and_settings(tmp_path: Path) -> None:
    study = read_sources([write_study(tmp_path, dose_arms((1e-2,)), seeds=2, steps=20, rollouts=False)])
    assert [(arm.name, arm.role, len(arm.runs)) for arm in study.arms] == [
        ("exact", "exact", 2), ("flip", "null", 2), ("draws", "null", 2),
        ("sampler-0.01", "arm", 2), ("both-shared-0.01", "arm", 2),
    ]  # fmt: skip
    sampler = study.arms[3]
    assert sampler.settings["mismatch.side"] == "sampler" and sampler.settings["mismatch.k3"] == 0.01
    assert len(sampler.runs[0].curves["tim/k3"].steps) == 20
    assert len(sampler.endpoints["late_trainer"]) == 2
    assert study.claims[0].verdict == "confirmed here"
    assert study.notes == ()


def test_an_exported_study_has_the_same_curves(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", dose_arms((1e-2,)), seeds=2, steps=20, rollouts=False)
    here = read_sources([folder])
    away = tmp_path / "exported"
    away.mkdir()
    results = json.loads((folder / "results.json").read_text())
    for arm in results["arms"]:
        for run in arm["runs"]:
            run["folder"] = ""
    (away / "results.json").write_text(json.dumps(results))
    curves = {
        arm.name: {
            str(run.seed): {name: list(zip(c.steps, c.values, strict=True)) for name, c in run.curves.items()}
            for run in arm.runs
        }
        for arm in here.arms
    }
    (away / "curves.json.gz").write_bytes(gzip.compress(json.dumps(curves).encode()))
    there = read_sources([away])
    curves_of = lambda study: [[run.curves for run in arm.runs] for arm in study.arms]  # noqa: E731
    assert curves_of(there) == curves_of(here)
    (away / "curves.json.gz").unlink()
    assert curves_of(read_sources([away])) != curves_of(here)


def test_a_run_that_goes_on_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    file = a_run(tmp_path / "run", steps=6, of=30) / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 6, "entr')
    study = read_sources([tmp_path / "run"])
    assert study.arms[0].runs[0].curves["entropy"].steps == tuple(range(6))
    assert "run: the last line of metrics.jsonl is not whole and is left out." in study.notes
    assert "run: has reached step 6 of 30; what it shows is not its end." in study.notes


def test_a_run_that_is_done_needs_no_note(tmp_path: Path) -> None:
    assert read_sources([a_run(tmp_path / "run")]).notes == ()


def test_a_broken_line_before_the_last_is_named(tmp_path: Path) -> None:
    file = a_run(tmp_path / "run") / "metrics.jsonl"
    file.write_text("nonsense\n" + file.read_text())
    with pytest.raises(ReportError, match=r"metrics\.jsonl: line 1 is not a line of metrics"):
        read_sources([tmp_path / "run"])


@pytest.mark.parametrize("missing", [float("nan"), None, float("inf")])
def test_missing_values_are_said(tmp_path: Path, missing: float | None) -> None:
    lines: list[dict[str, Any]] = [
        {"step": 0, "entropy": 0.5},
        {"step": 1, "entropy": missing},
        {"step": 2, "entropy": 0.4, "name": "text"},
    ]
    study = read_sources([write_run(tmp_path / "run", lines, 3, {})])
    assert study.arms[0].runs[0].curves["entropy"].steps == (0, 2)
    assert set(study.arms[0].runs[0].curves) == {"entropy"}
    assert "run: 1 values are not finite and are not drawn, most of them in entropy." in study.notes


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    study = read_sources([a_run(tmp_path / "a" / "run"), a_run(tmp_path / "b" / "run")])
    assert [arm.name for arm in study.arms] == ["run", "run (2)"]


def test_a_study_and_a_run_make_one_report(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", dose_arms(()), seeds=1, steps=5, rollouts=False)
    study = read_sources([folder, a_run(tmp_path / "run")])
    assert [arm.name for arm in study.arms] == ["exact", "flip", "draws", "run"]


def of(content: Any, tmp_path: Path) -> Study:
    (tmp_path / "results.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return read_sources([tmp_path])


def test_failed_runs_are_said(tmp_path: Path) -> None:
    failed = [{"arm": "a", "seed": seed, "error": "out of memory"} for seed in range(9)]
    assert of({"arms": [], "failed": failed[3:4]}, tmp_path).notes == ("failed: a seed 3: out of memory",)
    several = "9 runs failed (a seed 0, a seed 1, a seed 2, …): out of memory"
    assert of({"arms": [], "failed": failed}, tmp_path).notes == (several,)
    assert of({"arms": [], "notes": ["worse"], "failed": failed}, tmp_path).notes == ("worse", several)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"results\.json: cannot be read as JSON"),
        ([], "is not the result of a study"),
        ({"arms": {}}, "it has no list of arms"),
        ({"arms": ["x"]}, "arm x"),
        ({"arms": [{"name": "x", "runs": [{"seed": "one"}]}]}, "arm x: invalid literal"),
    ],
)
def test_results_that_are_none_are_named(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(ReportError, match=words):
        of(content, tmp_path)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no such folder"):
        read_sources([tmp_path / "nowhere"])
    with pytest.raises(ReportError, match=r"holds neither results\.json of a study nor metrics\.jsonl of a run"):
        read_sources([tmp_path])
    with pytest.raises(ReportError, match="RUN: name at least one"):
        read_sources([])


def test_arms_of_two_studies_stay_beside_the_exact_arm_of_their_own(tmp_path: Path) -> None:
    folders = [write_study(tmp_path / name, dose_arms((1e-2,)), seeds=1, steps=5, rollouts=False) for name in "ab"]
    study = read_sources(folders)
    references = {arm.name: (study.reference(arm) or arm).name for arm in study.arms}
    assert references["sampler-0.01"] == references["flip"] == "exact"
    assert references["sampler-0.01 (2)"] == references["flip (2)"] == references["exact (2)"] == "exact (2)"


def test_what_was_kept_of_two_studies_stays_with_its_own_arms(tmp_path: Path) -> None:
    """Exported studies have no rollouts: their Δ is read from what was kept, by the names of their arms."""
    folders = [write_study(tmp_path / name, dose_arms((1e-2,)), seeds=1, steps=5, rollouts=False) for name in "ab"]
    for folder in folders:
        (folder / "deltas.json.gz").write_bytes(gzip.compress(json.dumps({
            "deltas": {name: f"{folder.name} {name}" for name in ("exact", "sampler-0.01")},
            "rollouts": {"exact": [f"a rollout of {folder.name}"]},
        }).encode()))  # fmt: skip
    assert read_sources(folders).distributions == {
        "deltas": {"exact": "a exact", "sampler-0.01": "a sampler-0.01",
                   "exact (2)": "b exact", "sampler-0.01 (2)": "b sampler-0.01"},
        "rollouts": {"exact": ["a rollout of a"], "exact (2)": ["a rollout of b"]},
    }  # fmt: skip
    (folders[1] / "deltas.json.gz").write_bytes(gzip.compress(b'{"deltas": []}'))
    with pytest.raises(ReportError, match=r"deltas\.json\.gz: not what vexact report --keep writes"):
        read_sources(folders)


def beside(folder: Path, placed: dict[str, str]) -> Path:
    """The study in a folder, its arm `flip` an exact one and some of the others beside it."""
    results = json.loads((folder / "results.json").read_text())
    for arm in results["arms"]:
        arm["role"] = "exact" if arm["name"] == "flip" else arm["role"]
        arm["beside"] = placed.get(arm["name"], "exact")
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_an_arm_stands_beside_the_exact_arm_that_its_study_says(tmp_path: Path) -> None:
    folders = [write_study(tmp_path / name, dose_arms((1e-2,)), seeds=1, steps=5, rollouts=False) for name in "ab"]
    first, second = (beside(folder, {"sampler-0.01": "flip"}) for folder in folders)
    for study, extra in ((read_sources([first]), ""), (read_sources([first, second]), " (2)")):
        references = {arm.name: (study.reference(arm) or arm).name for arm in study.arms}
        assert references[f"sampler-0.01{extra}"] == f"flip{extra}"
        assert references[f"both-shared-0.01{extra}"] == f"exact{extra}"
