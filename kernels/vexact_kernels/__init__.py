"""The arithmetic: tensors to tensors, in a written order, with equal bits on every machine. See `kernels/README.md`."""

from __future__ import annotations

from vexact_kernels.contract import (
    CONTRACT_VERSION,
    LANES,
    PAGE,
    Chunks,
    Kernels,
    Packed,
    Segments,
    Stream,
    grad_dtype,
)
from vexact_kernels.library import available

__all__ = [
    "CONTRACT_VERSION",
    "LANES",
    "PAGE",
    "Chunks",
    "Kernels",
    "Packed",
    "Segments",
    "Stream",
    "available",
    "grad_dtype",
    "load",
]


def load(device: str = "cpu", isa: str | None = None) -> Kernels:
    """The kernels of a device: "cpu" or "reference" (the slow specification).

    `isa` names one of `available()` and defaults to the best. Raises ValueError on what this machine does not have.
    """
    if device == "cpu":
        from vexact_kernels.cpu import Cpu

        return Cpu(isa or available()[0])
    if device not in ("reference", "cuda"):
        raise ValueError(f"device {device!r} is unknown: available are cpu, reference")
    if device == "cuda":
        raise ValueError("device 'cuda' is not built yet: available are cpu, reference")
    if isa is not None:
        raise ValueError(f"device 'reference' has no instruction set {isa!r}: leave it out")
    from vexact_kernels.reference import Reference

    return Reference()
