"""The four ways to aggregate token losses, as the divisor of each token.

A step's loss is the sum over its tokens of l/n. All counts come from the whole update before any gradient is taken, so
no cut into micro-batches can change what a token is divided by. Only what is trained counts: a token that a mask or a
remedy rejects leaves its sequence, and a sequence without a token left leaves the batch.

With B sequences of T_i tokens:

- `token-mean`: n = Σ T_i, all tokens count alike (DAPO, arXiv 2503.14476, eq. 12);
- `seq-mean-token-mean`: n = B·T_i, the mean over sequences of their means over tokens (GRPO, arXiv 2402.03300, eq. 3);
- `seq-mean-token-sum`: n = B, the mean over sequences of the sum over their tokens;
- `seq-mean-token-sum-norm`: n = B·L with a constant L, `loss_scale_factor` (Dr. GRPO, arXiv 2503.20783, §3.2).

The names are verl's; its last one has been divided by L alone in some versions, TRL's `dr_grpo` divides by B·L too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vexact.recipe import LossSection


def divisors(counts: Sequence[int], lengths: Sequence[int], loss: LossSection) -> Tensor:
    """What each token's loss is divided by: float32 [sum of lengths], sequences behind one another.

    counts: trained tokens of each sequence, at least 1; lengths: its tokens, those that a mask leaves out among them.
    """
    batch, tokens = len(counts), torch.tensor(counts, dtype=torch.int64)
    each = {
        "token-mean": torch.full_like(tokens, sum(counts)),
        "seq-mean-token-mean": tokens * batch,
        "seq-mean-token-sum": torch.full_like(tokens, batch),
        "seq-mean-token-sum-norm": torch.full_like(tokens, batch * loss.loss_scale_factor),
    }[loss.aggregation]
    return each.to(torch.float32).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
