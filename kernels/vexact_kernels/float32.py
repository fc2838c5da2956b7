"""Float32 arithmetic in a written order: fused multiply-add, chain, tree, exp, log. The ground of `reference.py`.

Only operations that IEEE 754 defines to the last bit are used: +, -, ·, ÷, √, conversions, selections and integers. All
take and return float32 tensors and broadcast.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024  # values the tree adds before it starts a new block

LN2_HI = float.fromhex("0x1.62e4p-1")  # 15 bits, so n * LN2_HI is exact
LN2_LO = float.fromhex("0x1.7f7d1cp-20")
LOG2_E = float.fromhex("0x1.715476p+0")
EXP_LOWEST = float.fromhex("-0x1.5d589ep+6")  # -87.33654: the last x whose exp is a normal number
EXP_HIGHEST = float.fromhex("0x1.62e42ep+6")  # 88.72283: the last x whose exp is finite
MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
MAGIC_BITS = 0x4B400000
EXP_COEFFICIENTS = (
    "0x1.6db5bcp-10", "0x1.123c78p-7", "0x1.55545cp-5", "0x1.55548ep-3", "0x1p-1", "0x1p+0", "0x1p+0",
)  # fmt: skip
LOG_COEFFICIENTS = (
    "-0x1.0e2a8ep-3", "0x1.1df358p-3", "-0x1.f03c2cp-4", "0x1.1ef198p-3",
    "-0x1.55b7e6p-3", "0x1.99ce42p-3", "-0x1.fffe5ep-3", "0x1.55550cp-2",
)  # fmt: skip

# Wichura's AS241, PPND7 (Applied Statistics 37, 1988), highest power first: numerator and denominator near 1/2, and of
# r = sqrt(-log(tail)) - 1.6 in the tails. What it has for r > 5 is not needed: here sqrt(-log(tail)) stays below 4.17.
CENTRAL = 0.425
NORMAL_CENTRAL = (
    ("0x1.d8ep+5", "0x1.3e951p+7", "0x1.937964p+5", "0x1.b18d9p+1"),
    ("0x1.0cc01p+6", "0x1.3b07f2p+6", "0x1.1e529ep+4", "0x1p+0"),
)
NORMAL_TAIL = (
    ("0x1.5ca5dap-3", "0x1.4e85c2p+0", "0x1.60df54p+1", "0x1.6c6662p+0"),
    ("0x1.ec62b8p-4", "0x1.795848p-1", "0x1p+0"),
)


def scalar(value: float) -> Tensor:
    """The float32 nearest to `value`, as a tensor []."""
    return torch.tensor(value, dtype=torch.float32)


def widen(x: Tensor) -> Tensor:
    """Any storage dtype as float32, exactly."""
    return x.to(torch.float32)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a·b + c rounded once.

    The product is exact in float64 and s + error = product + c exactly (TwoSum). Stepping an s that ends in an even bit
    toward the error rounds s to odd, so that the final rounding to float32 is the only one that counts.
    """
    product, addend = a.double() * b.double(), c.double()
    s = product + addend
    t = s - product
    error = (product - (s - t)) + (addend - t)
    # The error is NaN where s is not finite: then s is the answer already.
    target = torch.where(error > 0, torch.inf, torch.where(error < 0, -torch.inf, s))
    is_even = s.view(torch.int64) & 1 == 0
    return torch.where(is_even, torch.nextafter(s, target), s).float()


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded: the float64 root holds more than twice the digits. (torch's float32 root is off by one ulp in
    one value of six.)
    """
    return torch.sqrt(x.double()).float()


def chain(a: Tensor, b: Tensor) -> Tensor:
    """Sum of a[..., k]·b[..., k] over the last axis, k ascending, from +0: acc = fma(a[k], b[k], acc)."""
    acc = torch.zeros(torch.broadcast_shapes(a.shape[:-1], b.shape[:-1]), dtype=torch.float32)
    for k in range(a.shape[-1]):
        acc = fma(a[..., k], b[..., k], acc)
    return acc + 0.0


def tree(v: Tensor) -> Tensor:
    """S(v) over the last axis: pad with +0 to a power of two, add the upper half to the lower half until one is left.

    More than 1024 values are cut into blocks of 1024; the sum is S of the block sums.
    """
    n = v.shape[-1]
    if n > BLOCK:
        blocks = torch.nn.functional.pad(v, (0, -n % BLOCK)).unflatten(-1, (-1, BLOCK))
        return tree(tree(blocks))
    width = 1
    while width < n:
        width *= 2
    v = torch.nn.functional.pad(v, (0, width - n))
    while width > 1:
        width //= 2
        v = v[..., :width] + v[..., width:]
    return v[..., 0] + 0.0


def horner(coefficients: tuple[str, ...], x: Tensor) -> Tensor:
    """The polynomial in fused multiply-adds, highest power first."""
    values = [scalar(float.fromhex(c)) for c in coefficients]
    acc = values[0]
    for value in values[1:]:
        acc = fma(acc, x, value)
    return acc


def exp(x: Tensor) -> Tensor:
    """exp(±0) = 1; +0 wherever the result would be subnormal and at -inf; +inf above 88.72283; NaN at NaN."""
    low, high = x < EXP_LOWEST, x > EXP_HIGHEST
    clamped = torch.where(low | high, 0.0, x)
    shifted = fma(clamped, scalar(LOG2_E), scalar(MAGIC))
    n = shifted - MAGIC
    r = fma(-n, scalar(LN2_LO), fma(-n, scalar(LN2_HI), clamped))
    # q·2^k in two exact steps, because 2^128 is not a float32.
    k = shifted.view(torch.int32) - MAGIC_BITS
    half = k >> 1
    y = horner(EXP_COEFFICIENTS, r) * _power_of_two(half) * _power_of_two(k - half)
    y = torch.where(low, 0.0, torch.where(high, torch.inf, y))
    return torch.where(torch.isnan(x), x, y)


def _power_of_two(k: Tensor) -> Tensor:
    return ((k + 127) << 23).view(torch.float32)


def log(x: Tensor) -> Tensor:
    """log(1) = +0; -inf at ±0, +inf at +inf, NaN below 0 and at NaN; a subnormal x is scaled by 2^23 first."""
    subnormal = x < 2.0**-126
    bits = torch.where(subnormal, x * 2.0**23, x).view(torch.int32)
    e = (bits - 0x3F2AAAAB) >> 23  # so that m lies in [2/3, 4/3)
    m = (bits - (e << 23)).view(torch.float32)
    f = m - 1.0
    exponent = (e - torch.where(subnormal, 23, 0)).float()
    square = f * f
    y = (f * square) * horner(LOG_COEFFICIENTS, f)
    y = fma(exponent, scalar(LN2_LO), y)
    y = fma(scalar(-0.5), square, y)
    y = fma(exponent, scalar(LN2_HI), f + y)
    y = torch.where(x < torch.inf, y, torch.inf)
    y = torch.where(x > 0, y, torch.where(x < 0, torch.nan, -torch.inf))
    return torch.where(torch.isnan(x), x, y)


def normal(words: Tensor) -> Tensor:
    """Standard normal numbers, float32, of random words (int64, 0 … 2^32 - 1), by the inverse of the distribution.

    u = (n + 1/2)·2^-24 with n the high 24 bits, never 0 or 1. It enters as u - 1/2 and as the distance to the nearer
    end, which are float32 numbers exactly.
    """
    odd = 2 * (words >> 8) + 1 - 2**24
    q = odd.float() * 2.0**-25
    tail = 0.5 - q.abs()
    r = fma(-q, q, scalar(0.180625))
    t = sqrt(-log(tail)) - 1.6
    central = q.abs() < CENTRAL
    (a, b), (c, d) = NORMAL_CENTRAL, NORMAL_TAIL
    far = horner(c, t)
    numerator = torch.where(central, q * horner(a, r), torch.where(q < 0, -far, far))
    return numerator / torch.where(central, horner(b, r), horner(d, t))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), one division."""
    return torch.div(scalar(1.0), 1.0 + exp(-x))


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), one division."""
    return x / (1.0 + exp(-x))
