"""A run with a remedy: what it decides is done, and a run that was taken up goes on as if it had not stopped."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vexact.loop import RunError, train
from vexact.loop.display import Display
from vexact.loop.loop import Loop
from vexact.loop.versions import check_accept
from vexact.model.ops import Ops
from vexact.model.remedy import Plain
from vexact.recipe import (
    CheckpointSection,
    LossSection,
    MismatchSection,
    ModelSection,
    OptimizerSection,
    Recipe,
    RemedySection,
    RunSection,
    SamplingSection,
    SyncSection,
    TaskSection,
)
from vexact.study.causes.drawing import Hotter, NucleusUnsaid
from vexact.study.causes.head import RoundedSoftmax
from vexact.study.causes.registry import DRAWING
from vexact.tasks import load_task
from vexact.verification.checks import thread_count
from vexact_kernels import load

RECIPE = Recipe(
    steps=8,
    model=ModelSection("tiny-modsum"),
    task=TaskSection(name="modsum"),
    sampling=SamplingSection(prompts=3, samples=4, max_tokens=5),
    optimizer=OptimizerSection(lr=3e-3),
    sync=SyncSection(100),
)
NOISE = MismatchSection(site="logits", sigma=0.3)
QUIET = Console(file=io.StringIO())


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And rewards that differ within each group, so that every step moves the weights."""
    monkeypatch.setattr("vexact.tasks.modsum.Modsum.reward", lambda self, item, text: float(sum(map(ord, text)) % 7))
    with thread_count(1):
        yield


def of(remedy: RemedySection, **keys: Any) -> Recipe:
    return replace(RECIPE, loss=LossSection("reinforce", remedy=remedy), **keys)


def lines(recipe: Recipe) -> list[dict[str, Any]]:
    loop = Loop(recipe, load_task(recipe.task, recipe.seed), load(), lambda line: None)
    loop.check()
    loop.begin(lambda line: None)
    display = Display(QUIET, recipe.steps, 12)
    return [loop.step(step, display) for step in range(recipe.steps)]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_dlc_takes_the_weights_behind_the_step_whose_lag_is_spread_too_far(level: str) -> None:
    found = lines(of(RemedySection(name="dlc", resync_level=level)))
    assert [line["remedy_after"] == "sync" for line in found] == [line[f"ess_{level}"] < 0.5 for line in found]
    assert 0 < sum(line["remedy_after"] == "sync" for line in found) < len(found)
    for line, following in pairwise(found):
        assert following["lag"] == (0 if line["remedy_after"] == "sync" else line["lag"] + 1)
    assert all(line["mismatch_tokens"] == 0 for line in found)  # the sampler is exact, however old
    assert max(line["centre_weight_max"] for line in found) == 2.0


