"""The gradient of score centering with weights that are ratios to a base. As `cpu/centre.cpp`.

Three passes: the weighted sums of blocks, then one program a row for the tree of them and the weight of the id, then
the gradient, which computes the weights of its block again rather than read them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vexact_kernels.arguments import bounded, require, strided_rows
from vexact_kernels.contract import CLAMP, Softmax, grad_dtype
from vexact_kernels.triton.functions import BLOCK, EXP_HIGHEST, exp, log, tree
from vexact_kernels.triton.launch import power_of_two
from vexact_kernels.triton.logits import blocks_of, divisor, load_block, tempered
from vexact_kernels.triton.logprob import Logprob, row_values, sum_of_blocks

GRADIENT_WARPS = 4  # no tree here, as in logprob's


@triton.jit
def held_ratio(x, x_sum, y, y_sum, low, high, CLAMPS: tl.constexpr):
    """exp(log p - log b) within its bounds; x, y: z - M of the policy and of the base."""
    log_ratio = (x - log(x_sum)) - (y - log(y_sum))
    dead = float("-inf")
    log_ratio = tl.where((x == dead) & (y == dead), 0.0, log_ratio)
    ratio = exp(tl.where(log_ratio > EXP_HIGHEST, EXP_HIGHEST, log_ratio))
    if CLAMPS:
        return tl.where(ratio < low, low, tl.where(ratio > high, high, ratio))
    return tl.where((ratio < low) | (ratio > high), 0.0, ratio)


@triton.jit
def shifted_block(logits, logits_row, max_, row, block, V, t):
    """z - M of a block's ids."""
    _, _, logit = load_block(logits, logits_row, row, block, V)
    return tempered(logit, t) - tl.load(max_ + row)


@triton.jit
def weighted_block(
    x, x_sum, sampler, sampler_row, sampler_max, sampler_sum, base, base_row, base_max, base_sum, low, high, row, block,
    V, t, CLAMPS: tl.constexpr,
):  # fmt: skip
    """q·w of a block's ids, +0 where q is; x is z - M of the policy."""
    y = shifted_block(base, base_row, base_max, row, block, V, t)
    w = held_ratio(x, x_sum, y, tl.load(base_sum + row), tl.load(low + row), tl.load(high + row), CLAMPS)
    q = tl.div_rn(exp(shifted_block(sampler, sampler_row, sampler_max, row, block, V, t)), tl.load(sampler_sum + row))
    return tl.where(q == 0.0, 0.0, q * w)


@triton.jit
def centre_sums_kernel(
    policy, policy_row, policy_max, policy_sum, sampler, sampler_row, sampler_max, sampler_sum,
    base, base_row, base_max, base_sum, temperature, low, high, sums, V, blocks, CLAMPS: tl.constexpr,
):  # fmt: skip
    """S(q·w) of each block."""
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    t = divisor(temperature, row)
    x = shifted_block(policy, policy_row, policy_max, row, block, V, t)
    weighted = weighted_block(
        x, tl.load(policy_sum + row), sampler, sampler_row, sampler_max, sampler_sum, base, base_row, base_max,
        base_sum, low, high, row, block, V, t, CLAMPS,
    )  # fmt: skip
    inside = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK) < V
    weighted = tl.where(inside, weighted, 0.0)
    tl.store(sums + row * blocks + block + tl.arange(0, 1), tree(tl.reshape(weighted, (1, BLOCK)), 1, BLOCK))


