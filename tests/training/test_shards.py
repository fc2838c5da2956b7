"""How many ranks share a step is no part of it. Ranks are threads in here; tests/test_ranks.py has processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import pytest
import torch

from helpers import assert_same_bits
from made import EVERYTHING, FAMILIES, LENGTHS, make_rollouts, shifted, some_advantages
from vexact.model.gradients import Gradients, stream_shapes
from vexact.model.parameters import stack, stacks
from vexact.model.policy import Policy, Scored
from vexact.model.tiny import tiny_config, tiny_weights
from vexact.ranks import SIZES, RankError, Ranks
from vexact.recipe import LossSection, OptimizerSection
from vexact.study.remedies import remedy_of
from vexact.training.metrics import StepMetrics
from vexact.training.shards import Shards, bundles, lane_ranges, owners
from vexact.training.trainer import Trainer
from vexact.verification.ranks import on_ranks
from vexact_kernels import load

End = tuple[Trainer, list[StepMetrics]]
LOSSES = {"plain": LossSection(), **EVERYTHING}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def trained(
    ranks: Ranks,
    loss: LossSection,
    family: str = "qwen3",
    dtype: torch.dtype = torch.bfloat16,
    count: int = len(LENGTHS),
    shards: type[Shards] = Shards,
) -> End:
    """Two steps of a fresh trainer, with rollouts in no order."""
    config = tiny_config(family, **FAMILIES[family])
    trainer = Trainer.of(
        config, tiny_weights(config), load(), dtype, loss, OptimizerSection(lr=1e-3), ranks,
        remedy=remedy_of(loss.remedy),
    )  # fmt: skip
    trainer.shards = shards(config, trainer.kernels, ranks)
    measured = []
    for _ in range(2):
        rollouts = shifted(make_rollouts(trainer.policy, LENGTHS[:count]))[::-1]
        measured.append(trainer.step(rollouts, some_advantages(count)))
    return trainer, measured


def assert_same_ends(ends: Sequence[End], expected: End) -> None:
    whole, measured = expected
    names: list[str] = []
    for trainer, found in ends:
        assert [asdict(each) for each in found] == [asdict(each) for each in measured]
        for kind in ("masters", "first", "second"):
            for name, tensor in getattr(trainer.optimizer, kind).items():
                assert_same_bits(tensor, getattr(whole.optimizer, kind)[name], f"{kind} of {name}")
        assert trainer.fingerprint() == whole.fingerprint()
        names += trainer.optimizer.masters
    assert sorted(names) == sorted(stacks(whole.policy.config))


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_does_not_know_how_many_ranks_share_it(name: str, size: int) -> None:
    """With every objective, and a tied embedding, whose two streams stay apart until the owner's one add."""
    expected = trained(Ranks(), LOSSES[name])
    assert_same_ends(on_ranks(size, lambda ranks: trained(ranks, LOSSES[name])), expected)


@pytest.mark.parametrize("family", ["qwen2", "llama"])  # biases; an embedding of its own
def test_no_family_knows_its_ranks(family: str) -> None:
    expected = trained(Ranks(), LossSection(), family, torch.float32)
    assert_same_ends(on_ranks(4, lambda ranks: trained(ranks, LossSection(), family, torch.float32)), expected)


@pytest.mark.parametrize("count", [1, 3])
def test_ranks_without_a_rollout_take_part_all_the_same(count: int) -> None:
    expected = trained(Ranks(), LossSection(), count=count)
    assert_same_ends(on_ranks(8, lambda ranks: trained(ranks, LossSection(), count=count)), expected)


class Backwards(Shards):
    """A round's lanes are added as they might arrive."""

    def fold(self, gradients: Gradients, lanes: Sequence[int]) -> None:
        super().fold(gradients, lanes[::-1])


class Reduced(Shards):
    """Every rank adds up its own lanes, and the sums are added: what an all-reduce gives."""

    def fold(self, gradients: Gradients, lanes: Sequence[int]) -> None:
        owned, self.owners = self.owners, dict.fromkeys(self.owners, self.ranks.rank)
        self._add(list(self._shapes), [gradients.total(name) for name in self._shapes])
        self.owners = owned
        if lanes[-1] < 7:
            return
        mine, self._totals = self._totals, {}
        super().fold(Finished(mine), range(self.ranks.size))


