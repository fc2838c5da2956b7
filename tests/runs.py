"""Small whole runs, and what two of them must have in common."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from vexact.loop import RunResult, train
from vexact.recipe import (
    CheckpointSection,
    KLSection,
    LossSection,
    ModelSection,
    OptimizerSection,
    Recipe,
    RewardSection,
    RunSection,
    SamplingSection,
    SyncSection,
    TaskSection,
)
from vexact_kernels import load

TIMES = ("seconds", "_per_second")  # how the names of metrics end that are not a function of the recipe
REWARD = """
def odd(completions, **_):
    return [sum(sign in "13579" for sign in text) / max(1, len(text)) for text in completions]
"""


def small_recipe(folder: Path, reward: Path, **changes: Any) -> Recipe:
    """Six steps with all that a run can keep: moments, older versions, a reference policy. reward: a file to write."""
    reward.write_text(REWARD)
    recipe = Recipe(
        name="small",
        steps=6,
        model=ModelSection("tiny-modsum", "bfloat16"),
        task=TaskSection(name="modsum", reward=RewardSection(function=f"{reward}:odd")),
        sampling=SamplingSection(prompts=3, samples=5, max_tokens=5),
        loss=LossSection(kl=KLSection(0.1, "k3")),
        optimizer=OptimizerSection(lr=1e-2),
        sync=SyncSection(every=2),
        delay=1,
        checkpoint=CheckpointSection(every=2, keep=2),
        run=RunSection(folder=str(folder)),
    )
    return replace(recipe, **changes)


def run(recipe: Recipe, console: Console | None = None) -> RunResult:
    return train(recipe, kernels=load(), console=console or Console(file=io.StringIO()))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what time it took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.endswith(TIMES)} for line in lines]


def bytes_of(folder: Path) -> dict[str, bytes]:
    """What a run left that is a function of its recipe: states, rollouts and the trained model, byte by byte."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and "/" in name and path.name not in ("manifest.json", "state.json"):
            found[name] = path.read_bytes()
    return found


def states_of(folder: Path) -> list[dict[str, Any]]:
    """state.json of each, but for the sizes of the logs: how many digits a time has may differ."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("checkpoints/*/state.json"))]
    return [{name: value for name, value in state.items() if name != "logs"} for state in found]


def assert_same_run(folder: Path, expected: Path) -> None:
    """Metrics, rollouts, states and weights of two runs, in every bit; nothing else lies about."""
    assert lines_of(folder) == lines_of(expected)
    assert states_of(folder) == states_of(expected)
    actual, wanted = bytes_of(folder), bytes_of(expected)
    assert actual.keys() == wanted.keys()
    assert [name for name in wanted if actual[name] != wanted[name]] == []
    results = [json.loads((each / "result.json").read_text()) for each in (folder, expected)]
    assert results[0]["weights_fingerprint"] == results[1]["weights_fingerprint"]
    assert [path.name for path in folder.rglob(".*") if path.name != ".lock"] == []
