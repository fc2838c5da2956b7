"""What a trainer can go back to: its state before a step, on each rank that of its own stacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from vexact.model.policy import Policy
from vexact.training.optimizer import AdamW


@dataclass(frozen=True)
class Snapshot:
    """Copies of masters and moments, which the optimizer changes in place, and the rest as it was. The policy is the
    very object: nothing changes one.
    """

    policy: Policy
    masters: Mapping[str, Tensor]
    first: Mapping[str, Tensor]
    second: Mapping[str, Tensor]
    power1: float
    power2: float
    lr: float

    @staticmethod
    def of(policy: Policy, optimizer: AdamW) -> Snapshot:
        masters, first, second = ({name: x.clone() for name, x in part.items()} for part in _parts(optimizer))
        return Snapshot(policy, masters, first, second, optimizer.power1, optimizer.power2, optimizer.lr)

    def restore(self, optimizer: AdamW) -> Policy:
        """Put everything back, in every bit; the policy of then."""
        for held, part in zip((self.masters, self.first, self.second), _parts(optimizer), strict=True):
            for name, tensor in part.items():
                tensor.copy_(held[name])
        optimizer.power1, optimizer.power2, optimizer.lr = self.power1, self.power2, self.lr
        return self.policy


def _parts(optimizer: AdamW) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor], Mapping[str, Tensor]]:
    return optimizer.masters, optimizer.first, optimizer.second
