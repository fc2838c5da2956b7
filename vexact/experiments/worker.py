"""One process that trains runs one after another, and says how each ended."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console

from vexact.errors import BadInput
from vexact.experiments.recipes import Job
from vexact.loop import train
from vexact.loop.folder import METRICS, STATES, read_result, remove_folder, step_of
from vexact_kernels import Kernels, load

REFERENCE = "reference"


@dataclass(frozen=True)
class Computing:
    """What a process computes with. isa: an instruction set of the CPU, or `reference`; empty: the best."""

    device: str = "cpu"
    profile: str = "portable"
    isa: str = ""

    def kernels(self) -> Kernels:
        """Raises BadInput where this machine has no such thing."""
        try:
            if (self.device, self.isa) == ("cpu", REFERENCE):
                return load(REFERENCE, profile=self.profile)
            return load(self.device, self.isa or None, self.profile)
        except ValueError as error:
            raise BadInput(str(error)) from None


def serve(connection: Connection, computing: Computing, parent: int) -> None:
    """Train the jobs that come until None does; answer each with an empty text, or with what went wrong.

    parent: the process that asks. An interrupt is its matter; where it is gone, this one goes too: a run may be taken
    up from any state, and a process that nobody waits for would hold its folder.
    """
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    kernels = computing.kernels()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        if job is None:
            return
        connection.send(attempt(job, kernels))


def attempt(job: Job, kernels: Kernels) -> str:
    """Train one run and tidy its folder. Empty, or one line that says what went wrong."""
    try:
        train(job.recipe, kernels=kernels, console=Console(quiet=True))
    except BadInput as error:
        return " ".join(str(error).split())
    except Exception as error:  # whatever it is, the other runs go on
        report = job.folder.parent / f"{job.folder.name}.failed.txt"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(traceback.format_exc(), encoding="utf-8")
        return " ".join(f"{type(error).__name__}: {error} (see {report})".split())
    tidy(job)
    return ""


def tidy(job: Job) -> None:
    """Remove of a finished run what the study does not keep: states, and rollouts of other steps than those wanted."""
    remove_folder(job.folder / STATES)
    tables = sorted((job.folder / "rollouts").glob("step-*.parquet"), key=step_of)
    for table in tables[:-1]:
        if not job.every or step_of(table) % job.every:
            table.unlink()


def done(job: Job) -> bool:
    """Whether its run has come to its end."""
    return ended(job.folder, job.recipe.steps)


def ended(folder: Path, steps: int) -> bool:
    """Whether the run in a folder has come to its end behind so many steps."""
    return read_result(folder).get("steps") == steps


def lines_done(folder: Path) -> int:
    """Of metrics.jsonl so far."""
    try:
        return (folder / METRICS).read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
