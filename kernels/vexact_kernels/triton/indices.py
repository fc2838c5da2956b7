"""Indices that lie on the device, checked before they become addresses: a wrong one would read foreign memory."""

from __future__ import annotations

import torch
from torch import Tensor

from vexact_kernels.arguments import require


class Indices:
    """Range checks of index tensors on the device. A check waits for the device, so the last one is remembered.

    The tensor itself is kept: another one cannot take its identity, and its version tells of changes in place.
    """

    def __init__(self) -> None:
        self._seen: tuple[Tensor | None, int, int] = (None, 0, 0)

    def inside(self, name: str, x: Tensor, count: int, limit: int) -> Tensor:
        """int64 [count], contiguous. Raises IndexError naming the first value outside 0 … limit - 1."""
        require(name, x, torch.int64, (count,))
        version = 0 if x.is_inference() else x._version
        seen, seen_version, seen_limit = self._seen
        if count and (seen is not x or seen_version != version or seen_limit > limit or x.is_inference()):
            lowest, highest = torch.stack(torch.aminmax(x)).tolist()
            if lowest < 0 or highest >= limit:
                first = next(v for v in x.tolist() if not 0 <= v < limit)
                raise IndexError(f"{name} {first} is outside 0 … {limit - 1}")
            self._seen = (x, version, limit)
        return x.contiguous()
