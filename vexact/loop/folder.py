"""The folder that a run leaves: config.yaml, env.json, metrics.jsonl, and the trained checkpoint."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vexact.errors import BadInput
from vexact.model.policy import Policy
from vexact.recipe import Recipe, RunSection
from vexact_kernels import CONTRACT_VERSION

PACKAGES = ("vexact", "torch", "triton", "transformers", "safetensors", "numpy")


class RunError(BadInput):
    """A run folder that cannot be written. One line naming it."""


class RunFolder:
    """Made at a path that `free_path` gave."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        (path / "config.yaml").write_text(recipe.to_yaml(), encoding="utf-8")

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    def write_environment(self, policy: Policy, fingerprint: str) -> None:
        """env.json: what the run was computed with. fingerprint: of the weights at its start."""
        environment = {
            "packages": versions(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "machine": platform.machine(),
            "kernels": policy.ops.kernels.name,
            "threads": torch.get_num_threads(),
            "contract_version": CONTRACT_VERSION,
            "device": str(policy.device),
            "profile": policy.ops.kernels.profile,
            "dtype": str(policy.dtype).removeprefix("torch."),
            "arithmetic_digest": policy.digest,
            "weights_fingerprint": fingerprint,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        (self.path / "env.json").write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")

    def append(self, line: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl in a single write: an interrupted run leaves whole lines. NaN, inf become null."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        data = (json.dumps(finite, allow_nan=False) + "\n").encode()
        descriptor = os.open(self.path / "metrics.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


def versions() -> dict[str, str]:
    """The packages that a result may depend on."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def free_path(section: RunSection, name: str) -> Path:
    """The folder that is named, or ROOT/NAME-TIME. Raises RunError where it holds anything already."""
    if not name or Path(name).name != name:
        raise RunError(f"name is {name!r}, must be the name of a folder without a path")
    path = Path(section.folder) if section.folder else Path(section.root) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunError(f"{path}: exists already and is not empty; choose another --run.folder")
    return path
