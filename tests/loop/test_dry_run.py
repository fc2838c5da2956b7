"""A dry run says what a device would hold, tries what fits, and leaves nothing behind."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from types import CellType
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from made import FAMILIES
from vexact import cli
from vexact.loop.budget import activation_bytes, budget_of, layer_bytes, shares
from vexact.loop.dry_run import dry_run
from vexact.model.checkpoint import shapes
from vexact.model.gradients import Gradients
from vexact.model.known import known_config
from vexact.model.law import Law
from vexact.model.pages import pages_for
from vexact.model.parameters import stack
from vexact.model.policy import Policy, Scored
from vexact.model.recording import Recording
from vexact.model.tiny import tiny_config, tiny_weights
from vexact.recipe import (
    KLSection,
    LossSection,
    MismatchSection,
    ModelSection,
    OptimizerSection,
    Recipe,
    RemedySection,
    RunSection,
    SamplingSection,
    SyncSection,
)
from vexact.rollout.sampler import page_bytes
from vexact.verification.ranks import on_ranks
from vexact_kernels import load


def kept_by(tape: Any) -> int:
    """Bytes of all tensors that a tape's steps hold on to, each memory once."""
    memories: dict[int, int] = {}
    seen: set[int] = set()

    def visit(thing: Any) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            memories[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, CellType):
            visit(thing.cell_contents)
        elif isinstance(thing, (tuple, list)):
            for part in thing:
                visit(part)
        elif callable(thing) and getattr(thing, "__closure__", None):
            for cell in thing.__closure__:
                visit(cell)

    for step in tape._steps:
        visit(step)
    return sum(memories.values())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_activations_are_what_a_tape_keeps(family: str, dtype: torch.dtype, recompute: bool) -> None:
    """But for what is of no layer: 49 bytes a token of log-probabilities and indices, positions, and the policy's RoPE
    tables. A tensor more or less in any layer would be 20 times the tolerance."""
    config = tiny_config(family, **{**FAMILIES[family], "num_hidden_layers": 5, "intermediate_size": 640})
    weights, tokens = tiny_weights(config), 256
    policy = Policy.build(config, lambda name: stack(config, weights, name), load(), dtype)
    recording = Recording(policy.ops.kernels, Gradients(config, policy.ops.kernels), recompute)
    policy._forward([Scored([i % 250 for i in range(tokens + 1)], 1)], recording, ([0], None))
    recipe = Recipe(optimizer=OptimizerSection(tokens_at_once=tokens, recompute=recompute))
    # pages, and the layer that is held while it is computed again, are no part of the tape
    elsewhere = pages_for(tokens) * page_bytes(config, dtype) // config.num_layers
    elsewhere += tokens * layer_bytes(config, dtype.itemsize) if recompute else 0
    elsewhere -= tokens * (49 if recompute else 49 + 8 + 4 * config.head_dim)
    expected = activation_bytes(recipe, config, dtype) - elsewhere
    assert kept_by(recording.tape) == pytest.approx(expected, abs=6 * tokens)


def test_recomputing_keeps_a_fraction() -> None:
    config = known_config("Qwen3-1.7B")
    assert config is not None
    kept, recomputed = (
        activation_bytes(Recipe(optimizer=OptimizerSection(recompute=on)), config, config.dtype) for on in (False, True)
    )
    assert kept > 8 * recomputed


def test_state_is_divided_among_ranks_and_gradients_are_not() -> None:
    config = known_config("models/Qwen3-1.7B")
    assert config is not None
    assert sum(math.prod(shape) for shape in shapes(config).values()) == 1_720_574_976
    alone, eight = (budget_of(Recipe(), config, torch.bfloat16, ranks).parts for ranks in (1, 8))
    assert alone["masters, float32"] == 4 * 1_720_574_976
    assert eight["moments, float32"] == 2 * eight["masters, float32"] < alone["moments, float32"] / 4
    gradients = "gradients: running lane and total, float32"
    assert eight[gradients] == alone[gradients] == 2 * 4 * (1_720_574_976 + 151936 * 2048)
    assert shares(config, 8)[1] == 151936 * 2048


