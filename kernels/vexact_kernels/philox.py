"""Philox4x32-10 (Salmon et al. 2011): random words with addresses, and what draw and noise make of them."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Word = TypeVar("Word", int, Tensor)  # 32 bits each: a number, or int64

MASK_16 = 2**16 - 1
MASK_32 = 2**32 - 1
NOISE = 0x6E6F6973  # the last word of a noise's counter, which in a draw's is the high half of its request


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Four random words of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high_0, low_0 = _product(0xD2511F53, c0)
        high_1, low_1 = _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + 0x9E3779B9) & MASK_32, (k1 + 0xBB67AE85) & MASK_32
    return c0, c1, c2, c3


def _product(a: int, b: Word) -> tuple[Word, Word]:
    """The high and the low word of a·b. In halves of b, so that nothing leaves a tensor's int64."""
    low, high = a * (b & MASK_16), a * (b >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & MASK_16) << 16)) & MASK_32


def draw_bits(seed: int, request: int, sample: int, position: int) -> int:
    """The 64 random bits of one draw; negative numbers are read as unsigned."""
    counter = (position & MASK_32, sample & MASK_32, request & MASK_32, (request >> 32) & MASK_32)
    words = philox(counter, (seed & MASK_32, (seed >> 32) & MASK_32))
    return words[0] | words[1] << 32


def pick(weights: Tensor, bits: int) -> int:
    """The first id whose prefix sum exceeds high64(bits · total); weights int64 [V], bits 64 random bits."""
    prefix_sums = weights.cumsum(0)
    r = (bits * int(prefix_sums[-1])) >> 64
    return int((prefix_sums > r).nonzero()[0, 0])


def noise_words(key: Tensor, columns: Tensor) -> Tensor:
    """The random words of a row's columns: key int64 [N], columns int64 [n] → int64 [N, n] in 0 … 2^32 - 1.

    64 columns are words 0 of sixteen blocks, then their words 1, 2 and 3: so sixteen lanes that compute a block each
    store neighbours.
    """
    block, word = (columns >> 6 << 4 | columns & 15)[None, :], (columns >> 4 & 3)[None, :]
    zero = 0 * block
    key = key[:, None]
    words = philox((block, zero, zero, zero + NOISE), (key & MASK_32, key >> 32 & MASK_32))
    out = words[0]
    for i in range(1, 4):
        out = out.where(word != i, words[i])
    return out
