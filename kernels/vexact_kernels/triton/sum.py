"""S over a whole tensor: the sums of its blocks, then the sums of blocks of those, until one is left."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vexact_kernels.arguments import require
from vexact_kernels.float32 import BLOCK
from vexact_kernels.triton.functions import tree
from vexact_kernels.triton.launch import Device, cdiv


@triton.jit
def sum_kernel(x, sums, n, SQUARES: tl.constexpr, BLOCK: tl.constexpr):
    """The tree of one block, by one warp. Enough of them fit on a multiprocessor to keep the memory busy."""
    block = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    i = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    v = tl.load(x + i, mask=i < n, other=0.0)
    if SQUARES:
        v = v * v
    tl.store(sums + block, tree(v, 1, BLOCK))


class Sum(Device):
    """sum, sum_squares of `contract.Kernels`. The result stays on the device."""

    def sum(self, x: Tensor) -> Tensor:
        require("x of sum", x, torch.float32, x.shape)
        return self._sum(x.contiguous(), squares=False)

    def sum_squares(self, x: Tensor) -> Tensor:
        require("x of sum_squares", x, torch.float32, x.shape)
        return self._sum(x.contiguous(), squares=True)

    def _sum(self, x: Tensor, *, squares: bool) -> Tensor:
        blocks = max(1, cdiv(x.numel(), BLOCK))
        sums = self.empty(blocks)
        self.start(sum_kernel, (blocks,), x, sums, x.numel(), SQUARES=squares, BLOCK=BLOCK, num_warps=1)
        return sums.reshape(()) if blocks == 1 else self._sum(sums, squares=False)