def test_versions_and_the_reference_count() -> None:
    recipe = Recipe(sync=SyncSection(every=4), delay=2, loss=LossSection(kl=KLSection(coef=0.1)), steps=100)
    parts = budget_of(recipe, tiny_config(), torch.float32).parts
    assert "weights, 4 versions, float32" in parts
    assert parts["reference policy, float32"] * 4 == parts["weights, 4 versions, float32"]


def test_laws_count_where_rollouts_keep_them() -> None:
    name = "laws that a step's rollouts were drawn from, at most"
    sampling = SamplingSection(prompts=2, samples=4, max_tokens=10, rounds=3)
    dlc = LossSection("reinforce", remedy=RemedySection(name="dlc", resync_level="token"))
    torch_side = lambda **keys: MismatchSection(cause="torch", **keys)  # noqa: E731
    counted = Recipe(sampling=sampling, loss=dlc, mismatch=torch_side())
    for config in (tiny_config(), replace(tiny_config(), vocab_size=49152)):
        logits = torch.zeros(1, config.vocab_size)
        law = Law.of(load(), logits, torch.ones(1), torch.zeros(1, dtype=torch.int64))
        row = sum(column.numel() * column.element_size() for column in vars(law).values() if isinstance(column, Tensor))
        assert budget_of(counted, config, torch.float32).parts[name] == 3 * 2 * 4 * 10 * row
    diagnosed = replace(counted, loss=LossSection(), run=RunSection(diagnose=5))
    assert name in budget_of(diagnosed, tiny_config(), torch.float32).parts
    for recipe in (
        replace(counted, mismatch=MismatchSection(cause="temperature")),
        replace(counted, mismatch=torch_side(side="trainer")),
        replace(counted, loss=LossSection()),
        replace(counted, device="cuda"),
    ):
        assert name not in budget_of(recipe, tiny_config(), torch.float32).parts


def said(recipe: Recipe, **options: Any) -> str:
    out = io.StringIO()
    dry_run(recipe, options.pop("kernels", load()), Console(file=out, width=200), **options)
    return out.getvalue()


def test_a_dry_run_tries_a_step_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("model: {path: tiny}\n")
    assert cli.main(["train", "--dry-run", "recipe.yaml"]) == 0
    out = capsys.readouterr().out
    assert "32 tokens sampled and scored again, 0 differ" in out
    assert "step: 32 tokens trained, mismatch 0 of 32, grad norm" in out
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


MISSING = Recipe(model=ModelSection("models/Qwen3-0.6B"))


def test_a_missing_model_of_a_known_name_is_random(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vexact.loop.dry_run.known_config", lambda path: tiny_config(dtype="bfloat16"))
    out = said(MISSING)
    assert "weights: random, models/Qwen3-0.6B is not there" in out
    assert "step: 32 tokens trained" in out and "weights, 2 versions, bfloat16" in out


@pytest.mark.parametrize(
    ("free", "words"), [(0, "nothing was run"), (1 << 31, "sampled and scored only"), (1 << 33, "step: 32 tokens")]
)
def test_what_does_not_fit_is_not_run(free: int, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vexact.loop.dry_run.known_config", lambda path: tiny_config())
    monkeypatch.setattr("vexact.loop.dry_run.free_memory", lambda device: free)
    out = said(replace(MISSING, optimizer=OptimizerSection(tokens_at_once=1 << 18)))
    assert words in out
    assert ("step: " in out, "forward: " in out) == (free == 1 << 33, free > 0)


def test_a_device_that_is_not_here_leaves_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = said(replace(MISSING, device="cuda"), kernels=None)
    assert "596,049,920" in out and "device cuda is not here: nothing was run" in out


def test_a_model_that_is_neither_there_nor_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        said(Recipe(model=ModelSection(str(tmp_path / "none"))))


def test_ranks_try_the_step_together() -> None:
    outputs = on_ranks(2, lambda ranks: said(Recipe(), ranks=ranks))
    assert "memory of each of 2 devices" in outputs[0] and "step: 32 tokens trained" in outputs[0]
    assert outputs[1] == ""
