"""The learning rate of a step: a pure function of the step, in float64 and without the machine's own cosine.

With W warm-up steps, T steps in all, and the share f that is left at the end, step t = 0, 1, … has the factor

    (t + 1) / (W + 1)                            t < W: the first step moves weights too
    1                                            constant
    1 − (1 − f)·p                                linear, p = (t − W) / (T − W)
    f + (1 − f)·(1 + cos(π·p)) / 2               cosine (SGDR, arXiv 1608.03983, eq. 5)

Step T, which a run does not have, would be the first with factor f. All updates of a step share its rate.
"""

from __future__ import annotations

from vexact.recipe import OptimizerSection

BITS = 128
PI = 1069028584064966747859680373161870783301  # π·2^128, rounded


def learning_rate(section: OptimizerSection, step: int, steps: int) -> float:
    """Of step 0 … steps - 1. Behind the last step it stays as it was decayed to."""
    return section.lr * factor(section, step, steps)


def factor(section: OptimizerSection, step: int, steps: int) -> float:
    """What `lr` is multiplied by."""
    warmup = section.warmup
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if section.schedule == "constant":
        return 1.0
    done, whole = min(step, steps) - warmup, max(1, steps - warmup)
    if section.schedule == "linear":
        return 1.0 - (1.0 - section.final) * (done / whole)
    return section.final + (1.0 - section.final) * ((1.0 + cosine(done, whole)) / 2.0)


def cosine(numerator: int, denominator: int) -> float:
    """cos(π·numerator/denominator) for a fraction 0 … 1, by its power series in integers: equal on every machine."""
    if 2 * numerator > denominator:
        return -cosine(denominator - numerator, denominator)
    square = (PI * numerator // denominator) ** 2 >> BITS
    term, total, sign, n = 1 << BITS, 0, 1, 0
    while term:
        total += sign * term
        n += 2
        term, sign = term * square // ((n - 1) * n) >> BITS, -sign
    return total / (1 << BITS)
