"""Log-odds of tokens: logit p = log(p / (1 − p)). A real mismatch has nearly one width in them (arXiv 2609.32444)."""

from __future__ import annotations

import numpy as np

from vexact.arithmetic import Floats, expm1, log1p, log_complement


def logit(logp: Floats) -> Floats:
    """Of log-probabilities below 0; of 0 and above it is ∞."""
    return logp - log_complement(logp)


def log_odds(trainer: Floats, sampler: Floats) -> Floats:
    """ε = logit p_train − logit p_sampler of the tokens whose probability is below 1 on both sides, in their order.

    Then r = p_train + (1 − p_train)·e^ε.
    """
    open_ended = (trainer < 0.0) & (sampler < 0.0)
    return logit(trainer[open_ended]) - logit(sampler[open_ended])


def displaced(logp: Floats, epsilon: Floats) -> Floats:
    """Δ that a displacement of the log-odds makes: log p' − log p where logit p' = logit p + ε. Shapes broadcast.

    −log(p + (1 − p)·e^−ε) = −log(1 + (1 − p)(e^−ε − 1)).
    """
    logp = np.minimum(logp, 0.0)
    return -log1p(-expm1(logp) * expm1(-epsilon))
