"""Noise: numbers of a forward disturbed by address, so that a disturbed policy is as repeatable as an exact one.

What is disturbed (site), with ε of unit width from the kernels' own normal numbers and σ the size:

- `logits`: z + σ·ε (law log-odds: ε in nats, so the width is nearly the same whatever the probability), or
  z + |z|·(σ/256)·ε (law ulp: σ in units of bfloat16's rounding), before temperature and whatever else reads them;
- `hidden`: what each layer's feed-forward adds to the residual stream; `attention`: what attention hands to its output
  projection; `kv`: keys and values as projected, before they are rotated and written into pages. Law rms: σ is
  relative to the row's root mean square; law ulp as above.

Shapes of ε: gaussian, standard deviation 1 · laplace, standard deviation 1 · student: t with `degrees` degrees of
freedom cut off at ±`truncate`, since E[e^ε] is infinite otherwise · spikes: gaussian, and with `spike_rate` a position
has `spike_size` nats added to one of its four greatest logits · one-sided: |gaussian|.

One-sided is ε, and Δ only at site record: behind logits a softmax removes what all of them share, and what is left is
skewed. At K3 5e-3 on small models Δ is below 0 for 46 to 48 % of what the sampler draws (gaussian: 51 to 53 %) and has
skewness −0.7 to −0.9 (gaussian: −0.1); its mean is −KL, as with any noise of the sampler alone.

How long a draw of ε lasts (persistence): `fresh`, a position of one sample of one request, whose id names the step ·
`sequence`, one ε for all positions of a sample · `prefix`, the ids up to there, whenever they are met ·
`prefix+version`, the same until the weights change. Positions of a prompt are the same for all samples of a request,
which share its pages. Never a forward call, a batch or a schedule: chunks, pages and batch mates change nothing.

Gradients pass through as if nothing had been added: noise is a constant of the trainer.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vexact.model.batch import Batch
from vexact.model.config import ModelConfig
from vexact.model.ops import Edit, Logprobs, Ops, then
from vexact.model.origin import Addresses
from vexact.model.parameters import Matrix
from vexact.model.wrapped import Wrapped
from vexact.recipe import MismatchSection
from vexact.study import keys
from vexact_kernels import Kernels

ULP = 2.0**-8  # relative: half a unit in the last place of bfloat16
NEAR_THE_TOP = 4  # a spike meets one of that many greatest logits
SITE_OF = {"down_proj.weight": "hidden", "o_proj.weight": "attention", "qkv_proj.weight": "kv"}


@dataclass(frozen=True)
class Noise:
    """One side's noise. seed: of everything that it draws; sigma: its size; version: of the weights it is met with."""

    section: MismatchSection
    seed: int
    sigma: float
    version: int = 0

    @property
    def site(self) -> str:
        return self.section.actual_site

    @cached_property
    def digest(self) -> str:
        """Of what it does, not of where."""
        section = self.section
        shape = {
            "student": (section.degrees, section.truncate),
            "spikes": (section.spike_rate, section.spike_size),
        }.get(section.actual_shape, ())
        what = (self.site, section.actual_shape, shape, section.actual_law, section.actual_persistence)
        return hashlib.sha256(repr((*what, self.seed, self.sigma)).encode()).hexdigest()[:8]

    def row_keys(self, site: str, at: Addresses) -> keys.Keys:
        """Of the rows at those addresses, [R]."""
        first = keys.mixed(self.seed, keys.named(site))
        prefix = keys.column(at.prefix)
        persistence = self.section.actual_persistence
        if persistence == "prefix":
            return keys.mixed(first, prefix)
        if persistence == "prefix+version":
            return keys.mixed(first, prefix, self.version)
        if persistence == "sequence":
            sample = torch.where(at.sampled, at.sample + 1, 0)
            return keys.mixed(first, keys.column(at.request), keys.column(sample))
        own = torch.where(at.sampled, at.sample + 1, 0)
        place = torch.where(at.sampled, at.position, at.prefix)
        return keys.mixed(first, keys.column(at.request), keys.column(own), keys.column(place))

    def normal(self, row_keys: keys.Keys, columns: int, kernels: Kernels, draw: int = 0) -> Tensor:
        """float32 [R, columns]. draw: which of several independent ones."""
        numbered = row_keys if draw == 0 else keys.mixed(row_keys, draw)
        return kernels.noise(keys.tensor(numbered, kernels.device), columns)

    def epsilon(self, row_keys: keys.Keys, columns: int, kernels: Kernels) -> Tensor:
        """ε of the shape, without spikes: float32 [R, columns]."""
        shape, section = self.section.actual_shape, self.section
        first = self.normal(row_keys, columns, kernels)
        if shape == "laplace":
            # (a² + b²)/2 is exponential, and the difference of two exponentials is Laplace, here of variance 2.
            second, third, fourth = (self.normal(row_keys, columns, kernels, i) for i in (1, 2, 3))
            return (first * first + second * second - third * third - fourth * fourth) * (0.5 * math.sqrt(0.5))
        if shape == "student":
            total = torch.zeros_like(first)
            for i in range(1, section.degrees + 1):
                other = self.normal(row_keys, columns, kernels, i)
                total = total + other * other
            scale = torch.sqrt(total / torch.full_like(total, float(section.degrees)))
            return (first / scale).clamp(-section.truncate, section.truncate)
        return first.abs() if shape == "one-sided" else first

    def logits(self, z: Tensor, at: Addresses, kernels: Kernels) -> Tensor:
        """z float32 [R, V] disturbed."""
        row_keys = self.row_keys("logits", at)
        noisy = plus(z, self._scaled(z, self.epsilon(row_keys, z.shape[1], kernels), None))
        spiked = self.section.actual_shape == "spikes" and self.sigma > 0.0
        return self._spiked(noisy, z, row_keys) if spiked else noisy

    def rows(self, x: Tensor, name: str, at: Addresses, kernels: Kernels) -> Tensor:
        """x [N, columns] in its dtype, disturbed; name: of the parameter beside it."""
        wide = kernels.cast(x, torch.float32)
        rms = None
        if self.section.actual_law == "rms":
            ones = torch.ones(wide.shape[1], dtype=torch.float32, device=wide.device)
            rstd = kernels.rmsnorm(wide.contiguous(), ones, 0.0)[1][:, None]
            rms = torch.where(rstd.isfinite(), torch.ones_like(rstd) / rstd, 0.0)
        epsilon = self.epsilon(self.row_keys(name, at), x.shape[1], kernels)
        return kernels.cast(plus(wide, self._scaled(wide, epsilon, rms)), x.dtype)

    def _scaled(self, x: Tensor, epsilon: Tensor, rms: Tensor | None) -> Tensor:
        if self.section.actual_law == "ulp":
            return x.abs() * (epsilon * (self.sigma * ULP))
        scaled = epsilon * self.sigma
        return scaled if rms is None else scaled * rms

    def _spiked(self, noisy: Tensor, z: Tensor, row_keys: keys.Keys) -> Tensor:
        """With a rare large one; σ is of the core, which it does not change."""
        drawn = keys.mixed(row_keys, keys.named("spike"))
        for row in (keys.uniforms(drawn) < self.section.spike_rate).nonzero()[0].tolist():
            greatest = torch.sort(z[row], descending=True, stable=True).indices
            chosen = greatest[int(drawn[row]) % min(NEAR_THE_TOP, len(greatest))]
            noisy[row, chosen] = noisy[row, chosen] + self.section.spike_size
        return noisy


