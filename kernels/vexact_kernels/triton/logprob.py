"""The log-probability of one id a row and the row's entropy, and the gradient of both.

Three passes forward: block maxima, block sums, then one program a row for the tree of the sums. One pass backward.
"""

from __future__ import annotations

from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from vexact_kernels.arguments import require, strided_rows
from vexact_kernels.contract import grad_dtype
from vexact_kernels.triton.functions import BLOCK, exp, log, tree
from vexact_kernels.triton.indices import Indices
from vexact_kernels.triton.launch import Device, power_of_two
from vexact_kernels.triton.logits import block_maxima, blocks_of, divisor, largest_logit, load_block, max_z, tempered

BACKWARD_WARPS = 4  # no tree here: eight values a lane leave registers for many programs at once


@triton.jit
def sums_kernel(
    logits, logits_row, temperature, maxima, sums, terms, V, blocks, HAS_TERMS: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """S(e) of each block, and S(e·(z - M)) where entropy is asked for."""
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    t = divisor(temperature, row)
    _, inside, logit = load_block(logits, logits_row, row, block, V)
    shifted = tempered(logit, t) - max_z(largest_logit(maxima, row, blocks, BLOCKS), t)
    e = tl.where(inside, exp(shifted), 0.0)
    at = row * blocks + block + tl.arange(0, 1)
    tl.store(sums + at, tree(tl.reshape(e, (1, BLOCK)), 1, BLOCK))
    if HAS_TERMS:
        weighted = tl.where(e == 0.0, 0.0, e * shifted)  # never 0 · -inf
        tl.store(terms + at, tree(tl.reshape(weighted, (1, BLOCK)), 1, BLOCK))


@triton.jit
def sum_of_blocks(sums, row, blocks, BLOCKS: tl.constexpr):
    """S of a row's block sums → [1]."""
    b = tl.arange(0, BLOCKS)[None, :]
    return tree(tl.load(sums + row * blocks + b, mask=b < blocks, other=0.0), 1, BLOCKS)


@triton.jit
def result_kernel(
    logits, logits_row, ids, temperature, maxima, sums, terms, logprob, entropy, max_, sum_, finite, blocks,
    HAS_TERMS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """What the blocks of a row come to."""
    row = tl.program_id(0).to(tl.int64)
    t = divisor(temperature, row)
    most = max_z(largest_logit(maxima, row, blocks, BLOCKS), t)
    total = sum_of_blocks(sums, row, blocks, BLOCKS)
    log_sum = log(total)
    at = row + tl.arange(0, 1)
    z_id = tempered(tl.load(logits + row * logits_row + tl.load(ids + row)), t)
    tl.store(logprob + at, (z_id - most) - log_sum)
    if HAS_TERMS:
        tl.store(entropy + at, log_sum - tl.div_rn(sum_of_blocks(terms, row, blocks, BLOCKS), total))
    tl.store(max_ + row, most)
    tl.store(sum_ + at, total)
    tl.store(finite + row, most == most)


@triton.jit
def backward_kernel(
    logits, logits_row, ids, temperature, max_, sum_, entropy, d_logprob, d_entropy, d_logits, V, blocks,
    HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """d_logits of a block. Where no gradient comes in, +0 goes out and the logits are not read."""
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    dl = tl.load(d_logprob + row)
    absent = dl == 0.0
    if HAS_ENTROPY:
        dh = tl.load(d_entropy + row)
        absent = absent & (dh == 0.0)
    d = tl.full((BLOCK,), 0.0, tl.float32)
    if not absent:
        t, total = divisor(temperature, row), tl.load(sum_ + row)
        v, _, logit = load_block(logits, logits_row, row, block, V)
        shifted = tempered(logit, t) - tl.load(max_ + row)
        p = tl.div_rn(exp(shifted), total)
        own = tl.where(v == tl.load(ids + row), dl, 0.0)
        d = own - dl * p
        if HAS_ENTROPY:
            d = d - (dh * p) * ((shifted - log(total)) + tl.load(entropy + row))
        d = tempered(tl.where(p == 0.0, own, d), t)  # never 0 · -inf
    v = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(d_logits + row * V + v, d.to(d_logits.dtype.element_ty), mask=v < V)


class Logprob(Device):
    """logprob and logprob_backward of `contract.Kernels`."""

    @cached_property
    def _targets(self) -> Indices:
        return Indices()

    def logprob(
        self, logits: Tensor, ids: Tensor, temperature: Tensor, *, entropy: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        n, vocabulary = logits.shape
        require("logits", logits, torch.float32, (n, vocabulary))
        logits, ids, blocks = (
            strided_rows(logits),
            self._targets.inside("token id", ids, n, vocabulary),
            blocks_of(vocabulary),
        )
        temperature = row_values("temperature", temperature, n)
        maxima, sums = block_maxima(self, logits), self.empty(n, blocks)
        terms = self.empty(n, blocks) if entropy else sums
        sizes = {"HAS_TERMS": entropy, "BLOCKS": power_of_two(blocks), "num_warps": 1}  # one warp: a tree's
        self.start(
            sums_kernel, (n * blocks,), logits, logits.stride(0), temperature, maxima, sums, terms, vocabulary, blocks,
            **sizes,
        )  # fmt: skip
        logprob, max_, sum_ = (self.empty(n) for _ in range(3))
        entropies, finite = self.empty(n) if entropy else None, self.empty(n, dtype=torch.bool)
        self.start(
            result_kernel, (n,), logits, logits.stride(0), ids, temperature, maxima, sums, terms, logprob,
            logprob if entropies is None else entropies, max_, sum_, finite, blocks, **sizes,
        )  # fmt: skip
        return logprob, entropies, max_, sum_, finite

    def logprob_backward(
        self,
        logits: Tensor,
        ids: Tensor,
        temperature: Tensor,
        max_: Tensor,
        sum_: Tensor,
        entropy: Tensor | None,
        d_logprob: Tensor,
        d_entropy: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        n, vocabulary = logits.shape
        require("logits", logits, torch.float32, (n, vocabulary))
        logits, ids, blocks = (
            strided_rows(logits),
            self._targets.inside("token id", ids, n, vocabulary),
            blocks_of(vocabulary),
        )
        named = {"temperature": temperature, "max": max_, "sum": sum_, "d_logprob": d_logprob}
        temperature, max_, sum_, d_logprob = (row_values(key, x, n) for key, x in named.items())
        entropy_or_none = d_entropy_or_none = d_logprob
        if d_entropy is not None:
            if entropy is None:
                raise ValueError("a gradient of the entropy needs the entropy")
            entropy_or_none = row_values("entropy", entropy, n)
            d_entropy_or_none = row_values("d_entropy", d_entropy, n)
        d_logits = self.empty(n, vocabulary, dtype=grad_dtype(dtype))
        self.start(
            backward_kernel, (n * blocks,), logits, logits.stride(0), ids, temperature, max_, sum_, entropy_or_none,
            d_logprob, d_entropy_or_none, d_logits, vocabulary, blocks,
            HAS_ENTROPY=d_entropy is not None, num_warps=BACKWARD_WARPS,
        )  # fmt: skip
        return d_logits


def row_values(name: str, x: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One value a row [n], contiguous. Raises ValueError unless x fits."""
    require(name, x, dtype, (n,))
    return x.contiguous()
