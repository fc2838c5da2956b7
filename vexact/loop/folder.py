"""The folder that a run leaves, and that it can be taken up from.

    config.yaml     the recipe, resolved
    env.json        what it was computed with
    metrics.jsonl   a line a step
    checkpoints/    step-N: the run between two steps, see `state.py`
    rollouts/       step-N.parquet, see `rollouts.py`
    checkpoint/     the trained model, once the run is done
    result.json     how it ended, written last

Files that are written anew take their name when they are whole; logs only grow, and a run that is taken up cuts them
to what they were at its checkpoint, so no step is in them twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from vexact.errors import BadInput
from vexact.model.checkpoint import flush
from vexact.model.policy import Policy
from vexact.recipe import Recipe
from vexact_kernels import CONTRACT_VERSION

PACKAGES = ("vexact", "torch", "triton", "transformers", "safetensors", "numpy")
CONFIG, ENVIRONMENT, METRICS, RESULT, LOCK = "config.yaml", "env.json", "metrics.jsonl", "result.json", ".lock"
STATES = "checkpoints"
DRAFT = re.compile(r"\..+\.[0-9a-f]{32}")  # beside what it will be, or was: a name that nobody else gives


class RunError(BadInput):
    """A run folder that cannot be written. One line naming it."""


class RunFolder:
    """Made at a path that `run_path` gave; one process at a time may hold it. Leaves nothing to be done when killed."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        """Raises RunError where another process holds it."""
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = _locked(path)
        for folder in (path, self.checkpoints, self.rollouts):
            for draft in folder.glob(".*"):
                if DRAFT.fullmatch(draft.name):
                    _remove(draft)  # what a killed process left half written
        write_whole(path / CONFIG, recipe.to_yaml())

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def checkpoint(self) -> Path:
        """The trained model."""
        return self.path / "checkpoint"

    @property
    def checkpoints(self) -> Path:
        return self.path / STATES

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    def state(self, step: int) -> Path:
        """Where the state behind that many steps lies."""
        return self.checkpoints / f"step-{step:06d}"

    def latest(self) -> Path | None:
        """The newest state. Each that has its name is whole."""
        return newest_state(self.path)

    def prune(self, keep: int) -> None:
        """Remove all but the newest states."""
        for old in states(self.path)[:-keep]:
            remove_folder(old)

    def write_environment(self, policy: Policy, fingerprint: str, step: int = 0) -> None:
        """env.json: what the run is computed with. fingerprint: of the weights at its start.

        step: where it was taken up; the file then keeps what it said and gains a line about this time.
        """
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
            "started": _now(),
        }
        before = self._environment() if step else {}
        if before:
            again = {"step": step, **environment}
            environment = {**before, "resumed": [*before.get("resumed", []), again]}
        write_whole(self.path / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")

    def append(self, line: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl in a single write: an interrupted run leaves whole lines. NaN, inf become null."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        data = (json.dumps(finite, allow_nan=False) + "\n").encode()
        descriptor = os.open(self.path / METRICS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def lines(self) -> list[dict[str, Any]]:
        """What metrics.jsonl holds."""
        return read_lines(self.path / METRICS)

    def log_sizes(self) -> dict[str, int]:
        """Bytes of each log. They and the rollouts are on the disk from now on."""
        sizes = {}
        for log in sorted(self.path.glob("*.jsonl")):
            flush(log)
            sizes[log.name] = log.stat().st_size
        latest = self.latest()
        since = 0 if latest is None else step_of(latest)
        for table in self.rollouts.glob("step-*.parquet"):
            if step_of(table) >= since:
                flush(table)
        for folder in (self.rollouts, self.path):
            if folder.is_dir():
                flush(folder)
        return sizes

    def rewind(self, step: int, sizes: Mapping[str, int]) -> None:
        """Take back what came after that many steps: cut logs to their sizes, remove later rollouts and the result."""
        (self.path / RESULT).unlink(missing_ok=True)
        for log in self.path.glob("*.jsonl"):
            if log.stat().st_size > sizes.get(log.name, 0):
                os.truncate(log, sizes.get(log.name, 0))
        for table in self.rollouts.glob("step-*.parquet"):
            if step_of(table) >= step:
                table.unlink()

    def result(self) -> dict[str, Any]:
        """What `finish` wrote; empty while the run is not done."""
        return read_result(self.path)

    def finish(self, result: Mapping[str, Any]) -> None:
        """The run is done: result.json."""
        write_whole(self.path / RESULT, json.dumps({**result, "finished": _now()}, indent=2) + "\n")

    def _environment(self) -> dict[str, Any]:
        try:
            content = json.loads((self.path / ENVIRONMENT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}  # killed before it was written
        return content if isinstance(content, dict) else {}


def run_path(recipe: Recipe) -> Path:
    """The folder that is named, or ROOT/NAME-TIME.

    Raises RunError where it holds anything that is not a run; whether it may be taken up is told by `check_same`.
    """
    name, section = recipe.name, recipe.run
    if not name or Path(name).name != name:
        raise RunError(f"name is {name!r}, must be the name of a folder without a path")
    path = Path(section.folder) if section.folder else Path(section.root) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if path.exists() and not path.is_dir():
        raise RunError(f"{path}: exists already and is no folder; choose another --run.folder")
    if path.exists() and not holds_run(path) and any(_of_others(path)):
        raise RunError(f"{path}: exists already and is not empty, and holds no run; choose another --run.folder")
    return path


def states(path: Path) -> list[Path]:
    """Of a run folder, the oldest first."""
    return sorted((path / STATES).glob("step-*"), key=step_of)


def newest_state(path: Path) -> Path | None:
    return next(reversed(states(path)), None)


def holds_run(path: Path) -> bool:
    return (path / CONFIG).is_file()


def read_result(path: Path) -> dict[str, Any]:
    """How the run in a folder ended; empty where it did not."""
    file = path / RESULT
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise RunError(f"{file}: cannot be read") from None
    if not isinstance(content, dict) or not isinstance(content.get("steps"), int):
        raise RunError(f"{file}: is not the result of a run")
    return content


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Of a log; empty where there is none. Raises RunError naming a line that is not one."""
    if not path.is_file():
        return []
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            lines.append(json.loads(text))
        except ValueError:
            raise RunError(f"{path}: line {number} is not JSON") from None
    return lines


def step_of(path: Path) -> int:
    """Of step-000012 and step-000012.parquet: 12; of others -1."""
    number = path.name.split(".")[0].removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def draft_of(path: Path) -> Path:
    """A name beside it for what is not whole."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def write_whole(path: Path, text: str) -> None:
    """The file has the old content or the new one, whenever the process is killed."""
    draft = draft_of(path)
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def remove_folder(path: Path) -> None:
    """At once: what is there in part never has its name. Nothing happens where it does not exist."""
    if path.exists():
        gone = draft_of(path)
        path.rename(gone)
        _remove(gone)


def versions() -> dict[str, str]:
    """The packages that a result may depend on."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _of_others(path: Path) -> Iterator[Path]:
    """What a run that was killed before it had a config.yaml did not leave."""
    return (entry for entry in path.iterdir() if entry.name != LOCK and not DRAFT.fullmatch(entry.name))


def in_use(path: Path) -> bool:
    """Whether another process holds the run folder, which need not exist."""
    if not path.is_dir():
        return False
    try:
        descriptor = _locked(path)
    except RunError:
        return True
    if descriptor is not None:
        os.close(descriptor)
    return False


def _locked(path: Path) -> int | None:
    """A lock that ends with the process; None where the file system has none."""
    descriptor = os.open(path / LOCK, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunError(f"{path}: another process is running in it") from None
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
