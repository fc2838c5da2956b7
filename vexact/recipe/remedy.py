"""What is done about sampler and trainer disagreeing, in parts that can be put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from vexact.recipe.values import OPEN, RecipeError, choice, number

PARTS = ("token", "sequence", "centre", "resync", "scale_lr", "accept")  # keys that switch one on
OWN_WEIGHTS = ("tis", "icepop", "cis")  # token parts that weigh by a ratio to the sampler
# Bounds of each kind where the recipe leaves both at 0; kinds that are not here need one.
TOKEN_BOUNDS = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0)}
SEQUENCE_BOUNDS = {"tis": (0.0, 2.0), "rejection": (0.0, 2.0), "mask": (0.0, 3.0)}
CLIP_BOUNDS = {"truncate": (0.0, 2.0), "ppo": (0.8, 1.2)}
DELTAS = {"tv": 0.2, "kl": 0.05}
# Names for what people know: the parts that each switches on, where the recipe leaves them off.
NAMES: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "dlc": {"centre": "scores", "ratio": "lag", "resync": "ess"},
    "score_centering": {"centre": "scores"},
    "vcpo": {"sequence": "tis", "sequence_high": 8.0, "scale_lr": "ess"},
})  # fmt: skip


@dataclass(frozen=True)
class RemedySection:
    """By default nothing. Every part may stand alone; vexact/study/remedies has formulas and sources.

    A name switches parts on where they are off, and the resolved recipe holds those parts; a name that is none of
    `dlc`, `score_centering` and `vcpo` is that of a remedy that somebody added to
    `vexact/study/remedies/registry.py`, with `options` of its own. A bound of 0 means the kind's own default, and is
    resolved too. fp16 on both sides is model.dtype, and the logits of the head are never rounded here: neither needs a
    remedy.

    token_ratio, sequence_ratio: `correction` is π_old/q, `current` p_θ/q and `drift` p_θ/π_old, which is 1 in the first
    update of a step (r_corr, r_ppo^rollout and r_ppo^train of arXiv 2605.14220); the last two anew before each update.

    Raises RecipeError for parts that cannot go together, and for bounds that nothing can meet.
    """

    name: str = "parts"
    options: Mapping[str, Any] = field(default_factory=dict, metadata=OPEN)  # of a registered remedy
    token: str = choice("off", "tis", "rejection", "icepop", "cis", "dppo")
    token_ratio: str = choice("correction", "current", "drift")  # dppo: always current
    token_low: float = number(0.0, at_least=0.0)  # both 0: tis 0 to 2, icepop 0.5 to 5
    token_high: float = number(0.0, at_least=0.0)
    token_criterion: str = choice("ratio", "k2", "k3")  # of rejection
    token_lambda: float = number(2.3, above=0.0)  # cis: cap 1 + λ·max(1 − p, κ)
    token_kappa: float = number(5e-3, at_least=0.0)
    token_p: str = choice("trainer", "sampler")  # cis: whose p; the paper's we do not know
    token_divergence: str = choice("tv", "kl")  # dppo
    token_delta: float = number(0.0, at_least=0.0)  # dppo; 0: 0.2 for tv, 0.05 for kl
    sequence: str = choice("off", "tis", "rejection", "mask", "negatives")
    sequence_ratio: str = choice("correction", "current", "drift")
    sequence_level: str = choice("product", "geometric", "k2", "k3")
    sequence_low: float = number(0.0, at_least=0.0)  # both 0: tis up to 2, rejection 0 to 2, mask 0 to 3
    sequence_high: float = number(0.0, at_least=0.0)
    sequence_kappa: float = number(0.0, at_least=0.0)  # above 0: bounds κ·√T·RMS of a sum, κ·RMS/√T of a mean
    sequence_rms: float = number(0.0, at_least=0.0)  # of a token's log-ratio, as calibrated
    sequence_delta: float = number(0.0, at_least=0.0)  # negatives: out where A < 0 and mean(log q − log p) is above
    centre: str = choice("off", "scores")
    ratio: str = choice("none", "lag", "sampler")  # weights 1, p_θ/p_s, p_θ/q
    clip: str = choice("truncate", "ppo", "none")  # of that ratio
    clip_low: float = number(0.0, at_least=0.0)  # both 0: truncate 0 to 2, ppo 0.8 to 1.2
    clip_high: float = number(0.0, at_least=0.0)
    resync: str = choice("off", "ess", "k3", "every")  # the sampler takes the weights behind a step that triggers it
    resync_level: str = choice("unset", "token", "sequence")  # of ess: they differ by a factor of about T in K3
    resync_threshold: float = number(0.0, at_least=0.0)  # ess: below it, 0 is ½; k3: above it
    resync_every: int = number(0, at_least=0)  # every: versions
    resync_discard: bool = False  # the batch that triggers is not trained on
    scale_lr: str = choice("off", "ess", "mismatch")
    scale_lr_level: str = choice("sequence", "token")  # ess
    scale_lr_on: float = number(1.0, above=0.0)  # ess: that of an on-policy batch
    scale_lr_cap: float = number(1.0, above=0.0)
    scale_lr_by: str = choice("length", "k3")  # mismatch: whose surge is waited for
    scale_lr_window: int = number(50, at_least=1)  # steps whose mean it is measured by
    scale_lr_surge: float = number(3.0, above=1.0)  # times that mean
    scale_lr_period: float = number(1.8, above=0.0)  # halved each time that this many times the step of surge is past
    scale_lr_floor: float = number(0.1, above=0.0)
    accept: str = choice("off", "mipu")  # a step stands only if the next batch says so
    accept_c: float = number(1e-3, at_least=0.0)  # the loss of reward that is borne
    accept_c_final: float = number(0.0, at_least=0.0)  # … behind accept_steps steps
    accept_steps: int = number(0, at_least=0)  # 0: it stays
    accept_level: str = choice("token", "sequence")
    accept_fold: bool = True  # advantages are taken from their mean first

    def __post_init__(self) -> None:
        for part, value in NAMES.get(self.name, {}).items():
            if not getattr(self, part) or getattr(self, part) in ("off", "none"):
                object.__setattr__(self, part, value)
        self._fill("token", TOKEN_BOUNDS.get(self.token), "token_low", "token_high")
        if not self.sequence_kappa and self.sequence_level in ("product", "geometric"):
            self._fill("sequence", SEQUENCE_BOUNDS.get(self.sequence), "sequence_low", "sequence_high")
        if self.ratio != "none":
            self._fill("clip", CLIP_BOUNDS.get(self.clip), "clip_low", "clip_high")
        if self.token == "dppo" and not self.token_delta:
            object.__setattr__(self, "token_delta", DELTAS[self.token_divergence])
        if self.resync == "ess" and not self.resync_threshold:
            object.__setattr__(self, "resync_threshold", 0.5)
        self._check_bounds()
        self._check_needs()
        self._check_parts()

    @property
    def off(self) -> bool:
        """Whether it names no remedy at all."""
        return self.name == "parts" and {getattr(self, part) for part in PARTS} == {"off"} and self.ratio == "none"

    def _fill(self, part: str, bounds: tuple[float, float] | None, low: str, high: str) -> None:
        if bounds is not None and getattr(self, low) == getattr(self, high) == 0.0:
            object.__setattr__(self, low, bounds[0])
            object.__setattr__(self, high, bounds[1])

    def _check_bounds(self) -> None:
        for name in ("token", "sequence", "clip"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if low > high:
                raise RecipeError(f"loss.remedy.{name}_low = {low} is above {name}_high = {high}")

    def _check_needs(self) -> None:
        """What a kind has no default for."""
        needs = [
            (self.token == "rejection", "token", "token_high"),
            (self.sequence == "rejection" and self.sequence_level in ("k2", "k3"), "sequence_level", "sequence_high"),
            (self.sequence == "negatives", "sequence", "sequence_delta"),
            (self.sequence_kappa > 0.0, "sequence_kappa", "sequence_rms"),
            (self.resync == "k3", "resync", "resync_threshold"),
            (self.resync == "every", "resync", "resync_every"),
        ]
        for needed, part, key in needs:
            if needed and not getattr(self, key):
                raise RecipeError(f"loss.remedy.{part} = {getattr(self, part)} needs {key} above 0")
        if self.resync == "ess" and self.resync_level == "unset":
            raise RecipeError(
                "loss.remedy.resync = ess needs resync_level: token or sequence; they differ by a factor of about the "
                "length of a sequence in K3, so neither is a default"
            )

    def _check_parts(self) -> None:
        level = self.sequence_level
        if self.sequence == "negatives" and self.sequence_ratio == "correction":
            raise RecipeError(
                "loss.remedy.sequence = negatives needs sequence_ratio = current (p_θ/q, the paper's) or drift: "
                "correction is 1 wherever π_old is what the sampler recorded, and would mask nothing"
            )
        if level in ("k2", "k3") and self.sequence not in ("off", "rejection"):
            raise RecipeError(f"loss.remedy.sequence_level = {level}: {self.sequence} weighs by a ratio, not by this")
        if level in ("k2", "k3") and self.sequence_kappa:
            raise RecipeError(f"loss.remedy.sequence_kappa: bounds of {level} are not scaled")
        if self.centre != "off" and self.token in OWN_WEIGHTS:
            raise RecipeError(
                f"loss.remedy.token = {self.token} with centre: a weight behind the centring would undo it; "
                "use ratio = sampler, whose weights are centred too"
            )
        if self.token in OWN_WEIGHTS and self.ratio != "none":
            raise RecipeError(f"loss.remedy.token = {self.token} with ratio = {self.ratio}: two weights for one ratio")
        if (self.token, self.token_ratio) == ("dppo", "drift"):
            raise RecipeError("loss.remedy.token_ratio = drift: dppo compares p_θ with q, which is always current")
        if self.scale_lr_on > 1.0 or self.scale_lr_floor > 1.0:
            raise RecipeError("loss.remedy.scale_lr_on and scale_lr_floor are shares, at most 1")
        if self.accept != "off" and not self.accept_fold and not self.accept_c:
            raise RecipeError("loss.remedy.accept needs accept_fold or accept_c above 0: rounding decides else")
        if self.options and (self.name == "parts" or self.name in NAMES):
            raise RecipeError("loss.remedy.options are those of a registered remedy: loss.remedy.name says which")

    def check(self, objective: str, anchor: str, entropy: float, divergence: float, updates: int) -> None:
        """Raises RecipeError where it does not go with the rest of the loss section.

        divergence: the coefficient of a KL in the loss. updates: of a step.
        """
        if objective != "reinforce" and (self.centre != "off" or self.ratio != "none"):
            key = "centre" if self.centre != "off" else "ratio"
            raise RecipeError(
                f"loss.remedy.{key} = {getattr(self, key)} needs loss.name = reinforce: {objective} has a ratio of its "
                "own in its gradient, and the score that is weighed or centred here is that of log π alone"
            )
        if self.centre != "off" and (entropy or divergence):
            key = "loss.entropy_coef" if entropy else "loss.kl.place = loss"
            raise RecipeError(f"loss.remedy.centre with {key}: only log π has a centred score; use kl.place = reward")
        weighs = self.token in OWN_WEIGHTS or self.sequence in ("tis", "mask")
        if weighs and anchor == "bypass" and objective != "reinforce":
            key = "token" if self.token in OWN_WEIGHTS else "sequence"
            raise RecipeError(
                f"loss.remedy.{key} = {getattr(self, key)} with loss.anchor = bypass: the ratio to the sampler that "
                f"{objective} clips holds that correction already; use loss.anchor = recomputation"
            )
        self._check_ratio(objective, updates)

    def _check_ratio(self, objective: str, updates: int) -> None:
        for part, weighing in (("token", OWN_WEIGHTS), ("sequence", ("tis", "mask"))):
            kind, ratio = getattr(self, part), getattr(self, f"{part}_ratio")
            if kind == "off" or ratio == "correction":
                continue
            if ratio == "drift" and updates == 1:
                raise RecipeError(
                    f"loss.remedy.{part}_ratio = drift: a step of one update has none; "
                    "loss.mini_batches or loss.epochs above 1 make more"
                )
            if kind in weighing and objective != "reinforce":
                raise RecipeError(
                    f"loss.remedy.{part}_ratio = {ratio} with {part} = {kind}: p_θ/π_old is in the gradient of "
                    f"{objective} already; weigh by correction, or only reject by {ratio}"
                )
