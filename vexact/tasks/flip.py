"""Wrong rewards on purpose: which ones are wrong is addressed, not streamed."""

from __future__ import annotations

from vexact_kernels.reference import draw_bits

BEHIND_POSITIONS = 1 << 31  # a draw of a token has its position here, which is smaller: no draw is used twice


def flipped(seed: int, step: int, request: int, sample: int, p: float) -> bool:
    """Whether the reward of a rollout is flipped: true with probability p, rounded down to a multiple of 2^-64.

    The same Philox as the draws of tokens (Salmon et al. 2011), at addresses that no token has. Integers are compared.
    Raises ValueError where p is outside 0 … 1 or step outside 0 … 2^31 - 1.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p is {p}, must lie in 0 … 1")
    if not 0 <= step < BEHIND_POSITIONS:
        raise ValueError(f"step is {step}, must lie in 0 … {BEHIND_POSITIONS - 1}")
    return draw_bits(seed, request, sample, BEHIND_POSITIONS + step) < int(p * 2.0**64)
