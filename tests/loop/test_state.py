"""A state on disk: what is written comes back in every bit, whole or not at all, and damage is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import assert_same_bits
from made import assert_same_step, make_rollouts, make_trainer, some_advantages
from vexact.loop.state import Progress, StateError, restore, save_state
from vexact.model.checkpoint import fingerprint, load_weights
from vexact.model.config import ModelConfig
from vexact.model.policy import Policy
from vexact.model.shards import CheckpointError
from vexact.recipe import KLSection, LossSection
from vexact.training.trainer import Trainer, weights_of
from vexact.verification.checks import thread_count

LOSS = LossSection(kl=KLSection(0.1, "k3"))
LENGTHS = (1, 3, 5, 8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with thread_count(1):
        yield


def step(trainer: Trainer) -> None:
    trainer.step(make_rollouts(trainer.policy, LENGTHS), some_advantages(len(LENGTHS)))


def trained(family: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any) -> Trainer:
    """Two steps old, so that moments and running products are not what they began as."""
    trainer = make_trainer(family, dtype, LOSS, **changes)
    for _ in range(2):
        step(trainer)
    return trainer


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainer_goes_on_in_every_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    expected = trained(family, dtype)
    older = expected.policy
    step(expected)
    save_state(tmp_path / "state", expected, Progress(3, {"best": 0.1}, {"metrics.jsonl": 7}), {"2": older})
    trainer = make_trainer(family, dtype, LOSS)
    restored = restore(tmp_path / "state", trainer)
    assert restored.progress == Progress(3, {"best": 0.1}, {"metrics.jsonl": 7})
    assert trainer.policy.version == 3 and restored.policies["2"].version == 2
    assert fingerprint(weights_of(restored.policies["2"])) == fingerprint(weights_of(older))
    assert trainer.fingerprint() == expected.fingerprint() != fingerprint(weights_of(older))
    for name in ("masters", "first", "second"):
        for stack, tensor in getattr(expected.optimizer, name).items():
            assert_same_bits(getattr(trainer.optimizer, name)[stack], tensor, f"{name} of {stack}")
    step(expected)
    step(trainer)
    assert_same_step(trainer, expected)


def test_what_is_left_out_shows(tmp_path: Path) -> None:
    """The mutants of the test above: each part of a state moves the next step."""
    expected = trained()
    save_state(tmp_path / "state", expected, Progress(2))
    step(expected)

    def fingerprint_without(part: str) -> str:
        trainer = make_trainer(loss=LOSS)
        first = trainer.reference
        restore(tmp_path / "state", trainer)
        if part in ("first", "second"):
            for tensor in getattr(trainer.optimizer, part).values():
                tensor.zero_()
        elif part == "powers":
            trainer.optimizer.power1 = trainer.optimizer.power2 = 1.0
        elif part == "reference":
            assert first is not None and trainer.reference is not None
            assert fingerprint(weights_of(trainer.reference)) == fingerprint(weights_of(first))
            trainer.reference = trainer.policy
        step(trainer)
        return trainer.fingerprint()

    assert fingerprint_without("nothing") == expected.fingerprint()
    for part in ("first", "second", "powers", "reference"):
        assert fingerprint_without(part) != expected.fingerprint(), part


def test_the_trainers_own_policy_is_written_once_and_is_one_object_again(tmp_path: Path) -> None:
    trainer = trained()
    save_state(tmp_path / "state", trainer, Progress(2), {"2": trainer.policy})
    assert not (tmp_path / "state" / "policy-2.safetensors").exists()
    other = make_trainer(loss=LOSS)
    assert restore(tmp_path / "state", other).policies["2"] is other.policy


def test_the_model_is_an_ordinary_folder(tmp_path: Path) -> None:
    trainer = trained(dtype=torch.bfloat16)
    save_state(tmp_path / "state", trainer, Progress(2))
    model = tmp_path / "state" / "model"
    weights = load_weights(model, ModelConfig.from_folder(model), say=lambda line: None)
    assert fingerprint(weights) == trainer.fingerprint()
    assert fingerprint(weights_of(Policy.load(model, trainer.kernels))) == trainer.fingerprint()


FILES = ("manifest.json", "state.json", "masters.safetensors", "first.safetensors", "second.safetensors",
         "policy-reference.safetensors", "model/model.safetensors", "model/config.json")  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["a bit", "cut short", "gone"])
def test_a_damaged_file_is_named(name: str, damage: str, tmp_path: Path) -> None:
    save_state(tmp_path / "state", trained(), Progress(2))
    path = tmp_path / "state" / name
    data = bytearray(path.read_bytes())
    if damage == "a bit":
        data[len(data) // 2 if name != "manifest.json" else 0] ^= 1
    path.write_bytes(data if damage == "a bit" else data[:-1])
    if name == "manifest.json" and damage == "cut short":
        path.write_bytes(data[:-5])
    if damage == "gone":
        path.unlink()
    trainer = make_trainer(loss=LOSS)
    before = trainer.fingerprint()
    with pytest.raises(StateError) as caught:
        restore(tmp_path / "state", trainer)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert trainer.fingerprint() == before


def test_a_state_of_another_arithmetic_model_or_version_is_refused(tmp_path: Path) -> None:
    save_state(tmp_path / "state", trained(), Progress(2))
    with pytest.raises(StateError, match=r"state\.json: was computed with arithmetic digest \w+, here it is \w+"):
        restore(tmp_path / "state", make_trainer(dtype=torch.bfloat16, loss=LOSS))
    with pytest.raises(StateError, match=r"masters\.safetensors: model\..* is not float32 \[.*\], as"):
        restore(tmp_path / "state", make_trainer("llama", loss=LOSS))
    save_state(tmp_path / "none", make_trainer(), Progress(2))
    with pytest.raises(StateError, match=r"names no reference policy, which loss\.kl\.coef needs"):
        restore(tmp_path / "none", make_trainer(loss=LOSS))
    manifest = json.loads((tmp_path / "state" / "manifest.json").read_text())
    (tmp_path / "state" / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(StateError, match=r"manifest\.json: is of format 99, this version reads 1"):
        restore(tmp_path / "state", make_trainer(loss=LOSS))


def test_what_fails_while_it_is_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, weights: Any) -> None:
        if path.name == "second.safetensors":
            raise OSError("no space left on device")

    monkeypatch.setattr("vexact.loop.state.write_weights", broken)
    with pytest.raises(OSError, match="no space"):
        save_state(tmp_path / "states" / "state", trained(), Progress(2))
    assert list((tmp_path / "states").iterdir()) == []


def test_a_state_is_never_written_over(tmp_path: Path) -> None:
    trainer = trained()
    save_state(tmp_path / "state", trainer, Progress(2))
    with pytest.raises(CheckpointError, match="exists already"):
        save_state(tmp_path / "state", trainer, Progress(2))
