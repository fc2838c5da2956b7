"""Processes that torchrun starts share a run, and what they leave is what one process leaves, in every bit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vexact.cli import main
from vexact.loop import train
from vexact.ranks import LostRank, RankError, ranks_of
from vexact.recipe import load_recipe
from vexact_kernels import load

RECIPE = """
name: shared
steps: 3
model: {path: tiny-modsum, dtype: bfloat16}
task: {name: modsum, held_out: 0.1, reward: {function: "REWARD:score"}}
warm_start: {steps: 1, sequences: 11}
sampling: {prompts: 3, samples: 4, max_tokens: 6}
loss: {mini_batches: 2, kl: {coef: 0.1}}
optimizer: {lr: 1.0e-3}
eval: {items: 5}
delay: 1
checkpoint: {every: 1}
"""
# Rewards that vary, from a function that notes each of its calls.
REWARD = """
from pathlib import Path

def score(completions, **columns):
    with Path(__file__).with_name("calls").open("a") as file:
        file.write("called\\n")
    return [(sum(map(ord, text)) % 7) / 7 for text in completions]
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "reward.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(RECIPE.replace("REWARD", str(folder / "reward.py")))
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def alone(recipe: Path) -> list[dict[str, Any]]:
    folder = recipe.parent / "alone"
    train(load_recipe(recipe, {"run.folder": str(folder)}), kernels=load(), console=Console(quiet=True))
    calls(recipe)
    return measured(folder)


def calls(recipe: Path) -> int:
    """Of the reward function since this was asked last."""
    notes = recipe.with_name("calls")
    count = len(notes.read_text().splitlines())
    notes.unlink()
    return count


def measured(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl but for times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


def torchrun(count: int, *words: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000"}
    return subprocess.run([*launcher, *words], capture_output=True, text=True, env=environment, timeout=300)


def test_four_processes_leave_what_one_leaves(recipe: Path, alone: list[dict[str, Any]]) -> None:
    folder = recipe.parent / "four"
    done = torchrun(4, "-m", "vexact.cli", "train", str(recipe), "--run.folder", str(folder))
    assert done.returncode == 0, done.stderr
    assert measured(folder) == alone
    assert all(line["grad_norm"] > 0 and line["kl"] >= 0 for line in alone[1:])
    assert calls(recipe) == 6  # three steps, an evaluation before them, and behind them of trainer and older sampler
    assert done.stdout.count("step 2/3") == 1  # the first rank speaks for all


def test_one_two_and_one_process_take_up_each_others_run(recipe: Path, alone: list[dict[str, Any]]) -> None:
    folder = recipe.parent / "two"
    begun = load_recipe(recipe, {"run.folder": str(folder), "steps": "1"})
    train(begun, kernels=load(), console=Console(quiet=True))
    done = torchrun(2, "-m", "vexact.cli", "train", str(recipe), "--run.folder", str(folder), "--steps", "2")
    assert done.returncode == 0, done.stderr
    train(load_recipe(recipe, {"run.folder": str(folder)}), kernels=load(), console=Console(quiet=True))
    assert [line["fingerprint"] for line in measured(folder)] == [line["fingerprint"] for line in alone]


def test_two_processes_share_a_disturbed_run_and_its_remedy(recipe: Path) -> None:
    """The dose is solved by each of them, and none of it is different."""
    disturbed = {
        "mismatch.preset": "fp8-kv",
        "loss.name": "reinforce",
        "loss.kl.place": "reward",
        "loss.remedy.name": "dlc",
        "loss.remedy.resync_level": "sequence",
    }
    one, two = (recipe.parent / f"disturbed-{name}" for name in ("one", "two"))
    train(load_recipe(recipe, {"run.folder": str(one), **disturbed}), kernels=load(), console=Console(quiet=True))
    words = [word for key, value in disturbed.items() for word in (f"--{key}", value)]
    done = torchrun(2, "-m", "vexact.cli", "train", str(recipe), "--run.folder", str(two), *words)
    assert done.returncode == 0, done.stderr
    assert measured(two) == measured(one)
    assert all(line["tim/differing"] == line["tokens"] > 0 for line in measured(one)[1:])
    calls(recipe)


DYING = """
import os, signal, sys
from vexact.ranks import LostRank, ranks_of
ranks = ranks_of(os.environ, "cpu")
ranks.agree("size", ranks.size)
if ranks.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    ranks.gather(0)
except LostRank as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)
"""


def test_a_rank_that_dies_ends_the_others_with_one_line() -> None:
    """Without torchrun, which would end them as well, but not say why."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    meeting = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", DYING]
    with (
        subprocess.Popen(command, env={**meeting, "RANK": "0"}, stderr=subprocess.PIPE, text=True) as survivor,
        subprocess.Popen(command, env={**meeting, "RANK": "1"}) as victim,
    ):
        _, said = survivor.communicate(timeout=300)
        assert (survivor.returncode, victim.wait()) == (1, -signal.SIGKILL)
    assert said.splitlines()[-1].startswith("rank 0: another rank has ended, so this one ends too (")


SHIPPED = Path(__file__).parents[1] / "recipes" / "tiny_chain_sum.yaml"


@pytest.mark.parametrize("error, abrupt", [(LostRank("rank 0: gone"), True), (RankError("rank 0: no"), False)])
def test_the_command_line_leaves_at_once_where_a_rank_is_lost(
    error: RankError, abrupt: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setattr("vexact.ranks.ranks_of", lambda *arguments: (_ for _ in ()).throw(error))
    assert main(["train", str(SHIPPED)]) == 2
    assert codes == [2] * abrupt
    assert capsys.readouterr().err == f"vexact: {error}\n"


def test_lanes_cannot_be_divided_among_three() -> None:
    with pytest.raises(RankError, match="WORLD_SIZE is 3, must be 1, 2, 4 or 8: a rank owns whole ones of the 8 lanes"):
        ranks_of({"WORLD_SIZE": "3", "RANK": "0"}, "cpu")


def test_a_rank_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(RankError, match="LOCAL_RANK is 1 and there are 1 GPUs"):
        ranks_of({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}, "cuda")


def test_without_torchrun_there_is_one_process() -> None:
    ranks = ranks_of({}, "cpu")
    assert (ranks.rank, ranks.size, ranks.first) == (0, 1, True)
    assert ranks.joined(ranks.part([1, 2, 3])) == [1, 2, 3]
