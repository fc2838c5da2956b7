"""A row of logits as logprob and draw see it: z = logit / T + 0, in blocks of the tree's 1024. As `cpu/logits.h`.

Programs work on one block of one row, so that even a single row keeps a whole GPU busy.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vexact_kernels import float32
from vexact_kernels.triton.functions import BLOCK
from vexact_kernels.triton.launch import Device, cdiv

LARGEST = float32.BLOCK * float32.BLOCK  # a vocabulary whose block sums are still one block of the tree


@triton.jit
def divisor(temperature, row):
    """T of a row; greedy rows, with T = 0, are read at 1."""
    t = tl.load(temperature + row)
    return tl.where(t == 0.0, 1.0, t)


@triton.jit
def tempered(x, t):
    """x / t + 0. Dividing by 1 changes nothing, and a division is the dearest part of a pass: it is left out then."""
    if t != 1.0:
        x = tl.div_rn(x, t)
    return x + 0.0


@triton.jit
def load_block(logits, logits_row, row, block, V):
    """The ids [1024] (int64) of a block, which of them are inside the vocabulary, and their logits, +0 behind it."""
    v = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = v < V
    return v, inside, tl.load(logits + row * logits_row + v, mask=inside, other=0.0)


@triton.jit
def maxima_kernel(logits, logits_row, maxima, V, blocks):
    """The largest logit of each block, +inf where one is NaN."""
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    _, inside, x = load_block(logits, logits_row, row, block, V)
    x = tl.where(x == x, x, float("inf"))  # the hardware's max passes over NaN
    most = tl.max(tl.where(inside, x, float("-inf")), 0)
    tl.store(maxima + row * blocks + block, most)


@triton.jit
def largest_logit(maxima, row, blocks, BLOCKS: tl.constexpr):
    """The largest logit of a row from its block maxima, +inf where one is NaN; BLOCKS ≥ blocks is a power of two."""
    b = tl.arange(0, BLOCKS)
    return tl.max(tl.load(maxima + row * blocks + b, mask=b < blocks, other=float("-inf")), 0)


@triton.jit
def max_z(logit, t):
    """M = max z of a row from its largest logit; NaN unless both are finite.

    Division by T > 0 and rounding keep the order, so the largest logit has the largest z.
    """
    most = tempered(logit, t)
    return tl.where((most - most == 0.0) & (logit - logit == 0.0), most, float("nan"))


def blocks_of(vocabulary: int) -> int:
    """Blocks of a row. Raises ValueError beyond 1024 of them."""
    if vocabulary > LARGEST:
        raise ValueError(f"a vocabulary of {vocabulary} is larger than {LARGEST}")
    return cdiv(vocabulary, float32.BLOCK)


def block_maxima(on: Device, logits: Tensor) -> Tensor:
    """logits float32 [N, V], rows strided → float32 [N, blocks]. One warp a block: eight wide loads a lane at once."""
    n, vocabulary = logits.shape
    blocks = blocks_of(vocabulary)
    maxima = on.empty(n, blocks)
    on.start(maxima_kernel, (n * blocks,), logits, logits.stride(0), maxima, vocabulary, blocks, num_warps=1)
    return maxima
