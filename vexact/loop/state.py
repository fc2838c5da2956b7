"""What a run needs to go on, as a folder: written whole or not at all, and checked before any of it is used.

    step-000003/
      manifest.json        sha256 and size of every other file
      state.json           step, version, running products of beta, digest, sizes of the logs, the loop's own values
      model/               the policy as an ordinary Hugging Face folder, in the dtype it computes in
      masters.safetensors  float32, as `first` and `second`, the moments; Hugging Face names
      first.safetensors
      second.safetensors
      policy-NAME.safetensors  further policies in the dtype they compute in: `reference`, and those that the loop names

Tensors are whole and carry their Hugging Face names, so nothing in here knows of ranks, threads, devices or stacks. The
position in the data and the draws need no values of their own: both follow from the step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vexact.errors import BadInput
from vexact.model.checkpoint import new_folder, save_folder, shapes, write_json, write_weights
from vexact.model.config import ModelConfig
from vexact.model.parameters import stack, unstack
from vexact.model.policy import Policy
from vexact.training.trainer import Trainer, weights_of

FORMAT = 1
MANIFEST, STATE, MODEL = "manifest.json", "state.json", "model"
OPTIMIZER = ("masters", "first", "second")  # attributes of AdamW, and stems of their files
REFERENCE = "reference"  # the name of the policy that KL is measured from
BLOCK = 1 << 20  # bytes that are hashed at once


class StateError(BadInput):
    """A state that cannot be used. One line naming its file."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands between two steps, beside its tensors.

    step: how many are done. loop: what else the loop keeps, as JSON. logs: bytes that each log of the run folder had.
    """

    step: int
    loop: Mapping[str, Any] = field(default_factory=dict)
    logs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Restored:
    """What `restore` put back that is not the trainer's. policies: by the names that they were saved under."""

    progress: Progress
    policies: Mapping[str, Policy]


def save_state(
    folder: Path,
    trainer: Trainer,
    progress: Progress,
    policies: Mapping[str, Policy] | None = None,
    tokenizer_source: str | Path | None = None,
) -> None:
    """Write a folder that appears whole, and on the disk, or not at all. Every rank calls this; rank 0 writes.

    policies: those that are needed beside the trainer's own and its reference, by name. tokenizer_source: the folder
    whose tokenizer the model has. Raises CheckpointError where the folder exists.
    """
    config, optimizer, shards = trainer.policy.config, trainer.optimizer, trainer.shards
    with new_folder(folder) if shards.ranks.first else nullcontext() as draft:
        for name in OPTIMIZER:
            whole = shards.collected(getattr(optimizer, name))
            if draft is not None:
                write_weights(draft / f"{name}.safetensors", unstack(config, whole))
        if draft is None:
            return
        held = {**(policies or {}), **({} if trainer.reference is None else {REFERENCE: trainer.reference})}
        own = {name: policy is trainer.policy for name, policy in held.items()}
        for name, policy in held.items():
            if not own[name]:
                write_weights(draft / _file(name), weights_of(policy))
        save_folder(draft / MODEL, config, weights_of(trainer.policy), tokenizer_source)
        values = {
            "step": progress.step,
            "loop": dict(progress.loop),
            "logs": dict(progress.logs),
            "version": trainer.policy.version,
            "digest": trainer.policy.digest,
            "power1": optimizer.power1.hex(),
            "power2": optimizer.power2.hex(),
            "lr": optimizer.lr.hex(),
            "policies": {name: {"version": held[name].version, "own": own[name]} for name in held},
        }
        write_json(draft / STATE, values)
        files = {path.relative_to(draft).as_posix(): _entry(path) for path in _files(draft)}
        write_json(draft / MANIFEST, {"format": FORMAT, "files": files})


def restore(folder: Path, trainer: Trainer) -> Restored:
    """Put a state back in every bit, every byte of it checked first. trainer: made from the same recipe, on each rank.

    Raises StateError naming the file that is missing, damaged or of another model, or where the arithmetic is another.
    """
    check_manifest(folder)
    values = _values(folder / STATE)
    policy, optimizer = trainer.policy, trainer.optimizer
    config, dtype = policy.config, policy.dtype
    if values["digest"] != policy.digest:
        raise StateError(
            f"{folder / STATE}: was computed with arithmetic digest {values['digest']}, here it is {policy.digest}"
        )
    for name in OPTIMIZER:
        tensors = _tensors(folder / f"{name}.safetensors", config, torch.float32)
        for stacked, tensor in getattr(optimizer, name).items():
            tensor.copy_(stack(config, tensors, stacked))
    optimizer.power1, optimizer.power2 = values["power1"], values["power2"]
    optimizer.lr = values["lr"]
    trainer.publish(values["version"])
    policies: dict[str, Policy] = {}
    for name, held in values["policies"].items():
        if held["own"]:
            policies[name] = trainer.policy
        else:
            weights = _tensors(folder / _file(name), config, dtype)
            policies[name] = _built(trainer, weights, held["version"])
    if trainer.reference is not None:
        if REFERENCE not in policies:
            raise StateError(f"{folder / STATE}: names no {REFERENCE} policy, which loss.kl.coef needs")
        trainer.reference = policies.pop(REFERENCE)
    return Restored(values["progress"], policies)


def check_manifest(folder: Path) -> None:
    """Raises StateError naming the first file that is not what was written."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        written, files = content["format"], dict(content["files"])
    except FileNotFoundError:
        raise StateError(f"{path}: no such file") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise StateError(f"{path}: is damaged") from None
    if written != FORMAT:
        raise StateError(f"{path}: is of format {written}, this version reads {FORMAT}")
    for name, entry in files.items():
        file = folder / name
        if not file.is_file():
            raise StateError(f"{file}: no such file, though {MANIFEST} names it")
        if _entry(file) != entry:
            raise StateError(f"{file}: is damaged: its bytes are not those that were written")


def _values(path: Path) -> dict[str, Any]:
    """What state.json says, numbers in their types."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for name in ("power1", "power2", "lr"):
            values[name] = float.fromhex(values[name])
        values["progress"] = Progress(values["step"], values["loop"], values["logs"])
        if not all(isinstance(values[name], kind) for name, kind in (("version", int), ("policies", dict))):
            raise TypeError
        return {**values, "digest": values["digest"]}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise StateError(f"{path}: is not a state of this version ({type(error).__name__}: {error})") from None


def _built(trainer: Trainer, weights: Mapping[str, Tensor], version: int) -> Policy:
    config = trainer.policy.config
    return Policy.build(
        config, lambda name: stack(config, weights, name), trainer.kernels, trainer.policy.dtype, version
    )


def _file(policy: str) -> str:
    return f"policy-{policy}.safetensors"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _entry(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return {"sha256": digest.hexdigest(), "bytes": path.stat().st_size}


def _tensors(path: Path, config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """All parameters of a model, mapped from a file."""
    expected = shapes(config)
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise StateError(f"{path}: {error}") from None
    for name in {**expected, **tensors}:
        if name not in tensors or name not in expected:
            raise StateError(f"{path}: {name} is {'missing' if name in expected else 'not a parameter of the model'}")
        if tuple(tensors[name].shape) != expected[name] or tensors[name].dtype != dtype:
            kind = str(dtype).removeprefix("torch.")
            raise StateError(f"{path}: {name} is not {kind} {list(expected[name])}, as the recipe's model has it")
    return tensors