def test_a_fixed_rhythm_is_that_of_sync_every() -> None:
    found = [lines(of(RemedySection(resync="every", resync_every=3))), lines(of(RemedySection(), sync=SyncSection(3)))]
    assert [line["fingerprint"] for line in found[0]] == [line["fingerprint"] for line in found[1]]
    assert [line["lag"] for line in found[0]] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_with_a_fresh_and_exact_sampler_dlc_is_reinforce_but_for_rounding() -> None:
    found = [lines(of(remedy, sync=SyncSection(1), steps=3))
             for remedy in (RemedySection(), RemedySection(name="dlc", resync_level="token"))]  # fmt: skip
    for plain, dlc in zip(*found, strict=True):
        assert dlc["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)
        assert dlc["remedy_after"] == "none" and dlc["reward_mean"] == plain["reward_mean"]


def test_under_noise_centred_scores_are_another_run() -> None:
    found = [
        lines(of(RemedySection(centre=centre), sync=SyncSection(1), mismatch=NOISE)) for centre in ("off", "scores")
    ]
    assert found[0][0]["reward_mean"] == found[1][0]["reward_mean"]
    assert found[0][0]["fingerprint"] != found[1][0]["fingerprint"]
    assert all(line["ess_sequence"] == 1.0 and line["mismatch_tokens"] > 0 for line in found[1])


def test_rejected_steps_are_taken_back_and_the_next_batch_comes_from_before() -> None:
    """Weights, version and place in the schedule of the learning rate: what the step before had is the next one's."""
    remedy = RemedySection(accept="mipu", accept_c=0.0)
    optimizer = replace(RECIPE.optimizer, schedule="linear", final=0.9)
    found = lines(of(remedy, sync=SyncSection(1), mismatch=NOISE, optimizer=optimizer))
    rates = {line["sampler_version"]: line["lr"] for line in found}
    assert [rates[line["sampler_version"]] for line in found] == [line["lr"] for line in found]
    assert len(set(rates.values())) == len(rates)  # each version has its own
    back = [line["remedy_after"] == "rollback" for line in found]
    assert 0 < sum(back[:-1]) < len(found) - 1
    for (line, following), rejected in zip(pairwise(found), back, strict=False):
        assert rejected == (line["candidate"] == 1 and line["acceptance_token"] < 0)
        assert following["rollbacks"] == line["rollbacks"] + rejected
        if rejected:
            assert line["skipped"] == "discarded by the remedy" and following["lr"] > line["lr"]
            assert following["sampler_version"] == line["sampler_version"] - 1 and following["candidate"] == 0


def test_an_exact_sampler_is_never_taken_back() -> None:
    found = lines(of(RemedySection(accept="mipu"), sync=SyncSection(1)))
    assert [line["remedy_after"] for line in found] == ["none"] * 8
    assert [line["candidate"] for line in found] == [0] + [1] * 7
    plain = lines(of(RemedySection(), sync=SyncSection(1)))
    assert [line["fingerprint"] for line in found] == [line["fingerprint"] for line in plain]


@pytest.mark.parametrize("keys", [{"sync": SyncSection(2)}, {"delay": 1}, {"checkpoint": CheckpointSection(every=2)}])
def test_steps_are_taken_back_only_where_a_fresh_batch_can_say_so(keys: dict[str, Any]) -> None:
    with pytest.raises(
        RunError, match=r"loss.remedy.accept = mipu needs (sync.every|delay|checkpoint.every) = [01], not"
    ):
        lines(of(RemedySection(accept="mipu"), **{"sync": SyncSection(1), **keys}))


class Undoing(Plain):
    """A remedy of somebody's own that may take steps back: no key of the section says so."""

    can_undo = True


def test_whether_steps_are_taken_back_the_remedy_says() -> None:
    recipe = of(RemedySection(name="mine"), sync=SyncSection(1), checkpoint=CheckpointSection(every=50))
    with pytest.raises(RunError, match=r"loss.remedy.name = mine needs checkpoint.every = 0, not 50"):
        check_accept(recipe, Undoing())
    check_accept(recipe, Plain())
    check_accept(recipe, None)


@pytest.mark.parametrize("cause", sorted(DRAWING))
def test_scores_are_centred_with_what_a_sampler_drew_from(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not with the law of its logits: the mutant."""
    mismatch = MismatchSection(cause=cause, temperature=1.5, top_p=0.8)
    recipe = of(RemedySection(centre="scores"), mismatch=mismatch, steps=2)
    found = lines(recipe)
    for ops in (Hotter, NucleusUnsaid, RoundedSoftmax):
        monkeypatch.setattr(ops, "drawn_from", Ops.drawn_from)
    other = lines(recipe)
    assert found[0]["reward_mean"] == other[0]["reward_mean"]
    assert found[0]["fingerprint"] != other[0]["fingerprint"]


def test_lag_is_no_surge_of_mismatch() -> None:
    """The trainer moves away from an exact sampler: `k3` grows, the discrepancy is 0."""
    found = lines(of(RemedySection(scale_lr="mismatch", scale_lr_by="k3", scale_lr_window=2, scale_lr_period=0.1)))
    assert found[-1]["k3"] > 3.0 * (found[0]["k3"] + found[1]["k3"]) / 2
    assert {line["remedy_lr"] for line in found} == {1.0}


@pytest.mark.parametrize(
    "remedy",
    [
        RemedySection(name="dlc", resync_level="sequence"),
        RemedySection(
            scale_lr="mismatch", scale_lr_by="k3", scale_lr_window=1, scale_lr_surge=1.01, scale_lr_period=0.5
        ),
    ],
    ids=["dlc", "mismatch"],
)
def test_a_run_that_was_taken_up_goes_on_as_if_it_had_not_stopped(remedy: RemedySection, tmp_path: Path) -> None:
    whole, parts = (
        of(remedy, mismatch=NOISE, run=RunSection(folder=str(tmp_path / name)), checkpoint=CheckpointSection(every=3))
        for name in ("whole", "parts")
    )
    expected = train(whole, kernels=load(), console=QUIET).lines
    train(replace(parts, steps=4), kernels=load(), console=QUIET)
    found = train(parts, kernels=load(), console=QUIET).lines
    assert [line["fingerprint"] for line in found] == [line["fingerprint"] for line in expected]
    if remedy.scale_lr != "off":
        assert {line["remedy_lr"] for line in found if line["step"] >= 0} > {1.0}
