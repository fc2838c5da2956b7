"""Device functions on float32 blocks: exp, log, sigmoid, silu and the tree, in the order of `kernels/README.md`.

The same text as `float32.py`. No `tl.exp`, `/` or `tl.sum`: those are approximate, or in the compiler's own order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vexact_kernels import float32

LN2_HI = tl.constexpr(float32.LN2_HI)
LN2_LO = tl.constexpr(float32.LN2_LO)
LOG2_E = tl.constexpr(float32.LOG2_E)
EXP_LOWEST = tl.constexpr(float32.EXP_LOWEST)
EXP_HIGHEST = tl.constexpr(float32.EXP_HIGHEST)
MAGIC = tl.constexpr(float32.MAGIC)
MAGIC_BITS = tl.constexpr(float32.MAGIC_BITS)
EXP_COEFFICIENTS = tl.constexpr(tuple(float.fromhex(c) for c in float32.EXP_COEFFICIENTS))
LOG_COEFFICIENTS = tl.constexpr(tuple(float.fromhex(c) for c in float32.LOG_COEFFICIENTS))
BLOCK = tl.constexpr(float32.BLOCK)


@triton.jit
def widened(x):
    """Any storage dtype as float32, exactly, by integers.

    Where the compiler sees a sum or a product of two converted values that is rounded to their type, it makes one
    sixteen-bit instruction of it, or on sm_100 one that takes both types. It does not see through this.
    """
    if x.dtype == tl.bfloat16:
        y = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        shifted = ((bits & 0x8000) << 16) | ((bits & 0x7FFF) << 13)
        y = shifted.to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2^112: exact, of subnormals too
        y = tl.where((bits & 0x7C00) == 0x7C00, (shifted | 0x7F800000).to(tl.float32, bitcast=True), y)
    else:
        y = x
    return y


@triton.jit
def power_of_two(k):
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp(x):
    """exp(±0) = 1; +0 wherever the result would be subnormal and at -inf; +inf above 88.72283; NaN at NaN."""
    low = x < EXP_LOWEST
    high = x > EXP_HIGHEST
    clamped = tl.where(low | high, 0.0, x)
    shifted = tl.fma(clamped, LOG2_E, MAGIC)
    n = shifted - MAGIC
    r = tl.fma(-n, LN2_LO, tl.fma(-n, LN2_HI, clamped))
    k = shifted.to(tl.int32, bitcast=True) - MAGIC_BITS
    half = k >> 1
    y = tl.fma(r, EXP_COEFFICIENTS[0], EXP_COEFFICIENTS[1])
    for i in tl.static_range(2, 7):
        y = tl.fma(y, r, EXP_COEFFICIENTS[i])
    y = y * power_of_two(half) * power_of_two(k - half)
    y = tl.where(low, 0.0, tl.where(high, float("inf"), y))
    return tl.where(x == x, y, x)


@triton.jit
def log(x):
    """log(1) = +0; -inf at ±0, +inf at +inf, NaN below 0 and at NaN; a subnormal x is scaled by 2^23 first."""
    subnormal = x < 1.1754943508222875e-38
    bits = tl.where(subnormal, x * 8388608.0, x).to(tl.int32, bitcast=True)
    e = (bits - 0x3F2AAAAB) >> 23
    m = (bits - (e << 23)).to(tl.float32, bitcast=True)
    f = m - 1.0
    exponent = (e - tl.where(subnormal, 23, 0)).to(tl.float32)
    square = f * f
    y = tl.fma(f, LOG_COEFFICIENTS[0], LOG_COEFFICIENTS[1])
    for i in tl.static_range(2, 8):
        y = tl.fma(y, f, LOG_COEFFICIENTS[i])
    y = (f * square) * y
    y = tl.fma(exponent, LN2_LO, y)
    y = tl.fma(square, -0.5, y)
    y = tl.fma(exponent, LN2_HI, f + y)
    y = tl.where(x < float("inf"), y, float("inf"))
    y = tl.where(x > 0, y, tl.where(x < 0, float("nan"), float("-inf")))
    return tl.where(x == x, y, x)


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def silu(x):
    return tl.div_rn(x, 1.0 + exp(-x))


@triton.jit
def tree(v, R: tl.constexpr, N: tl.constexpr):
    """S over the second dimension of v [R, N], N a power of two up to 1024 and pads +0 → [R]. One warp a row."""
    for i in tl.static_range(10):
        if (N >> i) > 1:
            low, high = tl.split(tl.permute(tl.reshape(v, (R, 2, N >> (i + 1))), (0, 2, 1)))
            v = low + high
    return tl.reshape(v, (R,)) + 0.0