@triton.jit
def centre_row_kernel(
    policy, policy_row, policy_max, policy_sum, base, base_row, base_max, base_sum, ids, temperature, low, high, sums,
    w_id, total, blocks, CLAMPS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The weight of a row's id, and W."""
    row = tl.program_id(0).to(tl.int64)
    t, id = divisor(temperature, row), tl.load(ids + row)
    x = tempered(tl.load(policy + row * policy_row + id), t) - tl.load(policy_max + row)
    y = tempered(tl.load(base + row * base_row + id), t) - tl.load(base_max + row)
    w = held_ratio(
        x, tl.load(policy_sum + row), y, tl.load(base_sum + row), tl.load(low + row), tl.load(high + row), CLAMPS
    )
    tl.store(w_id + row, w)
    tl.store(total + row + tl.arange(0, 1), sum_of_blocks(sums, row, blocks, BLOCKS))


@triton.jit
def centre_gradient_kernel(
    policy, policy_row, policy_max, policy_sum, sampler, sampler_row, sampler_max, sampler_sum,
    base, base_row, base_max, base_sum, ids, temperature, d_logprob, low, high, w_id, total, d_logits, V, blocks,
    CLAMPS: tl.constexpr,
):  # fmt: skip
    """d_logits of a block. Where no gradient comes in, +0 goes out and the logits are not read."""
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    g = tl.load(d_logprob + row)
    v = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.full((BLOCK,), 0.0, tl.float32)
    if g != 0.0:
        t, w = divisor(temperature, row), tl.load(w_id + row)
        x = shifted_block(policy, policy_row, policy_max, row, block, V, t)
        weighted = weighted_block(
            x, tl.load(policy_sum + row), sampler, sampler_row, sampler_max, sampler_sum, base, base_row, base_max,
            base_sum, low, high, row, block, V, t, CLAMPS,
        )  # fmt: skip
        p = tl.div_rn(exp(x), tl.load(policy_sum + row))
        c = tl.where(p == 0.0, weighted, tl.fma(w - tl.load(total + row), p, weighted))
        d = tempered(tl.where(v == tl.load(ids + row), g * w, 0.0) - g * c, t)
    tl.store(d_logits + row * V + v, d.to(d_logits.dtype.element_ty), mask=v < V)


class Centre(Logprob):
    """centre of `contract.Kernels`, on logprob's."""

    def centre(
        self,
        policy: Softmax,
        sampler: Softmax,
        base: Softmax | None,
        ids: Tensor,
        temperature: Tensor,
        d_logprob: Tensor,
        low: Tensor | None,
        high: Tensor | None,
        outside: str,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        bounds = bounded(base, low, high, outside)
        if base is None or bounds is None:
            given = (sampler.logits, ids, temperature, sampler.max, sampler.sum)
            ones = torch.ones_like(d_logprob)
            return self.logprob_backward(*given, None, d_logprob, None, dtype), ones, ones.clone()
        n, vocabulary = sampler.logits.shape
        named_rows = (("policy", policy), ("sampler", sampler), ("base", base))
        p, q, b = (_arguments(whose, x, n, vocabulary) for whose, x in named_rows)
        ids, blocks = self._targets.inside("token id", ids, n, vocabulary), blocks_of(vocabulary)
        named = {"temperature": temperature, "d_logprob": d_logprob, "low": bounds[0], "high": bounds[1]}
        heat, g, *limits = (row_values(key, x, n) for key, x in named.items())
        sums, w_id, total = self.empty(n, blocks), self.empty(n), self.empty(n)
        clamps = outside == CLAMP
        self.start(
            centre_sums_kernel, (n * blocks,), *p, *q, *b, heat, *limits, sums, vocabulary, blocks,
            CLAMPS=clamps, num_warps=1,
        )  # fmt: skip
        self.start(
            centre_row_kernel, (n,), *p, *b, ids, heat, *limits, sums, w_id, total, blocks,
            CLAMPS=clamps, BLOCKS=power_of_two(blocks), num_warps=1,
        )  # fmt: skip
        d_logits = self.empty(n, vocabulary, dtype=grad_dtype(dtype))
        self.start(
            centre_gradient_kernel, (n * blocks,), *p, *q, *b, ids, heat, g, *limits, w_id, total, d_logits,
            vocabulary, blocks, CLAMPS=clamps, num_warps=GRADIENT_WARPS,
        )  # fmt: skip
        return d_logits, w_id, total


def _arguments(whose: str, x: Softmax, n: int, vocabulary: int) -> tuple[Tensor, int, Tensor, Tensor]:
    """A kernel's four arguments of rows of logits, checked."""
    require(f"the {whose}'s logits", x.logits, torch.float32, (n, vocabulary))
    logits = strided_rows(x.logits)
    max_, sum_ = (row_values(f"the {whose}'s {key}", y, n) for key, y in (("max", x.max), ("sum", x.sum)))
    return logits, logits.stride(0), max_, sum_