class Noisy(Wrapped):
    """Ops whose numbers are disturbed by noise of one forward site."""

    def __init__(self, inner: Ops, noise: Noise, config: ModelConfig, batch: Batch | None = None) -> None:
        super().__init__(inner, batch)
        self.noise, self.config = noise, config

    def around(self, inner: Ops, batch: Batch | None = None) -> Noisy:
        return Noisy(inner, self.noise, self.config, batch)

    def digest(self, arithmetic: str) -> str:
        return f"{self.inner.digest(arithmetic)}~{self.noise.digest}"

    def matmul(self, x: Tensor, weight: Matrix) -> Tensor:
        site = next((site for end, site in SITE_OF.items() if weight.name.endswith(end)), None)
        if site != self.noise.site:
            return self.inner.matmul(x, weight)
        if site == "attention":
            return self.inner.matmul(self._in_place_of(x, slice(None), weight), weight)
        first = self.config.num_heads * self.config.head_dim if site == "kv" else 0
        return self._in_place_of(self.inner.matmul(x, weight), slice(first, None), weight)

    def logits(self, hidden: Tensor, head: Matrix, rows: Tensor | None = None) -> Tensor:
        logits = self.inner.logits(hidden, head, rows)
        return self._edit(logits, torch.arange(len(hidden)) if rows is None else rows)

    def logprobs(
        self, hidden: Tensor, rows: Tensor, head: Matrix, ids: Tensor, temperature: Tensor, edit: Edit | None = None
    ) -> Logprobs:
        return self.inner.logprobs(hidden, rows, head, ids, temperature, then(self._edit, edit))

    def _edit(self, logits: Tensor, rows: Tensor) -> Tensor:
        if self.noise.site != "logits":
            return logits
        return self.noise.logits(logits, self._addresses.at(rows), self.kernels)

    def _in_place_of(self, x: Tensor, columns: slice, weight: Matrix) -> Tensor:
        noisy = x.clone()
        noisy[:, columns] = self.noise.rows(x[:, columns], weight.name, self._addresses, self.kernels)
        return self.inner.stand_in(x, noisy)

    @property
    def _addresses(self) -> Addresses:
        if self.batch is None:
            raise RuntimeError("noise is drawn at addresses: say which batch is computed, with ops.over(batch)")
        return self.batch.addresses


def plus(x: Tensor, added: Tensor) -> Tensor:
    """x + added, where adding 0 of either sign changes no bit: −0 stays −0."""
    return torch.where(added == 0, x, x + added)
