"""What a person sees of a study while it runs."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from vexact.experiments import progress
from vexact.experiments.progress import Watch, duration
from vexact.experiments.recipes import Job
from vexact.recipe import Recipe, RunSection


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (89.0, "89 s"), (150.0, "2 min"), (5340.0, "89 min"), (11100.0, "3 h 05 min")]
)
def test_durations_are_short(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def jobs(folder: Path) -> list[Job]:
    recipe = Recipe(steps=10)
    return [
        Job("a", seed, seed, f"d{seed}", replace(recipe, run=RunSection(folder=str(folder / f"d{seed}"))))
        for seed in range(2)
    ]


def reached(job: Job, steps: int) -> None:
    job.folder.mkdir(exist_ok=True)
    (job.folder / "metrics.jsonl").write_text("{}\n" * steps)


@pytest.mark.parametrize("terminal", [False, True])
def test_time_left_follows_from_the_steps_of_this_attempt(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    first, second = jobs(tmp_path)
    reached(first, 4)  # by an earlier attempt: it says nothing of how fast this one is
    said = io.StringIO()
    console = Console(file=said, force_terminal=terminal, width=120)
    with Watch(console, [first, second], total=5) as watch:
        assert watch._said() == "3/5 runs"
        reached(first, 9)
        now[0] += 50.0
        watch.tick([first])
        assert watch._said() == "3/5 runs  2 min left"  # 5 of 20 steps in 50 s
        watch.ended(first, "")
        now[0] += 50.0
        watch.ended(second, "no such thing [x]")
    assert "4/5  a, seed 0: 10 steps  50 s left" in said.getvalue()
    assert "5/5  a, seed 1: failed: no such thing [x]" in said.getvalue()
