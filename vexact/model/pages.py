"""Pages: 64 consecutive positions of keys and values, the unit of memory and of summation."""

from __future__ import annotations

import torch
from torch import Tensor

from vexact.model.config import ModelConfig
from vexact_kernels import CPU, PAGE


class OutOfPages(RuntimeError):
    """No page is free. The scheduler answers by sending a sequence back to wait."""


def pages_for(tokens: int) -> int:
    """How many pages hold that many positions."""
    return -(-tokens // PAGE)


class Pages:
    """A pool of pages with counted owners. Memory is never cleared: what a sequence did not write, it does not read.

    layers: how many layers have memory of their own. One is enough where every prefix is empty, as in training: each
    layer writes a chunk's keys and values before it reads them, so layers may follow each other in the same memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        count: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        layers: int | None = None,
    ) -> None:
        self.layers = config.num_layers if layers is None else layers
        shape = (self.layers, count, config.num_kv_heads)
        self._keys = torch.empty((*shape, config.head_dim, PAGE), dtype=dtype, device=device)
        self._values = torch.empty((*shape, PAGE, config.head_dim), dtype=dtype, device=device)
        self._owners = [0] * count
        self._free = list(range(count - 1, -1, -1))

    @property
    def count(self) -> int:
        return len(self._owners)

    @property
    def free(self) -> int:
        return len(self._free)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Key pages [P, G, K, 64] and value pages [P, G, 64, K] of one layer."""
        return self._keys[index % self.layers], self._values[index % self.layers]

    def take(self, count: int) -> list[int]:
        """Own that many free pages. Raises OutOfPages, and then owns none."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.count} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        return taken

    def share(self, pages: list[int]) -> list[int]:
        """One more owner for each page. A shared page is full, or is copied before anyone writes to it."""
        for page in pages:
            self._owners[page] += 1
        return list(pages)

    def give_back(self, pages: list[int]) -> None:
        """One owner less; a page without owners is free."""
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def copy(self, page: int) -> int:
        """A page of one's own with the same contents in every layer."""
        (mine,) = self.take(1)
        self._keys[:, mine] = self._keys[:, page]
        self._values[:, mine] = self._values[:, page]
        return mine

    def fill(self, value: float) -> None:
        """Overwrite all memory. For checks only: it must change no bit of any result."""
        self._keys.fill_(value)
        self._values.fill_(value)
