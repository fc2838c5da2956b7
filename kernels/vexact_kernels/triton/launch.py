"""How a Triton kernel is started, and what every group of ops knows of the device it runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vexact_kernels.arguments import require
from vexact_kernels.triton.tiles import Tiles

# (kernel, grid, arguments, options): options are the kernel's constants and Triton's num_warps and num_stages.
Launch = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]


def run(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Start a kernel on the current device. The compiler may not fuse a product and a sum into one rounding."""
    kernel[grid](*arguments, **options, enable_fp_fusion=False)


class Device:
    """What the ops of one profile share. `launch` is replaced where kernels are only to be compiled."""

    def __init__(self, profile: str, device: torch.device, tiles: Tiles, launch: Launch = run) -> None:
        self.matrix_units = profile == "tensorcore"
        self.device = device
        self.tiles = tiles
        self._launch = launch

    def start(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Start a kernel, unless its grid is empty."""
        if 0 not in grid:
            self._launch(kernel, grid, arguments, options)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Fresh memory on the device, not cleared."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def buffer(self, name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that is written in place. Raises ValueError unless it is contiguous and fits."""
        require(name, x, dtype, shape)
        if not x.is_contiguous():
            raise ValueError(f"{name} is written in place and has to be contiguous")
        return x

    def upload(self, host: Tensor) -> Tensor:
        """A host tensor on the device."""
        return host.to(self.device, non_blocking=True)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
