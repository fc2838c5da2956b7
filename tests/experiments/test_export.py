"""What is exported is small and still says what happened."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from vexact.errors import BadInput
from vexact.experiments import export
from vexact.experiments.export import POINTS, export_study, shortened, thinned

LINES: list[dict[str, Any]] = [
    {"step": step, "tim/k3": 1.0 / 3.0 + step, "grad_norm": None, "tokens": 64, "fingerprint": "ab", "python": 3,
     **({"eval_success": step / 200} if step % 10 == 0 else {})}
    for step in range(200)
]  # fmt: skip


def test_curves_are_thinned_but_for_evaluations_and_their_ends() -> None:
    curves = dict(thinned(LINES))
    assert set(curves) == {"tim/k3", "tokens", "eval_success"}
    assert len(curves["eval_success"]) == 20
    steps = [step for step, _ in curves["tim/k3"]]
    assert len(steps) <= POINTS + 1 and (steps[0], steps[-1]) == (0, 199)
    assert len(dict(thinned(LINES[:POINTS]))["tim/k3"]) == POINTS


def test_numbers_have_four_digits_and_counts_stay() -> None:
    assert (shortened(1.0 / 3.0), shortened(12345.6), shortened(1.23456e-7), shortened(123456)) == (
        0.3333, 12350.0, 1.235e-07, 123456,
    )  # fmt: skip


def results(seeds: int) -> dict[str, Any]:
    runs = [{"seed": seed, "folder": "runs/x", "digest": "x", "fingerprint": "y"} for seed in range(seeds)]
    arm = {"name": "exact", "role": "exact", "label": "", "overrides": {}, "runs": runs}
    return {"study": "s", "title": "t", "question": "", "arms": [arm], "endpoints": {"exact": {}}, "claims": []}


def metrics(root: Path) -> None:
    (root / "runs" / "x").mkdir(parents=True)
    (root / "runs" / "x" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))


def test_an_export_holds_no_run_folder_and_is_the_same_each_time(tmp_path: Path) -> None:
    metrics(tmp_path)
    for name in ("a", "b"):
        export_study(results(2), tmp_path, tmp_path / name)
    files = sorted((tmp_path / "a").iterdir())
    assert [file.name for file in files] == ["curves.json.gz", "results.json", "table.csv"]
    assert [file.read_bytes() for file in files] == [(tmp_path / "b" / file.name).read_bytes() for file in files]
    assert files[0].read_bytes()[4:8] == bytes(4)  # gzip's time of day
    content = json.loads((tmp_path / "a" / "results.json").read_text())
    assert [run["folder"] for run in content["arms"][0]["runs"]] == ["", ""]
    curves = json.loads(gzip.decompress(files[0].read_bytes()))
    assert curves["exact"]["1"]["eval_success"][3] == [30, 0.15]


def test_an_export_that_is_too_large_to_be_committed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics(tmp_path)
    monkeypatch.setattr(export, "MOST_BYTES", 100)
    with pytest.raises(BadInput, match="the curves take"):
        export_study(results(1), tmp_path, tmp_path / "a")
    assert not (tmp_path / "a").exists()
