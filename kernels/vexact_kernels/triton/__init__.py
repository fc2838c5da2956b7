"""The arithmetic on a CUDA GPU, in Triton: the same stems as `cpu/`, behind the interface of `contract.py`."""

from __future__ import annotations

import torch

from vexact_kernels.contract import PROFILES
from vexact_kernels.triton.adamw import Adamw
from vexact_kernels.triton.attention import Attention
from vexact_kernels.triton.attention_backward import AttentionBackward
from vexact_kernels.triton.centre import Centre
from vexact_kernels.triton.draw import Draw
from vexact_kernels.triton.elementwise import Elementwise
from vexact_kernels.triton.embed import Embed
from vexact_kernels.triton.launch import Launch
from vexact_kernels.triton.matmul import Matmul
from vexact_kernels.triton.noise import Noise
from vexact_kernels.triton.rmsnorm import Rmsnorm
from vexact_kernels.triton.rope import Rope
from vexact_kernels.triton.sum import Sum
from vexact_kernels.triton.swiglu import Swiglu
from vexact_kernels.triton.tiles import capability_of, tiles_of


class Triton(
    Embed, Matmul, Rmsnorm, Rope, Attention, AttentionBackward, Swiglu, Elementwise, Centre, Draw, Noise, Sum, Adamw
):
    """The Triton kernels of a profile on a device; the interface is `contract.Kernels`.

    "portable" gives a CPU's bits. "tensorcore" sums products and attention on the matrix units: exact on one type of
    GPU, and other bits than a CPU's.
    """

    def __init__(
        self,
        profile: str,
        device: torch.device,
        launch: Launch | None = None,
        capability: tuple[int, int] | None = None,
    ) -> None:
        if profile not in PROFILES:
            raise ValueError(f"profile {profile!r} is unknown: there are {', '.join(PROFILES)}")
        capability = capability or capability_of(device)
        super().__init__(profile, device, tiles_of(capability), launch)
        self.name = f"cuda:{profile}"
        self.profile = f"{profile} on {gpu_name(device)}" if self.matrix_units else profile


def gpu_name(device: torch.device) -> str:
    """What a digest of the tensorcore profile names: bits are the same on one type of GPU only."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
