"""Several remedies as one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vexact.model.remedy import AfterUpdate, BeforeUpdate, Centring, Ratios, Remedy, Weighted


class Together:
    """One behind the other: each sees what those before it kept; weights and factors are multiplied."""

    def __init__(self, *remedies: Remedy) -> None:
        """Raises ValueError where two of them want to centre."""
        self.remedies = remedies
        centres = [remedy.centre for remedy in remedies if remedy.centre is not None]
        if len(centres) > 1:
            raise ValueError("scores can be centred once")
        self.centre: Centring | None = centres[0] if centres else None
        self.every_update = any(remedy.every_update for remedy in remedies)
        self.beforehand = any(remedy.beforehand for remedy in remedies)
        self.needs_lag = any(remedy.needs_lag for remedy in remedies)
        self.can_undo = any(remedy.can_undo for remedy in remedies)

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        weights = torch.ones_like(ratios.correction)
        for remedy in self.remedies:
            found = remedy.weights(ratios, mask, advantages)
            weights, mask = weights * found.weights, found.kept  # what is rejected may have any weight
        return Weighted(weights, mask)

    def before_update(self, metrics: Mapping[str, float]) -> BeforeUpdate:
        answers = [remedy.before_update(metrics) for remedy in self.remedies]
        return "discard" if "discard" in answers else "use"

    def lr_scale(self, metrics: Mapping[str, float]) -> float:
        scale = 1.0
        for remedy in self.remedies:
            scale *= remedy.lr_scale(metrics)
        return scale

    def after_update(self, metrics: Mapping[str, float]) -> AfterUpdate:
        """What any of them wants; a rollback comes with a sync and needs none beside it."""
        wanted = [remedy.after_update(metrics) for remedy in self.remedies]
        if "rollback" in wanted:
            return "rollback"
        return "sync" if "sync" in wanted else "none"

    def state(self) -> dict[str, float]:
        return {f"{i}.{key}": value for i, each in enumerate(self.remedies) for key, value in each.state().items()}

    def take_up(self, state: Mapping[str, float]) -> None:
        for i, remedy in enumerate(self.remedies):
            mine = {key.partition(".")[2]: value for key, value in state.items() if key.partition(".")[0] == str(i)}
            if mine:
                remedy.take_up(mine)
