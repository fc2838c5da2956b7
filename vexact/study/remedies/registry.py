"""Remedies by name, and the one that a recipe describes.

Those of this package are parts with keys of their own in `loss.remedy`, and reached by these alone: what goes together
is checked there. A new one is a function that weighs tokens, a line in `REMEDIES`, and a test:

    def half(ratios, mask, advantages, *, share: float = 0.5) -> Weighted:
        return Weighted(torch.full_like(ratios.correction, share), mask)

`loss.remedy.name: half` with `options: {share: 0.25}` then trains with it. What decides about whole steps is a class
beside those of `steps.py`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from vexact.model.remedy import Centring, Plain, Ratios, Remedy, Weighted
from vexact.recipe import RecipeError, RemedySection
from vexact.recipe.remedy import NAMES, PARTS
from vexact.study.remedies.lag import Centre, RatioWeight
from vexact.study.remedies.sequence import NegativesMask, SequenceMask, SequenceRejection, SequenceTIS
from vexact.study.remedies.steps import MIPU, Resync, StepScaling, SurgeSchedule
from vexact.study.remedies.together import Together
from vexact.study.remedies.token import CIS, DPPO, IcePop, TokenRejection, TokenTIS

Weigh = Callable[..., Weighted]


class Weighing(Plain):
    """A remedy that is one function of (ratios, mask, advantages), with its options."""

    def __init__(self, weigh: Weigh, every_update: bool = False, **options: Any) -> None:
        self.weigh, self.every_update = partial(weigh, **options), every_update

    def weights(self, ratios: Ratios, mask: Tensor, advantages: Tensor) -> Weighted:
        return self.weigh(ratios, mask, advantages)


Known = Mapping[str, Callable[..., Any]]  # classes of remedies and functions that weigh
REMEDIES: Known = MappingProxyType({})


def make(name: str, options: Mapping[str, Any], known: Known = REMEDIES) -> Remedy:
    """A registered remedy. Raises RecipeError naming the nearest known name or part, or the option that it does not
    have."""
    if name not in known:
        ways = {**_parts_by_name(), **{each: each for each in [*NAMES, *known]}}
        near = difflib.get_close_matches(name, ways, n=1, cutoff=0.5)
        hint = f"did you mean {ways[near[0]]}?" if near else f"known: {', '.join([*NAMES, *known])}"
        raise RecipeError(f"loss.remedy.name = {name} is no remedy; {hint}")
    factory = known[name]
    weighing = not inspect.isclass(factory)
    allowed = list(inspect.signature(factory).parameters)
    if weighing:
        allowed = [*(key for key in allowed if key not in ("ratios", "mask", "advantages")), "every_update"]
    for key in options:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            raise RecipeError(f"loss.remedy.options.{key}: {name} has no such option; " + _hint(near, allowed))
    try:
        return Weighing(factory, **options) if weighing else factory(**options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"loss.remedy.options of {name}: {error}") from None


def _hint(near: list[str], allowed: list[str]) -> str:
    return f"did you mean {near[0]}?" if near else f"it has {', '.join(allowed) or 'none'}"


def _parts_by_name() -> dict[str, str]:
    """What somebody may call a part → the key and value that switch it on."""
    found: dict[str, str] = {}
    for item in fields(RemedySection):
        if item.name in PARTS:
            for kind in item.metadata["choices"][1:]:
                found[f"{item.name}_{kind}"] = f"loss.remedy.{item.name} = {kind}"
                found.setdefault(kind, f"loss.remedy.{item.name} = {kind}")
    return found


def remedy_of(section: RemedySection, known: Known = REMEDIES) -> Remedy | None:
    """The remedy that a recipe describes, None where it describes none. Rejection comes first, then weights.

    known: what its name may be that of, beside those of several parts.
    """
    if section.off:
        return None
    chosen = list(_parts(section, known))
    return Together(*chosen) if len(chosen) > 1 else chosen[0]


def _parts(section: RemedySection, known: Known) -> Iterator[Remedy]:
    if section.name != "parts" and section.name not in NAMES:
        yield make(section.name, section.options, known)
    if section.sequence != "off":
        yield _sequence(section)
    if section.token != "off":
        yield _token(section)
    yield from _ratio(section)
    yield from _steps(section)


def _sequence(section: RemedySection) -> Remedy:
    level: Any = section.sequence_level
    ratio: Any = section.sequence_ratio
    low, high, scaled = section.sequence_low, section.sequence_high, (section.sequence_kappa, section.sequence_rms)
    if section.sequence == "tis":
        return SequenceTIS(high or 2.0, level, ratio, *scaled)
    if section.sequence == "rejection":
        return SequenceRejection(low, high, level, ratio, *scaled)
    if section.sequence == "mask":
        return SequenceMask(low, high, level, ratio, *scaled)
    return NegativesMask(section.sequence_delta, ratio)


def _token(section: RemedySection) -> Remedy:
    ratio: Any = section.token_ratio
    low, high = section.token_low, section.token_high
    criterion: Any = section.token_criterion
    side: Any = section.token_p
    divergence: Any = section.token_divergence
    made: dict[str, Callable[[], Remedy]] = {
        "tis": lambda: TokenTIS(high, low, ratio),
        "rejection": lambda: TokenRejection(low, high, criterion, ratio),
        "icepop": lambda: IcePop(low, high, ratio),
        "cis": lambda: CIS(section.token_lambda, section.token_kappa, side, ratio),
        "dppo": lambda: DPPO(section.token_delta, divergence),
    }
    return made[section.token]()


def _ratio(section: RemedySection) -> Iterator[Remedy]:
    base: Any = section.ratio
    clip: Any = section.clip
    centring = Centring(base, clip, section.clip_low, section.clip_high)
    if section.centre != "off":
        yield Centre(centring)
    elif section.ratio != "none":
        yield RatioWeight(centring)


def _steps(section: RemedySection) -> Iterator[Remedy]:
    trigger: Any = section.resync
    level: Any = section.resync_level
    lr_level: Any = section.scale_lr_level
    by: Any = section.scale_lr_by
    accept_level: Any = section.accept_level
    if section.resync != "off":
        yield Resync(trigger, section.resync_threshold, level, section.resync_every, section.resync_discard)
    if section.scale_lr == "ess":
        yield StepScaling(lr_level, section.scale_lr_on, section.scale_lr_cap)
    if section.scale_lr == "mismatch":
        yield SurgeSchedule(
            by, section.scale_lr_window, section.scale_lr_surge, section.scale_lr_period, section.scale_lr_floor
        )
    if section.accept != "off":
        yield MIPU(section.accept_c, section.accept_c_final, section.accept_steps, accept_level, section.accept_fold)
