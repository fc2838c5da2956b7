"""A fitted block reproduces what it was fitted to, and finds laws that it was not told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from vexact.arithmetic import expm1
from vexact.errors import BadInput
from vexact.recipe import MismatchSection
from vexact.study.dumps import read_pair
from vexact.study.fit import POINTS, Core, fit, points
from vexact.study.metrics import Compared
from vexact.study.odds import displaced

SAMPLE = Path(__file__).parents[1] / "data" / "vllm_cpu_bf16_smollm2_sample.jsonl.gz"
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def drawn(law: str, size: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.normal(size=size) if law == "gaussian" else generator.laplace(size=size) / math.sqrt(2.0)


def disturbed(law: str, sigma: float, n: int = 30_000, spikes: int = 0, most: float = 1.5) -> Pairs:
    """Probabilities of all sizes, e^−e^most the least, and the same with noise on their log-odds: rollouts of 100."""
    q = -np.exp(np.random.default_rng(1).uniform(-8, most, n))
    epsilon = sigma * drawn(law, n, 2)
    epsilon[:spikes] = 6.0 * np.sign(epsilon[:spikes])
    columns = (torch.split(torch.from_numpy(x.astype(np.float32)), 100) for x in (q, q + displaced(q, epsilon)))
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("column", ["hf_bf16", "hf_fp32"])
def test_noise_of_the_fitted_law_reproduces_a_real_pair(column: str) -> None:
    """Drawn anew on the recorded probabilities: K3 within 4 %, mean |Δ| within 7 %, p95 and p99 within 10 %."""
    pairs = read_pair(str(SAMPLE), f"{SAMPLE}:{column}").pairs
    fitted = fit(pairs)
    assert fitted.best is not None and fitted.best.law == "gaussian"
    logp = np.tile(Compared.of(pairs).sampler, 8)  # eight draws: their own noise is out of the way
    again = Core.of(displaced(logp, fitted.best.sigma * drawn("gaussian", len(logp), 0)))
    assert again.k3 == pytest.approx(fitted.found.k3, rel=0.04)
    assert again.mean == pytest.approx(fitted.found.mean, rel=0.07)
    assert again.p95 == pytest.approx(fitted.found.p95, rel=0.10)
    assert again.p99 == pytest.approx(fitted.found.p99, rel=0.10)
    wider = Core.of(displaced(logp, 1.1 * fitted.best.sigma * drawn("gaussian", len(logp), 0)))
    assert wider.k3 != pytest.approx(fitted.found.k3, rel=0.04)  # the mutant: a tenth too wide


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
@pytest.mark.parametrize("sigma", [0.02, 0.2, 1.0])
def test_the_law_and_the_width_that_made_a_mismatch_are_found(law: str, sigma: float) -> None:
    fitted = fit(disturbed(law, sigma))
    assert fitted.best is not None and fitted.best.law == law
    assert fitted.best.sigma == pytest.approx(sigma, rel=0.04)
    assert fitted.spikes == 0
    assert fitted.best.core.k3 == pytest.approx(fitted.found.k3, rel=1e-5)


def test_spikes_are_counted_out_of_the_core_and_stated() -> None:
    fitted = fit(disturbed("gaussian", 0.05, spikes=12))
    assert fitted.best is not None and fitted.best.sigma == pytest.approx(0.05, rel=0.03)
    assert fitted.spikes == 12
    assert fitted.spike_size == pytest.approx(6.0, rel=1e-3)
    assert fitted.block["shape"] == "spikes" and fitted.block["spike_rate"] == pytest.approx(12 / 30_000)
    clean = fit(disturbed("gaussian", 0.05))
    assert fitted.found.k3 == pytest.approx(clean.found.k3, rel=0.01)


def test_certain_tokens_make_no_tail_heavy() -> None:
    """Where few tokens are in doubt they carry K3, whatever the law: more than half of it, and none is a spike."""
    fitted = fit(disturbed("laplace", 0.3, most=-2.0))
    assert fitted.found.tail_share > 0.5 > fit(disturbed("laplace", 0.3)).found.tail_share
    assert fitted.spikes == 0 and fitted.best is not None and fitted.best.law == "laplace"


@pytest.mark.parametrize("pairs", [disturbed("gaussian", 0.1, 2000), disturbed("gaussian", 0.05, spikes=12),
                                   disturbed("laplace", 0.1, 4000)])  # fmt: skip
def test_the_block_is_one_that_a_recipe_takes(pairs: Pairs) -> None:
    fitted = fit(pairs)
    read = yaml.safe_load(fitted.as_yaml("a\nb"))
    values: dict[str, Any] = {k: float(v) if k in ("k3", "spike_rate") else v for k, v in read["mismatch"].items()}
    section = MismatchSection(**values)
    assert section.target == pytest.approx(fitted.found.k3, rel=1e-3) and not section.off
    assert read.keys() == {"mismatch"}


def test_nothing_is_fitted_to_equal_sides() -> None:
    q = -torch.rand(50, generator=torch.Generator().manual_seed(1))
    fitted = fit([(q, q.clone())])
    assert fitted.best is None and fitted.block == {"preset": "none"}
    assert "nothing to reproduce" in fitted.as_yaml()


def test_what_no_noise_of_log_odds_can_cause_is_refused() -> None:
    certain = torch.zeros(10)
    with pytest.raises(BadInput, match="every token is certain"):
        fit([(certain, certain - 0.5)])


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_points_of_a_law_have_its_mean_its_width_and_its_tail(law: str) -> None:
    found = points(law)
    assert len(found) == POINTS and math.fsum(found) == 0.0
    assert math.fsum(found * found) / POINTS == pytest.approx(1.0, rel=1e-12)
    kurtosis = math.fsum(found**4) / POINTS
    assert kurtosis == pytest.approx({"gaussian": 3.0, "laplace": 6.0}[law], rel=0.2)


def test_k3_grows_with_the_width() -> None:
    q = -np.exp(np.random.default_rng(1).uniform(-8, 1.5, 300))
    k3 = [float(np.mean(expm1(d) - d)) for d in (displaced(q[:, None], s * points("laplace")) for s in (0.1, 1.0, 9.0))]
    assert k3[0] < k3[1] < k3[2]
