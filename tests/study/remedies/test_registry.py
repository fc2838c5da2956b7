"""A recipe describes its remedy by parts, by a name for several, or by the name of a registered one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from vexact.model.remedy import Centring, Ratios, Weighted
from vexact.recipe import LossSection, RecipeError, RemedySection, load_recipe
from vexact.study.remedies import (
    CIS,
    DPPO,
    MIPU,
    REMEDIES,
    Centre,
    IcePop,
    NegativesMask,
    RatioWeight,
    Resync,
    SequenceMask,
    SequenceRejection,
    SequenceTIS,
    StepScaling,
    SurgeSchedule,
    Together,
    TokenRejection,
    TokenTIS,
    Weighing,
    make,
    remedy_of,
)
from vexact_kernels import load


def of(**keys: Any) -> Any:
    return remedy_of(RemedySection(**keys))


def test_nothing_is_the_default() -> None:
    assert RemedySection().off and of() is None


@pytest.mark.parametrize(
    ("keys", "kind", "values"),
    [
        ({"token": "tis"}, TokenTIS, {"cap": 2.0, "floor": 0.0, "ratio": "correction", "every_update": False}),
        ({"token": "tis", "token_low": 0.5, "token_high": 1.5, "token_ratio": "current"}, TokenTIS,
         {"cap": 1.5, "floor": 0.5, "ratio": "current", "every_update": True}),
        ({"token": "rejection", "token_high": 1.5, "token_ratio": "drift"}, TokenRejection, {"ratio": "drift"}),
        ({"token": "icepop"}, IcePop, {"low": 0.5, "high": 5.0}),
        ({"token": "cis"}, CIS, {"scale": 2.3, "least": 5e-3, "side": "trainer"}),
        ({"token": "dppo"}, DPPO, {"delta": 0.2, "divergence": "tv", "every_update": True}),
        ({"token": "dppo", "token_divergence": "kl"}, DPPO, {"delta": 0.05, "divergence": "kl"}),
        ({"token": "rejection", "token_high": 1.5, "token_criterion": "k2"}, TokenRejection,
         {"low": 0.0, "high": 1.5, "criterion": "k2"}),
        ({"sequence": "tis"}, SequenceTIS, {"level": "product", "ratio": "correction"}),
        ({"sequence": "rejection"}, SequenceRejection, {"low": 0.0, "high": 2.0, "level": "product"}),
        ({"sequence": "rejection", "sequence_level": "k3", "sequence_high": 0.01, "sequence_ratio": "current"},
         SequenceRejection, {"high": 0.01, "level": "k3", "ratio": "current", "every_update": True}),
        ({"sequence": "rejection", "sequence_ratio": "drift"}, SequenceRejection,
         {"ratio": "drift", "every_update": True}),
        ({"sequence": "mask", "sequence_ratio": "drift"}, SequenceMask, {"ratio": "drift"}),
        ({"sequence": "tis", "sequence_ratio": "drift"}, SequenceTIS, {"ratio": "drift"}),
        ({"sequence": "mask"}, SequenceMask, {"low": 0.0, "high": 3.0}),
        ({"sequence": "negatives", "sequence_ratio": "current", "sequence_delta": 0.5}, NegativesMask,
         {"delta": 0.5, "ratio": "current", "every_update": True}),
        ({"centre": "scores"}, Centre, {"centre": Centring("none", "truncate", 0.0, 0.0), "needs_lag": False}),
        ({"ratio": "lag"}, RatioWeight, {"of": Centring("lag"), "needs_lag": True, "centre": None}),
        ({"centre": "scores", "ratio": "lag", "clip": "ppo"}, Centre, {"centre": Centring("lag", "ppo", 0.8, 1.2)}),
        ({"resync": "ess", "resync_level": "token"}, Resync, {"threshold": 0.5, "level": "token", "discard": False}),
        ({"resync": "every", "resync_every": 7}, Resync, {"trigger": "every", "every": 7, "needs_lag": False}),
        ({"scale_lr": "ess"}, StepScaling, {"level": "sequence", "on_policy": 1.0, "cap": 1.0}),
        ({"scale_lr": "mismatch"}, SurgeSchedule, {"window": 50, "surge": 3.0, "period": 1.8, "floor": 0.1}),
        ({"accept": "mipu"}, MIPU, {"start": 1e-3, "can_undo": True}),
    ],
)  # fmt: skip
def test_every_part_may_stand_alone(keys: dict[str, Any], kind: type, values: dict[str, Any]) -> None:
    found = of(**keys)
    assert type(found) is kind
    assert {name: getattr(found, name) for name in values} == values


def test_a_name_is_its_parts() -> None:
    section = RemedySection(name="dlc", resync_level="sequence")
    dlc = remedy_of(section)
    assert isinstance(dlc, Together)
    assert [type(each) for each in dlc.remedies] == [Centre, Resync]
    assert dlc.centre == Centring("lag", "truncate", 0.0, 2.0) and dlc.needs_lag and not dlc.beforehand
    assert RemedySection("dlc", centre="scores", ratio="lag", resync="ess", resync_level="sequence") == section
    assert RemedySection(name="dlc", clip="ppo", resync="k3", resync_threshold=0.1).resync == "k3"
    vcpo = of(name="vcpo")
    assert [type(each) for each in vcpo.remedies] == [SequenceTIS, StepScaling]
    assert vcpo.remedies[0].bounds.high == 8.0


def test_the_resolved_recipe_holds_the_parts_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("loss: {name: reinforce, remedy: {name: dlc, resync_level: token}}")
    recipe = load_recipe(path)
    resolved = yaml.safe_load(recipe.to_yaml())["loss"]["remedy"]
    assert [resolved[key] for key in ("centre", "ratio", "clip_high", "resync_threshold")] == [
        "scores",
        "lag",
        2.0,
        0.5,
    ]
    path.write_text(recipe.to_yaml())
    assert load_recipe(path) == recipe


def half(ratios: Ratios, mask: Tensor, advantages: Tensor, *, share: float = 0.5) -> Weighted:
    """A remedy of somebody's own: one function."""
    return Weighted(torch.full_like(ratios.correction, share), mask)


