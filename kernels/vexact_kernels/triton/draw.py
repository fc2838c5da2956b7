"""One id a row, drawn by integer weights: integer sums are exact, so no order of adding them can move a draw.

Three passes: block maxima, block weights, then one program a row that finds the block and the id in it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vexact_kernels.arguments import require, strided_rows
from vexact_kernels.triton.functions import BLOCK, exp
from vexact_kernels.triton.launch import Device, power_of_two
from vexact_kernels.triton.logits import block_maxima, blocks_of, divisor, largest_logit, load_block, max_z, tempered
from vexact_kernels.triton.logprob import row_values

PICK_WARPS = 4  # one program a row has 1024 weights to add up: eight a lane
LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit
def block_weights(logits, logits_row, row, block, V, t, most):
    """trunc(exp(z - M)·2^40) of a block's ids, int64 [1024], each at most 2^40; 0 behind the vocabulary."""
    _, inside, logit = load_block(logits, logits_row, row, block, V)
    e = tl.where(inside, exp(tempered(logit, t) - most), 0.0)
    return (e * 1099511627776.0).to(tl.int64)


@triton.jit
def weights_kernel(logits, logits_row, temperature, maxima, totals, V, blocks, BLOCKS: tl.constexpr):
    """The weight of each block; 0 in rows that do not draw: greedy ones, and those that are not finite."""
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    t = divisor(temperature, row)
    most = max_z(largest_logit(maxima, row, blocks, BLOCKS), t)
    total = tl.full((), 0, tl.int64)
    if (most == most) & (tl.load(temperature + row) != 0.0):
        total = tl.sum(block_weights(logits, logits_row, row, block, V, t, most), 0)
    tl.store(totals + row * blocks + block, total)


@triton.jit
def philox(c0, c1, c2, c3, key):
    """The four words of Philox4x32-10 of a counter's; all uint64, words below 2^32 and the key whole."""
    k0, k1 = key & LOW, key >> 32
    for _ in tl.static_range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & LOW, (a >> 32) ^ c3 ^ k1, a & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


@triton.jit
def philox_bits(seed, request, sample, position):
    """The first two words of Philox4x32-10, low word first; all uint64, of sample and position the low half."""
    c0, c1, _, _ = philox(position & LOW, sample & LOW, request & LOW, request >> 32, seed)
    return c0 | (c1 << 32)


@triton.jit
def unsigned(numbers, row):
    return tl.load(numbers + row).to(tl.uint64, bitcast=True)


@triton.jit
def weighted_id(logits, logits_row, row, V, t, most, totals, blocks, bits, BLOCKS: tl.constexpr):
    """The first id whose prefix sum exceeds r = high64(bits·W). r < W < 2^61, so that id exists and has a weight."""
    b = tl.arange(0, BLOCKS)
    weight = tl.load(totals + row * blocks + b, mask=b < blocks, other=0)
    r = tl.umulhi(bits, tl.sum(weight, 0).to(tl.uint64)).to(tl.int64)
    before = tl.cumsum(weight, 0) <= r  # a prefix of the blocks, so that counting it gives the block that is sought
    block = tl.sum(before.to(tl.int64), 0)
    r -= tl.sum(tl.where(before, weight, 0), 0)
    prefix_sums = tl.cumsum(block_weights(logits, logits_row, row, block, V, t, most), 0)
    return block * BLOCK + tl.sum((prefix_sums <= r).to(tl.int64), 0)


@triton.jit
def greedy_id(logits, logits_row, row, V, largest, maxima, blocks, BLOCKS: tl.constexpr):
    """The lowest id whose logit is the largest."""
    b = tl.arange(0, BLOCKS)
    holds = tl.load(maxima + row * blocks + b, mask=b < blocks, other=float("-inf")) == largest
    block = tl.min(tl.where(holds, b, BLOCKS), 0)
    v, inside, logit = load_block(logits, logits_row, row, block, V)
    return tl.min(tl.where(inside & (logit == largest), v, V), 0)


@triton.jit
def pick_kernel(
    logits, logits_row, temperature, seed, request, sample, position, maxima, totals, ids, V, blocks,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """The id of a row, -1 where it is not finite."""
    row = tl.program_id(0).to(tl.int64)
    t = divisor(temperature, row)
    largest = largest_logit(maxima, row, blocks, BLOCKS)
    most = max_z(largest, t)
    id = tl.full((), -1, tl.int64)
    if most == most:
        if tl.load(temperature + row) == 0.0:
            id = greedy_id(logits, logits_row, row, V, largest, maxima, blocks, BLOCKS)
        else:
            bits = philox_bits(
                unsigned(seed, row), unsigned(request, row), unsigned(sample, row), unsigned(position, row)
            )
            id = weighted_id(logits, logits_row, row, V, t, most, totals, blocks, bits, BLOCKS)
    tl.store(ids + row, id)


class Draw(Device):
    """draw of `contract.Kernels`."""

    def draw(
        self, logits: Tensor, temperature: Tensor, seed: Tensor, request: Tensor, sample: Tensor, position: Tensor
    ) -> Tensor:
        n, vocabulary = logits.shape
        require("logits", logits, torch.float32, (n, vocabulary))
        logits, temperature, blocks = (
            strided_rows(logits),
            row_values("temperature", temperature, n),
            blocks_of(vocabulary),
        )
        named = {"seed": seed, "request": request, "sample": sample, "position": position}
        address = [row_values(key, x, n, torch.int64) for key, x in named.items()]
        maxima, totals = block_maxima(self, logits), self.empty(n, blocks, dtype=torch.int64)
        self.start(
            weights_kernel, (n * blocks,), logits, logits.stride(0), temperature, maxima, totals, vocabulary, blocks,
            BLOCKS=power_of_two(blocks), num_warps=1,
        )  # fmt: skip
        ids = self.empty(n, dtype=torch.int64)
        self.start(
            pick_kernel, (n,), logits, logits.stride(0), temperature, *address, maxima, totals, ids, vocabulary, blocks,
            BLOCKS=power_of_two(blocks), num_warps=PICK_WARPS,
        )  # fmt: skip
        return ids