class Finished(Gradients):
    def __init__(self, totals: dict[str, torch.Tensor]) -> None:
        self.found = totals

    def total(self, name: str) -> torch.Tensor:
        return self.found[name]


@pytest.mark.parametrize("mutant", [Backwards, Reduced])
def test_lanes_added_in_another_order_would_be_seen(mutant: type[Shards]) -> None:
    expected = trained(Ranks(), LossSection())
    with pytest.raises(AssertionError):
        assert_same_ends(on_ranks(4, lambda ranks: trained(ranks, LossSection(), shards=mutant)), expected)


@pytest.mark.parametrize("size", SIZES)
def test_every_stack_has_one_owner_and_no_rank_holds_much_more_than_its_share(size: int) -> None:
    config = tiny_config(num_hidden_layers=8)
    shapes, found = stream_shapes(config), owners(config, size)
    assert list(found) == list(stacks(config))
    loads = [sum(torch.Size(shapes[name]).numel() for name in found if found[name] == rank) for rank in range(size)]
    assert max(loads) <= sum(loads) / size + max(torch.Size(shape).numel() for shape in shapes.values())
    sent = [name for _, names in bundles(shapes, found) for name in names]
    assert sorted(sent) == sorted(shapes)


def test_lanes_are_those_of_the_contract() -> None:
    assert lane_ranges(0) == {}
    assert lane_ranges(3) == {0: range(1), 2: range(1, 2), 5: range(2, 3)}
    assert lane_ranges(17)[7] == range(15, 17) and list(lane_ranges(17)) == list(range(8))


def test_rank_0_can_collect_the_whole_state() -> None:
    whole, _ = trained(Ranks(), LossSection())

    def collected(ranks: Ranks) -> dict[str, torch.Tensor]:
        trainer, _ = trained(ranks, LossSection())
        return trainer.shards.collected(trainer.optimizer.first)

    first, second = on_ranks(2, collected)
    assert 0 < len(second) < len(first) == len(whole.optimizer.first)
    for name, tensor in whole.optimizer.first.items():
        assert_same_bits(first[name], tensor, name)


def test_ranks_that_part_are_named() -> None:
    on_ranks(2, lambda ranks: ranks.agree("weights", "a"))
    with pytest.raises(RankError, match=r"rank [01]: its weights [01] is not rank [01]'s [01]"):
        on_ranks(2, lambda ranks: ranks.agree("weights", ranks.rank))


def test_what_rank_0_makes_is_made_once_and_what_it_raises_reaches_all() -> None:
    def made(ranks: Ranks) -> int:
        return ranks.from_first(lambda: 3 if ranks.rank == 0 else 4)

    def broken(ranks: Ranks) -> str:
        try:
            return ranks.from_first(lambda: str(1 // 0))
        except (RankError, ZeroDivisionError) as error:
            return f"{type(error).__name__}: {error}"

    assert on_ranks(2, made) == [3, 3]
    assert on_ranks(2, broken)[1] == "RankError: rank 0: integer division or modulo by zero"
    assert on_ranks(2, broken)[0].startswith("ZeroDivisionError")


def test_versions_share_their_rotary_tables_and_no_bit_knows_it() -> None:
    config, kernels = tiny_config(), load()
    masters = {name: stack(config, tiny_weights(config), name) for name in stacks(config)}
    shards = Shards(config, kernels, Ranks())
    older, newer = (shards.published(masters, torch.bfloat16, version) for version in range(2))
    alone = Policy.build(config, masters.__getitem__, kernels, torch.bfloat16)
    assert older.transformer.rotary is newer.transformer.rotary is not alone.transformer.rotary
    short, long = (Scored([token % 256 for token in range(count)], 1) for count in (9, 300))
    first = older.logprobs([short]).logprob
    newer.logprobs([long])  # longer than the tables were
    assert_same_bits(older.logprobs([short]).logprob, first)
    assert_same_bits(older.logprobs([short, long]).logprob, alone.logprobs([short, long]).logprob)