def test_a_new_remedy_is_one_function() -> None:
    found = make("half", {"share": 0.25}, {"half": half})
    assert isinstance(found, Weighing) and not found.every_update
    log = torch.zeros(3)
    answer = found.weights(Ratios(log, log, [slice(0, 3)], load()), log == 0, log)
    assert answer.weights.tolist() == [0.25] * 3 and answer.kept.all()
    with pytest.raises(RecipeError, match="half has no such option; did you mean share"):
        make("half", {"shared": 1.0}, {"half": half})


class Banded(IcePop):
    """One of somebody's own that is a class."""

    def __init__(self, high: float) -> None:
        super().__init__(0.5, high)


def test_a_registered_remedy_is_called_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("loss: {name: reinforce, remedy: {name: banded, options: {high: 3.0}}}")
    found = remedy_of(load_recipe(path).loss.remedy, {"half": half, "banded": Banded})
    assert isinstance(found, Banded) and found.high == 3.0


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("token_tis", "token = tis"), ("token_rejection", "token = rejection"), ("icepop", "token = icepop"),
        ("cis", "token = cis"), ("dppo", "token = dppo"), ("sequence_tis", "sequence = tis"),
        ("sequence_rejection", "sequence = rejection"), ("sequence_mask", "sequence = mask"),
        ("negatives", "sequence = negatives"), ("mipu", "accept = mipu"), ("resync_ess", "resync = ess"),
        ("scale_lr_mismatch", "scale_lr = mismatch"),
    ],
)  # fmt: skip
def test_what_has_a_key_of_its_own_has_no_name(name: str, key: str) -> None:
    """By a name it would pass every check of the parts."""
    assert name not in REMEDIES
    with pytest.raises(RecipeError, match=f"{name} is no remedy; did you mean loss.remedy.{key}[?]"):
        of(name=name)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"name": "icepopp"}, "loss.remedy.name = icepopp is no remedy; did you mean loss.remedy.token = icepop?"),
        ({"name": "dcl"}, "loss.remedy.name = dcl is no remedy; did you mean dlc?"),
        ({"name": "half", "options": {"shaer": 1.0}},
         "loss.remedy.options.shaer: half has no such option; did you mean share?"),
        ({"name": "banded", "options": {"high": 0.1}},
         "loss.remedy.options of banded: IcePop needs 0 ≤ low ≤ high"),
        ({"token": "dppo", "token_ratio": "drift"}, "loss.remedy.token_ratio = drift: dppo compares p_θ with q"),
        ({"name": "dlc", "resync_level": "token", "options": {"a": 1}}, "options are those of a registered remedy"),
        ({"token_low": 3.0}, "loss.remedy.token_low = 3.0 is above token_high = 0.0"),
        ({"token": "rejection"}, "loss.remedy.token = rejection needs token_high above 0"),
        ({"sequence": "rejection", "sequence_level": "k3"}, "sequence_level = k3 needs sequence_high above 0"),
        ({"sequence": "mask", "sequence_level": "k3", "sequence_high": 1.0}, "mask weighs by a ratio"),
        ({"sequence": "negatives"}, "loss.remedy.sequence = negatives needs sequence_delta above 0"),
        ({"sequence": "negatives", "sequence_delta": 0.5}, "negatives needs sequence_ratio = current"),
        ({"sequence": "tis", "sequence_kappa": 2.0}, "loss.remedy.sequence_kappa = 2.0 needs sequence_rms above 0"),
        ({"name": "dlc"}, "loss.remedy.resync = ess needs resync_level"),
        ({"resync": "k3"}, "loss.remedy.resync = k3 needs resync_threshold above 0"),
        ({"resync": "every"}, "loss.remedy.resync = every needs resync_every above 0"),
        ({"centre": "scores", "token": "tis"}, "a weight behind the centring would undo it"),
        ({"ratio": "lag", "token": "cis"}, "two weights for one ratio"),
        ({"accept": "mipu", "accept_c": 0.0, "accept_fold": False}, "needs accept_fold or accept_c above 0"),
    ],
)  # fmt: skip
def test_parts_that_do_not_go_together_are_refused_by_name(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(words)):
        remedy_of(RemedySection(**keys), {"half": half, "banded": Banded})


