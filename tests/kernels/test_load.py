"""`load` gives what was asked for or one line that says what is missing, and never something else."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

import vexact_kernels
from vexact_kernels import Kernels, load


def test_the_cpu_and_the_specification_are_portable() -> None:
    for kernels in (load(), load("reference"), *(load("cpu", isa) for isa in vexact_kernels.available())):
        assert isinstance(kernels, Kernels)
        assert (kernels.device, kernels.profile) == (torch.device("cpu"), "portable")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tpu",), "device 'tpu' is unknown: there are cpu, reference, cuda"),
        (("cpu", None, "fast"), "profile 'fast' is unknown: there are portable, tensorcore"),
        (("cpu", "mmx"), "instruction set 'mmx' is not one that this machine has"),
        (("cuda", "avx2"), "device 'cuda' has no instruction set 'avx2'"),
        (("reference", "avx2"), "device 'reference' has no instruction set 'avx2'"),
        (("cpu", None, "tensorcore"), "profile 'tensorcore' is of GPUs only: device 'cpu' has 'portable'"),
        (("reference", None, "tensorcore"), "profile 'tensorcore' is of GPUs only"),
    ],
)
def test_what_does_not_exist_is_refused(arguments: tuple[Any, ...], words: str) -> None:
    assert words in refusal(lambda: load(*arguments))


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with all that is needed, as far as can be asked without using it; interpreted kernels are not asked."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return monkeypatch


@pytest.mark.parametrize("profile", ["portable", "tensorcore"])
def test_a_gpu_gives_the_kernels_of_the_profile(gpu: pytest.MonkeyPatch, profile: str) -> None:
    kernels = load("cuda", profile=profile)
    assert isinstance(kernels, Kernels)
    assert (kernels.name, kernels.device) == (f"cuda:{profile}", torch.device("cuda", 0))
    assert kernels.profile == {"portable": "portable", "tensorcore": "tensorcore on NVIDIA H200"}[profile]


@pytest.mark.parametrize("profile", ["portable", "tensorcore"])
@pytest.mark.parametrize(
    ("module", "name", "value", "words"),
    [
        (importlib.util, "find_spec", lambda name: None, "needs the package triton: pip install"),
        (torch.version, "hip", "6.4", "needs an NVIDIA GPU, and this torch is built for AMD's"),
        (torch.cuda, "is_available", lambda: False, "sees none"),
        (torch.cuda, "get_device_capability", lambda device=None: (7, 5), "8.0, and NVIDIA H200 has 7.5"),
    ],
)
def test_what_is_missing_for_a_gpu_is_named(
    gpu: pytest.MonkeyPatch, module: Any, name: str, value: Any, words: str, profile: str
) -> None:
    gpu.setattr(module, name, value)
    said = refusal(lambda: load("cuda", profile=profile))
    assert said.startswith("device 'cuda' needs ") and words in said


def test_interpreted_kernels_are_no_gpu(gpu: pytest.MonkeyPatch) -> None:
    gpu.setenv("TRITON_INTERPRET", "1")
    assert "unset TRITON_INTERPRET" in refusal(lambda: load("cuda"))
