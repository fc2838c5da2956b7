"""The distribution of Δ from rollouts: against counts by hand, and as the summary that an export keeps."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from made_studies import MadeArm, write_rollouts, write_study
from vexact.report import ReportError
from vexact.report.delta_charts import panels
from vexact.report.deltas import EDGES, PROBABILITIES, Deltas, deltas_of, read_deltas, read_table, rows
from vexact.report.reading import read_sources
from vexact.report.study import Study


def test_counts_are_those_of_hand() -> None:
    q = np.log(np.array([0.05, 0.5, 0.95, 0.95]))
    p = q + np.array([0.2, -0.012, 0.0, 0.003])
    found = Deltas.of(q, p, p == q)
    assert (found.tokens, found.equal, found.positive) == (4, 1, 2)
    assert found.mean == pytest.approx(0.215 / 4) and found.largest == pytest.approx(0.2)
    assert sum(found.counts) == 3
    bins = {k for k, count in enumerate(found.counts) if count}
    assert bins == {max(i for i, edge in enumerate(EDGES) if edge <= math.log10(d)) for d in (0.2, 0.012, 0.003)}
    near = {k: tokens for k, (tokens, _) in enumerate(found.near) if tokens}
    assert near == {PROBABILITIES.index(0.01): 1, PROBABILITIES.index(0.3): 1, PROBABILITIES.index(0.9): 2}


def test_equal_bits_are_zero_even_where_both_are_infinite() -> None:
    q = np.array([-math.inf, -1.0])
    found = Deltas.of(q, q.copy(), np.array([True, True]))
    assert (found.tokens, found.equal, found.largest, sum(found.counts)) == (2, 2, 0.0, 0)
    one_side = Deltas.of(q, np.array([-2.0, -1.0]), np.array([False, True]))
    assert one_side.tokens == 1, "an infinite difference has no place in a mean"


def test_nothing_compared_gives_an_empty_distribution() -> None:
    empty = np.array([])
    assert Deltas.of(empty, empty, empty.astype(bool)).tokens == 0


def test_a_summary_survives_json() -> None:
    q = -np.arange(1.0, 50.0)
    found = Deltas.of(q, q + 1e-3, np.zeros(49, bool))
    assert read_deltas(json.loads(json.dumps({"a": found.document()}))) == {"a": found}
    older = {name: value for name, value in found.document().items() if name not in ("runs", "steps")}
    assert read_deltas({"a": older}) == {"a": found}
    with pytest.raises(ReportError, match=r"deltas\.json\.gz: not what vexact report --keep writes"):
        read_deltas({"a": {"tokens": 1}})


def test_runs_of_an_arm_are_added_up(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [MadeArm("exact", "exact"), MadeArm("noisy", dose=1e-2)], seeds=2, steps=5)
    exact, noisy = read_sources([folder]).arms
    found = deltas_of(exact)
    assert found is not None and found.equal == found.tokens == 16 * 30
    assert (found.runs, found.steps) == (1, (0,))  # the second seed kept none
    assert "kept: step 0, of 1 run an arm." in panels(Study("t", "", (exact,)), {"exact": found})[0].note
    write_rollouts(noisy.runs[1].folder or tmp_path, 1e-2, 7)
    both = deltas_of(noisy)
    assert both is not None and both.tokens == 2 * 16 * 30 and 0 < both.mean < 1 and both.runs == 2
    charts = panels(Study("t", "", (exact, noisy)), {"exact": found, "noisy": replace(both, steps=(0, 50, 199))})
    assert "kept: steps 0, 50, 199, of 1 to 2 runs an arm." in charts[0].note


def test_the_exact_columns_come_before_the_trainers(tmp_path: Path) -> None:
    table = read_table(write_rollouts(tmp_path, 1e-2, 0))
    (_, trainer, _, _), *_ = rows(table)
    table["exact_logprobs"] = table["sampler_logprobs"]
    table["exact_logprobs_bits"] = table["sampler_logprobs_bits"]
    (sampler, exact, _, _), *_ = rows(table)
    assert exact == sampler and trainer != sampler


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "step-000000.parquet").write_text("nonsense")
    with pytest.raises(ReportError, match=r"step-000000\.parquet: cannot be read as parquet"):
        read_table(tmp_path / "step-000000.parquet")
