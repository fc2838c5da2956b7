"""A whole tiny model on the interpreted kernels: the checks of `verify`, and a CPU's bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from vexact.model.policy import Policy
from vexact.testing import Comparison
from vexact.verification import checks, updates
from vexact.verification.subject import Sizes, Subject
from vexact_kernels import PROFILES, load
from vexact_kernels.triton import Triton

SIZES = Sizes(requests=2, samples=1, tokens=3, few=2, sequences=1, length=40, trained=2, trained_tokens=3)
Run = Callable[[Subject], Comparison]


@pytest.fixture(scope="module", params=PROFILES)
def subject(request: pytest.FixtureRequest) -> Subject:
    kernels = Triton(request.param, torch.device("cpu"))
    return Subject(Policy.load("tiny", kernels, torch.bfloat16), SIZES)


def equal(found: Comparison, least: int) -> bool:
    """Nothing differs, and enough was compared for that to mean anything."""
    return found.compared >= least and not found.differ


@pytest.mark.parametrize(
    "run, least",
    [
        (partial(checks.sampler_is_scorer, temperature=1.0), 3),
        (partial(checks.chunks, size=16), 10_000),
        (partial(checks.filled_pages, value=float("nan")), 6),
        (partial(updates.gradients, tokens_at_once=1), 100_000),
    ],
)
def test_a_profile_agrees_with_itself(subject: Subject, run: Run, least: int) -> None:
    assert equal(run(subject), least)


def test_portable_has_the_bits_of_a_cpu_and_tensorcore_has_others(subject: Subject) -> None:
    found = [checks.implementation(subject, load("cpu")), updates.gradients_on(subject, load("cpu"))]
    if subject.kernels.profile == "portable":
        assert equal(found[0], 10_000) and equal(found[1], 100_000)
    else:
        assert all(comparison.differ for comparison in found), "the profiles should not sum alike"


def test_a_digest_names_the_profile(subject: Subject) -> None:
    of_a_cpu = Policy.load("tiny", load("cpu"), torch.bfloat16).digest
    assert (subject.policy.digest == of_a_cpu) == (subject.kernels.profile == "portable")
