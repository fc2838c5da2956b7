"""The arithmetic: tensors to tensors, in a written order, with equal bits on every machine. See `kernels/README.md`."""

from __future__ import annotations

import importlib.util

import torch

from vexact_kernels.contract import (
    CONTRACT_VERSION,
    CPU,
    LANES,
    PAGE,
    PORTABLE,
    PROFILES,
    TENSORCORE,
    Chunks,
    Kernels,
    Packed,
    Segments,
    Softmax,
    Stream,
    grad_dtype,
)
from vexact_kernels.library import available

__all__ = [
    "CONTRACT_VERSION",
    "CPU",
    "LANES",
    "PAGE",
    "PORTABLE",
    "PROFILES",
    "TENSORCORE",
    "Chunks",
    "Kernels",
    "Packed",
    "Segments",
    "Softmax",
    "Stream",
    "available",
    "grad_dtype",
    "load",
]

DEVICES = ("cpu", "reference", "cuda")
CAPABILITY = (8, 0)  # the oldest GPU that has bfloat16, and for which the kernels are compiled in the tests


def load(device: str = "cpu", isa: str | None = None, profile: str = PORTABLE) -> Kernels:
    """The kernels of a device: "cpu", "cuda" (torch's current GPU) or "reference" (the slow specification).

    isa: one of `available()`, by default the best; of the CPU only. profile: "portable" gives the same bits on every
    device, "tensorcore" is of a GPU only. Raises ValueError on what this machine does not have.
    """
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is unknown: there are {', '.join(DEVICES)}")
    if profile not in PROFILES:
        raise ValueError(f"profile {profile!r} is unknown: there are {', '.join(PROFILES)}")
    if isa is not None and device != "cpu":
        raise ValueError(f"device {device!r} has no instruction set {isa!r}: leave it out")
    if profile == TENSORCORE and device != "cuda":
        raise ValueError(f"profile {TENSORCORE!r} is of GPUs only: device {device!r} has {PORTABLE!r}")
    if device == "cpu":
        from vexact_kernels.cpu import Cpu

        return Cpu(isa or available()[0])
    if device == "reference":
        from vexact_kernels.reference import Reference

        return Reference()
    return _on_gpu(profile)


def _on_gpu(profile: str) -> Kernels:
    """The Triton kernels on torch's current GPU. Raises ValueError saying what is missing."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError("device 'cuda' needs the package triton: pip install 'vexact[gpu]'")
    if torch.version.hip is not None:
        raise ValueError("device 'cuda' needs an NVIDIA GPU, and this torch is built for AMD's: install one for CUDA")
    if not torch.cuda.is_available():
        built = "a driver and a visible GPU are needed" if torch.version.cuda else "it is built without CUDA"
        raise ValueError(f"device 'cuda' needs a GPU, and torch {torch.__version__} sees none: {built}")
    gpu = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(gpu)
    if capability < CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(gpu), capability
        raise ValueError(f"device 'cuda' needs a GPU of compute capability 8.0, and {name} has {major}.{minor}")
    from triton import knobs

    if knobs.runtime.interpret:
        raise ValueError("device 'cuda' needs compiled kernels: unset TRITON_INTERPRET, which has them interpreted")
    from vexact_kernels.triton import Triton

    kernels: Kernels = Triton(profile, gpu)
    return kernels