@pytest.mark.parametrize(
    ("keys", "loss", "words"),
    [
        ({"centre": "scores"}, {"name": "ppo"}, "loss.remedy.centre = scores needs loss.name = reinforce: ppo has"),
        ({"ratio": "sampler"}, {"name": "gspo"}, "loss.remedy.ratio = sampler needs loss.name = reinforce"),
        ({"centre": "scores"}, {"entropy_coef": 0.1}, "loss.remedy.centre with loss.entropy_coef"),
        ({"sequence": "mask"}, {"name": "ppo"}, "loss.remedy.sequence = mask with loss.anchor = bypass"),
        ({"token": "icepop"}, {"name": "cispo"}, "loss.remedy.token = icepop with loss.anchor = bypass"),
        ({"sequence": "rejection", "sequence_ratio": "drift"}, {}, "sequence_ratio = drift: a step of one update has"),
        ({"token": "tis", "token_ratio": "drift"}, {}, "token_ratio = drift: a step of one update has none"),
        (
            {"token": "tis", "token_ratio": "drift"},
            {"name": "ppo", "anchor": "recomputation", "epochs": 2},
            "token_ratio = drift with token = tis: p_θ/π_old is in the gradient of ppo already",
        ),
        (
            {"token": "icepop", "token_ratio": "current"},
            {"name": "ppo", "anchor": "recomputation"},
            "token_ratio = current with token = icepop: p_θ/π_old is in the gradient of ppo already",
        ),
        (
            {"sequence": "mask", "sequence_ratio": "drift"},
            {"name": "gspo", "anchor": "recomputation", "epochs": 2},
            "sequence_ratio = drift with sequence = mask: p_θ/π_old is in the gradient of gspo already",
        ),
    ],
)
def test_what_does_not_go_with_the_objective_is_refused_with_the_reason(
    keys: dict[str, Any], loss: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        LossSection(**{"name": "reinforce", **loss}, remedy=RemedySection(**keys))


def test_what_rejects_by_the_drift_goes_with_every_objective_of_several_updates() -> None:
    for part in ("token", "sequence"):
        keys: dict[str, Any] = {part: "rejection", f"{part}_high": 2.0, f"{part}_ratio": "drift"}
        for name in ("ppo", "reinforce", "gspo", "cispo"):
            LossSection(name, mini_batches=4, remedy=RemedySection(**keys))
    LossSection("reinforce", epochs=2, remedy=RemedySection(token="tis", token_ratio="drift"))
