"""How a Triton kernel is started, and what every group of ops knows of the device it runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from vexact_kernels.arguments import require
from vexact_kernels.triton.instructions import forbidden
from vexact_kernels.triton.tiles import Tiles

# (kernel, grid, arguments, options): options are the kernel's constants and Triton's num_warps and num_stages.
Launch = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]


class ForbiddenInstruction(RuntimeError):
    """The compiler made something of a kernel that the contract does not allow. One line: kernel, instructions."""


class Start:
    """Starts kernels on the current device, and reads what the compiler made of each before its results can count.

    The compiler may not fuse a product and a sum into one rounding. What else it may not do is read off its output,
    because versions differ: triton 3.7.1 makes TF32 of some float32 products on sm_100.
    """

    def __init__(self) -> None:
        self._read: set[str] = set()

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        made = kernel[grid](*arguments, **options, enable_fp_fusion=False)
        if made is not None and made.hash not in self._read:  # nothing is made where kernels are interpreted
            self.read(kernel.__name__, made.asm["ptx"], units=bool(options.get("UNITS", False)))
            self._read.add(made.hash)

    @staticmethod
    def read(name: str, ptx: str, units: bool) -> None:
        """Raises ForbiddenInstruction. units: the kernel was asked to use the matrix units."""
        found = forbidden(ptx, units)
        if found:
            raise ForbiddenInstruction(
                f"kernel {name}: triton {triton.__version__} compiled it to {', '.join(sorted(found))}, which the "
                f"arithmetic does not allow"
            )


class Device:
    """What the ops of one profile share. `launch` is replaced where kernels are only to be compiled."""

    def __init__(self, profile: str, device: torch.device, tiles: Tiles, launch: Launch | None = None) -> None:
        self.matrix_units = profile == "tensorcore"
        self.device = device
        self.tiles = tiles
        self._launch = launch or Start()

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
