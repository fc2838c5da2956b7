"""Mismatch put back between sampler and trainer: synthetic noise, or a real cause. By default none."""

from __future__ import annotations

from dataclasses import dataclass

from vexact.recipe.values import RecipeError, choice, number

# Core targets of the presets: the K3 that the dose is solved for (nats a token); papers and repositories report these
# sizes for real pairs of engines. `bad-gpu` is skewed: its ε has one sign, its Δ both (vexact/study/noise.py).
PRESETS = {
    "fp16": 7e-5,
    "bf16-dense": 6e-4,
    "bf16-moe": 1.5e-3,
    "fp8": 3e-3,
    "bad-gpu": 5e-3,
    "fp8-kv": 2.5e-2,
    "int4": 1e-1,
}
WEIGHT_PRESETS = {"weights-0.01": 0.01, "weights-0.02": 0.02, "weights-0.05": 0.05}  # relative to a tensor's RMS
ACTIVATIONS = ("hidden", "attention", "kv")
WEIGHTS = ("weights", "head")
FORWARD_SITES = ("logits", *ACTIVATIONS, *WEIGHTS)
CAUSES = (
    "split-k", "split-kv", "tensor-parallel", "bf16-logits", "bf16-head", "bf16-softmax", "bf16-rope",
    "recomputed-rope", "norm-cast", "fp8-kv", "int8-kv", "fp8-weights", "int8-weights", "int4-weights",
    "other-dtype", "torch", "missed-sync", "temperature", "raw-logprob", "stale-prefix", "flipped-token",
)  # fmt: skip
_LASTING = ("fresh", "sequence", "prefix", "prefix+version")
_INSIDE = (("gaussian",), ("rms", "ulp"), _LASTING)
_FIXED = (("gaussian",), ("rms",), ("weights",))
# What goes together: of each site the shapes, the laws and the persistences.
LEGAL = {
    "logits": (("gaussian", "laplace", "student", "spikes", "one-sided"), ("log-odds", "ulp"), _LASTING),
    **dict.fromkeys(ACTIVATIONS, _INSIDE),
    **dict.fromkeys(WEIGHTS, _FIXED),
    "gradients": (("gaussian",), ("rms",), ("fresh",)),
    "record": (("gaussian", "laplace", "student", "one-sided"), ("log-odds",), ("fresh", "sequence", "prefix")),
}
SAMPLER_CAUSES = ("missed-sync", "stale-prefix", "temperature", "raw-logprob", "flipped-token")


