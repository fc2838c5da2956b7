"""Ops of a side that computes otherwise: what each cause builds on."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import Tensor

from vexact.model.batch import Batch
from vexact.model.ops import Edit, Logprobs, Ops, then
from vexact.model.parameters import Matrix
from vexact.model.policy import Policy
from vexact.model.wrapped import Labelled, Wrapped


class Caused(Wrapped):
    """A subclass overrides the operations that it computes otherwise, and holds what it needs for that.

    An operation that it replaces runs twice: exactly, by the inner ops, which record it where there are gradients, and
    otherwise; `stand_in` puts the second in the place of the first. So gradients go back through the exact operation,
    at the activations that this side computed. label: the cause with its parameters.
    """

    def __init__(self, inner: Ops, label: str) -> None:
        super().__init__(inner)
        self.label = label

    def around(self, inner: Ops, batch: Batch | None = None) -> Caused:
        other = copy.copy(self)
        other.inner, other.kernels, other.batch = inner, inner.kernels, batch
        return other

    def digest(self, arithmetic: str) -> str:
        return f"{self.inner.digest(arithmetic)}~{self.label}"


class OtherHead(Caused):
    """A subclass says how logits follow from hidden states."""

    def product(self, hidden: Tensor, head: Matrix) -> Tensor:
        """hidden [R, D] → float32 [R, V]."""
        raise NotImplementedError

    def logits(self, hidden: Tensor, head: Matrix, rows: Tensor | None = None) -> Tensor:
        return self.product(hidden, head)

    def logprobs(
        self, hidden: Tensor, rows: Tensor, head: Matrix, ids: Tensor, temperature: Tensor, edit: Edit | None = None
    ) -> Logprobs:
        def other(_: Tensor, part: Tensor) -> Tensor:
            return self.product(hidden[part.to(hidden.device, non_blocking=True)], head)

        return self.inner.logprobs(hidden, rows, head, ids, temperature, then(other, edit))


def labelled(policy: Policy, label: str) -> Policy:
    """The same policy under a digest that says so: for causes that change weights or tables and no operation."""
    return replace(policy, ops=Labelled(policy.ops, label))
