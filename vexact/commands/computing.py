"""What a command computes with. Importing it loads nothing that computes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vexact.errors import BadInput

if TYPE_CHECKING:
    from vexact_kernels import Kernels

MOST_THREADS = 1024  # beyond, a system may refuse to start them, and libgomp then ends the process
ISA_VARIABLE = "VEXACT_ISA"
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Computing:
    """Flags of every command that computes."""

    device: Literal["cpu", "cuda"] = "cpu"
    """The CPU, or torch's current GPU."""
    profile: Literal["portable", "tensorcore"] = "portable"
    """The same bits on every device, or the matrix units of a GPU: exact on one type of GPU."""
    threads: int = 0
    """Threads of the CPU, by default as many as torch takes."""

    def kernels(self) -> Kernels:
        return kernels_of(self.device, self.profile, self.threads)


def kernels_of(device: str, profile: str, threads: int) -> Kernels:
    """On a CPU the instruction set that VEXACT_ISA names, or the best; `reference` is the slow specification."""
    import torch

    from vexact_kernels import load

    if not 0 <= threads <= MOST_THREADS:
        raise BadInput(f"--threads is {threads}, must be 1 to {MOST_THREADS}, or 0 for torch's own choice")
    if threads:
        torch.set_num_threads(threads)
    isa = os.environ.get(ISA_VARIABLE) or None
    try:
        if (device, isa) == ("cpu", "reference"):
            return load("reference", profile=profile)
        return load(device, isa, profile)
    except ValueError as error:
        raise BadInput(f"{ISA_VARIABLE}: {error}" if repr(isa) in str(error) else str(error)) from None
