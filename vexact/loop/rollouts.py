"""Rollouts as parquet: a file a step, a row a rollout, both log-probabilities of every token as numbers and as bits.

The trainer's are those at the weights that the step began with, the exact ones those of the trainer's arithmetic at the
weights that sampled, so that Δ between them and the sampler's is discrepancy alone; null where the trainer did not
compare a rollout. An advantage is null where a rollout was sampled but not trained.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vexact.loop.folder import RunError, draft_of
from vexact.model.rollout import Rollout
from vexact.recipe import Recipe
from vexact.study.metrics import measure_gap
from vexact.tasks import Scores

Id = tuple[int, int]  # request, sample


@dataclass(frozen=True)
class Sampled:
    """The rollouts of a step and what became of them.

    rollouts, scores: all that were sampled, in one order. trained, advantages (float32, in its order): those that the
    trainer was given. scored: `Trainer.scored`. replayed: the same at the weights that sampled, where those are older
    than the trainer's. decode: ids to text.
    """

    rollouts: Sequence[Rollout]
    scores: Scores
    trained: Sequence[Rollout]
    advantages: Tensor
    scored: Tensor | None
    replayed: Tensor | None
    decode: Callable[[Sequence[int]], str]

    def gap(self) -> list[tuple[Tensor, Tensor]]:
        """(recorded, the trainer's) log-probabilities of every rollout that it compared: staleness is in them."""
        return _pairs(self.trained, self.scored)

    def mismatch(self) -> list[tuple[Tensor, Tensor]]:
        """(recorded, found again at the very same weights): the discrepancy of arithmetic alone."""
        return self.gap() if self.replayed is None else _pairs(self.trained, self.replayed)

    @cached_property
    def discrepancy(self) -> dict[str, float]:
        """The measures of `mismatch`, by name."""
        return measure_gap(self.mismatch())


def _pairs(rollouts: Sequence[Rollout], scored: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    by_id = scored_of(rollouts, scored)
    recorded = {rollout.id: rollout.logprobs.cpu() for rollout in rollouts}
    return [(recorded[each], by_id[each]) for each in sorted(by_id)]


def scored_of(rollouts: Sequence[Rollout], scored: Tensor | None) -> dict[Id, Tensor]:
    """`Trainer.scored` by rollout, on the host; those that it dropped or did not reach are absent."""
    if scored is None:
        return {}
    kept = sorted(
        (rollout for rollout in rollouts if rollout.completion and rollout.finish != "nonfinite"),
        key=lambda rollout: rollout.id,
    )
    ends = [0]
    for rollout in kept:
        ends.append(ends[-1] + len(rollout.completion))
    on_host = scored.cpu()
    return {
        rollout.id: on_host[begin:end]
        for rollout, (begin, end) in zip(kept, pairwise(ends), strict=True)
        if end <= len(on_host)
    }


def wanted(recipe: Recipe) -> bool:
    """Whether a run keeps its rollouts. Raises RunError where it must and pyarrow is not installed."""
    installed = importlib.util.find_spec("pyarrow") is not None
    if recipe.run.rollouts == "always" and not installed:
        raise RunError("run.rollouts = always: pyarrow is not installed: pip install 'vexact[data]'")
    return recipe.run.rollouts != "never" and installed


def write_rollouts(folder: Path, step: int, sampled: Sampled) -> Path:
    """step-N.parquet, which appears whole."""
    import pyarrow.parquet

    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:06d}.parquet"
    draft = draft_of(path)
    pyarrow.parquet.write_table(_table(step, sampled), draft, compression="zstd")
    os.replace(draft, path)
    return path


def _table(step: int, sampled: Sampled) -> Any:
    import pyarrow as pa

    rollouts, scores = sampled.rollouts, sampled.scores
    recorded = [rollout.logprobs.cpu() for rollout in rollouts]
    by_id = scored_of(sampled.trained, sampled.scored)
    scored = [by_id.get(rollout.id) for rollout in rollouts]
    same = by_id if sampled.replayed is None else scored_of(sampled.trained, sampled.replayed)
    exact = [same.get(rollout.id) for rollout in rollouts]
    advantage_of = dict(zip((rollout.id for rollout in sampled.trained), sampled.advantages.tolist(), strict=True))
    ids, floats, bits = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.int32())
    columns = {
        "step": pa.array([step] * len(rollouts), pa.int64()),
        "request": pa.array([rollout.request for rollout in rollouts], pa.uint64()),
        "sample": pa.array([rollout.sample for rollout in rollouts], pa.int32()),
        "prompt": pa.array([sampled.decode(rollout.prompt) for rollout in rollouts], pa.string()),
        "completion": pa.array([sampled.decode(rollout.completion) for rollout in rollouts], pa.string()),
        "prompt_ids": pa.array([list(rollout.prompt) for rollout in rollouts], ids),
        "completion_ids": pa.array([list(rollout.completion) for rollout in rollouts], ids),
        "sampler_logprobs": pa.array([x.numpy() for x in recorded], floats),
        "sampler_logprobs_bits": pa.array([_bits(x) for x in recorded], bits),
        "trainer_logprobs": pa.array([None if x is None else x.numpy() for x in scored], floats),
        "trainer_logprobs_bits": pa.array([None if x is None else _bits(x) for x in scored], bits),
        "exact_logprobs": pa.array([None if x is None else x.numpy() for x in exact], floats),
        "exact_logprobs_bits": pa.array([None if x is None else _bits(x) for x in exact], bits),
        "reward": pa.array(scores.rewards, pa.float64()),
        "reward_unflipped": pa.array(scores.unflipped, pa.float64()),
        "success": pa.array(scores.successes, pa.bool_()),
        "advantage": pa.array([advantage_of.get(rollout.id) for rollout in rollouts], pa.float32()),
        "finish": pa.array([rollout.finish for rollout in rollouts], pa.string()),
        "temperature": pa.array([rollout.temperature for rollout in rollouts], pa.float64()),
        "version": pa.array([rollout.version for rollout in rollouts], pa.int64()),
        "digest": pa.array([rollout.digest for rollout in rollouts], pa.string()),
    }
    return pa.table(columns)


def _bits(x: Tensor) -> Any:
    """float32 [tokens] as the int32 of the same bits."""
    return x.contiguous().view(torch.int32).numpy()