@dataclass(frozen=True)
class MismatchSection:
    """Which numbers are disturbed, on which side, how, and for how long. vexact/study/noise.py has the definitions.

    The size is one of: a preset; `sigma`; `k3`, the K3 that sigma is solved for once, on the policy that the run begins
    with. With a site and none of them sigma is 0: the same path, noise of size zero, the same bits as without.

    Raises RecipeError for combinations that have no meaning, by name.
    """

    preset: str = choice("none", *PRESETS, *WEIGHT_PRESETS)
    site: str = choice("off", *FORWARD_SITES, "gradients", "record")
    side: str = choice("sampler", "trainer", "both-shared", "both-independent")
    shape: str = choice("gaussian", "laplace", "student", "spikes", "one-sided")
    law: str = choice("auto", "log-odds", "ulp", "rms")  # auto: log-odds for logits and record, else rms
    persistence: str = choice("auto", "fresh", "sequence", "prefix", "prefix+version", "weights")
    sigma: float = number(0.0, at_least=0.0)  # of a logit in nats; or relative: in ulps of bfloat16, or to the RMS
    k3: float = number(0.0, at_least=0.0)
    hold: str = choice("sigma", "k3")  # k3: solved again before each step, a control
    degrees: int = number(3, at_least=1, below=9)  # student: degrees of freedom
    truncate: float = number(10.0, above=0.0)  # student: in units of sigma; its exponential has no mean otherwise
    spike_rate: float = number(1e-4, at_least=0.0, below=1.0)  # spikes: of a position
    spike_size: float = number(4.0)  # spikes: in nats, on one token near the top
    start: int = number(0, at_least=0)  # the first step that is disturbed
    stop: int = number(0, at_least=0)  # the first one that no longer is; 0: all are
    ramp: int = number(0, at_least=0)  # steps over which sigma grows from 0
    seed: int = number(0, at_least=0, below=2.0**63)  # beside the recipe's own, so that noise alone can be drawn anew
    cause: str = choice("none", *CAUSES)
    degree: int = number(2, at_least=1)  # of a cause: parts of a sum; publishes of a lost one; the step of the flip
    dtype: str = choice("float16", "bfloat16", "float32")  # other-dtype: what that side computes in
    temperature: float = number(1.1, above=0.0)  # temperature: what the sampler really uses, times the recipe's
    top_p: float = number(0.9, above=0.0)  # raw-logprob: what the sampler keeps

    def __post_init__(self) -> None:
        sizes = [name for name in ("sigma", "k3") if getattr(self, name)]
        if self.preset != "none":
            self._refuse_preset_with(sizes)
        if self.cause != "none" and (self.site != "off" or self.preset != "none" or sizes):
            raise RecipeError(f"mismatch.cause = {self.cause} goes without a site, a preset and a size")
        if len(sizes) > 1:
            raise RecipeError("mismatch.sigma and mismatch.k3 are two ways to say one size: give one")
        if self.site == "off" and self.preset == "none" and sizes:
            raise RecipeError(f"mismatch.{sizes[0]} needs a mismatch.site")
        if self.stop and self.stop <= self.start:
            raise RecipeError(f"mismatch.stop = {self.stop} must be above start = {self.start}, or 0")
        if self.stop and self.ramp and self.start + self.ramp > self.stop:
            raise RecipeError(
                f"mismatch.ramp = {self.ramp} from start = {self.start} is not over at stop = {self.stop}: noise would "
                "never have its size"
            )
        if self.top_p > 1.0:
            raise RecipeError(f"mismatch.top_p = {self.top_p} must be at most 1")
        if self.actual_site != "off":
            self._check_site()
        if self.hold == "k3" and not (self.k3 or self.preset in PRESETS):
            raise RecipeError("mismatch.hold = k3 needs a k3 to hold")
        if self.cause in SAMPLER_CAUSES and self.side != "sampler":
            raise RecipeError(f"mismatch.cause = {self.cause} befalls the sampler: side must be sampler")

    def _refuse_preset_with(self, sizes: list[str]) -> None:
        if self.preset == "bad-gpu" and self.actual_shape != "one-sided":
            raise RecipeError(
                f"mismatch.preset = bad-gpu has the shape one-sided: shape = {self.shape} cannot be given"
            )
        if sizes or self.site not in ("off", "logits"):
            raise RecipeError(f"mismatch.preset = {self.preset} says site and size itself: give no site, sigma or k3")

    def _check_site(self) -> None:
        site = self.actual_site
        actual = {"shape": self.actual_shape, "law": self.actual_law, "persistence": self.actual_persistence}
        for key, allowed in zip(actual, LEGAL[site], strict=True):
            if actual[key] not in allowed:
                raise RecipeError(
                    f"mismatch.{key} = {actual[key]} does not go with site {site}; it is {' or '.join(allowed)}"
                )
        if site == "gradients" and self.side != "trainer":
            raise RecipeError("mismatch.site = gradients: only the trainer has any; side must be trainer")
        if site == "record" and self.side != "sampler":
            raise RecipeError("mismatch.site = record: the sampler keeps the record; side must be sampler")
        if self.k3 and site not in FORWARD_SITES:
            raise RecipeError(f"mismatch.k3 at site {site}: no K3 follows from it; give sigma")

    @property
    def off(self) -> bool:
        return self.site == "off" and self.preset == "none" and self.cause == "none"

    @property
    def target(self) -> float:
        """The K3 to solve sigma for; 0 where sigma is given."""
        return PRESETS.get(self.preset, self.k3)

    @property
    def actual_site(self) -> str:
        if self.preset in WEIGHT_PRESETS:
            return "weights"
        return "logits" if self.preset in PRESETS else self.site

    @property
    def actual_sigma(self) -> float:
        return WEIGHT_PRESETS.get(self.preset, self.sigma)

    @property
    def actual_shape(self) -> str:
        return "one-sided" if self.preset == "bad-gpu" and self.shape == "gaussian" else self.shape

    @property
    def actual_law(self) -> str:
        if self.law != "auto":
            return self.law
        return "log-odds" if self.actual_site in ("logits", "record") else "rms"

    @property
    def actual_persistence(self) -> str:
        if self.persistence != "auto":
            return self.persistence
        return "weights" if self.actual_site in WEIGHTS else "fresh"
