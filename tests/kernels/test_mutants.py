"""Every check can fail: broken arithmetic, in Python and in C++, and the comparison that sees it."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import vexact_kernels.cpu
import vexact_kernels.library
from helpers import differing, flushing_denormals, normal, wild
from vexact_kernels import float32, reference
from vexact_kernels.contract import OUTSIDE, Chunks, Kernels, Packed, Softmax
from vexact_kernels.cpu import Cpu
from vexact_kernels.reference import Reference

SOURCES = Path(__file__).parents[2] / "kernels" / "cpu"
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-fast-math", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
SETS = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512bf16": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16"),
}  # fmt: skip


# What the comparisons look at: small inputs on which each mutant shows.


def product(kernels: Kernels) -> Tensor:
    return kernels.matmul(normal(5, 33, seed=1), kernels.pack(normal(31, 33, seed=2)))


def tiny_product(kernels: Kernels) -> Tensor:
    """bf16 operands whose exponents sum to less than the guard allows."""
    x, w = (torch.full((2, 8), 2.0**e, dtype=torch.bfloat16) for e in (-60, -70))
    return kernels.matmul(x, kernels.pack(w), logits=True)


def underflowing_product(kernels: Kernels) -> Tensor:
    """A chain that ends in a negative zero."""
    x, w = torch.full((1, 2), 2.0**-100), torch.full((2, 2), -(2.0**-100))
    return kernels.matmul(x, kernels.pack(w))


def rotation(kernels: Kernels) -> Tensor:
    angle = torch.linspace(0.0, 3.0, 7)[:, None] * torch.linspace(1.0, 0.1, 16)
    return kernels.rope(normal(7, 2, 32), torch.arange(7), angle.cos(), angle.sin())


def negative_zeros(kernels: Kernels) -> Tensor:
    return kernels.sum(torch.full((32,), -0.0))  # a power of two: a pad would be a positive zero already


SUBNORMALS = wild(33, low=-140, high=-128)  # made once, outside any flushing environment


def norm(kernels: Kernels) -> Tensor:
    x, w = (normal(*shape, dtype=torch.bfloat16, seed=i) for i, shape in enumerate(((5, 33), (33,))))
    return kernels.rmsnorm(x, w, 1e-5)[0]


def gated(kernels: Kernels) -> Tensor:
    return kernels.swiglu(normal(5, 66, dtype=torch.bfloat16))


def partition(kernels: Kernels) -> Tensor:
    """Z itself: the last place of a sum is lost in its logarithm."""
    return kernels.logprob(normal(33, 129), torch.arange(33), torch.ones(33), entropy=False)[3]


def attended(kernels: Kernels) -> Tensor:
    """Scores are sums of small integers, exact in any order: only the fold over the values is rounded."""
    q, k = (torch.randint(-4, 5, (33, 1, 16), generator=torch.Generator().manual_seed(i)).float() for i in (1, 2))
    one, none = torch.tensor([0, 1]), torch.tensor([0])
    pages = torch.zeros(1, 1, 16, 64), torch.zeros(1, 1, 64, 16)
    return kernels.attention(q, k, normal(33, 1, 16), Chunks(33 * one, none, one, none), *pages, 0.0625)[0]


def noisy(kernels: Kernels) -> Tensor:
    """Both forms of the inverse, and each word of a block."""
    return kernels.noise(torch.arange(3), 129)


def centred(kernels: Kernels) -> Tensor:
    """What the three softmaxes found comes from the specification: a mutant has no logprob."""
    ids, ones = torch.arange(5), torch.ones(5)
    rows = [normal(5, 129, seed=seed) for seed in range(3)]
    p, q, b = (Softmax(x, *Reference().logprob(x, ids, ones)[2:4]) for x in rows)
    return torch.cat([kernels.centre(p, q, b, ids, ones, normal(5, seed=4), 0.5 * ones, 2.0 * ones, outside,
                                     torch.float32)[0] for outside in OUTSIDE])  # fmt: skip


def subnormal_sum(kernels: Kernels) -> Tensor:
    return kernels.sum(SUBNORMALS)


class ReversedSum(Reference):
    def matmul(self, x: Tensor, w: Packed, bias: Tensor | None = None, *, logits: bool = False) -> Tensor:
        return super().matmul(x.flip(1), self.pack(w.data.flip(1)), bias, logits=logits)


class FlushingProduct(Reference):
    """What the bf16 instruction does where its guard is skipped."""

    def matmul(self, x: Tensor, w: Packed, bias: Tensor | None = None, *, logits: bool = False) -> Tensor:
        y = super().matmul(x, w, bias, logits=logits)
        return torch.where(y.abs() < 2.0**-126, 0.0, y)


class FusedRotation(Reference):
    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        c, s = cos[positions][:, None], sin[positions][:, None]
        return torch.cat((float32.fma(x1, c, -(x2 * s)), float32.fma(x2, c, x1 * s)), dim=-1)


def tree_without_its_end(v: Tensor) -> Tensor:
    while v.shape[-1] > 1:
        low, high = v.chunk(2, dim=-1)
        v = low + high
    return v[..., 0]


@pytest.mark.parametrize(
    "mutant, look",
    [(ReversedSum(), product), (FlushingProduct(), tiny_product), (FusedRotation(), rotation)],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_mutant_of_the_specification_is_seen(mutant: Reference, look: Callable[[Kernels], Tensor]) -> None:
    assert differing(look(mutant), look(Reference())) > 0


def test_a_split_multiply_add_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = product(Reference())
    monkeypatch.setattr(float32, "fma", lambda a, b, c: a * b + c)
    assert differing(product(Reference()), expected) > 0


def test_a_missing_positive_zero_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = negative_zeros(Reference())
    monkeypatch.setattr(reference, "tree", tree_without_its_end)
    assert differing(negative_zeros(Reference()), expected) > 0


def test_a_flushed_subnormal_is_seen() -> None:
    expected = subnormal_sum(Reference())
    with flushing_denormals():  # Python cannot shield itself, the compiled kernels do
        flushed = subnormal_sum(Reference())
    assert differing(flushed, expected) > 0


class PartialLibrary:
    """A library of a few operations; the others are stand-ins that cannot be called."""

    def __init__(self, path: Path) -> None:
        self.loaded = ctypes.CDLL(str(path))

    def __getitem__(self, name: str) -> Any:
        return getattr(self.loaded, name, None) or SimpleNamespace()


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernels]:
    """build(isa, *operations, change=(file, old, new), flags=()): a few operations with one text replaced."""

    def build_some(
        isa: str, *operations: str, change: tuple[str, str, str] = ("", "", ""), flags: tuple[str, ...] = ()
    ) -> Kernels:
        if isa not in vexact_kernels.available():
            pytest.skip(f"this machine has no {isa}")
        file, old, new = change
        for source in SOURCES.iterdir():
            text = source.read_text()
            if source.name == file:
                assert text.count(old) == 1, f"{file} holds {old!r} {text.count(old)} times: adapt this mutant"
                text = text.replace(old, new)
            (tmp_path / source.name).write_text(text)
        some = tmp_path / "some.cpp"
        some.write_text("".join(f'#include "{name}.cpp"\n' for name in operations))
        library = tmp_path / "mutant.so"
        command = [os.environ.get("CXX", "c++"), *FLAGS, *SETS[isa], f"-DVX_ISA={isa}", *flags]
        subprocess.run([*command, str(some), "-o", str(library)], check=True)
        partial = PartialLibrary(library)
        monkeypatch.setattr(vexact_kernels.library, "library", lambda: partial)
        monkeypatch.setattr(vexact_kernels.cpu, "available", lambda: [isa])
        return Cpu(isa)

    return build_some


def test_the_unchanged_source_has_the_right_bits(build: Callable[..., Kernels]) -> None:
    """The control: what the mutants below are built from is right."""
    kernels = build("avx2", "sum", "rope", "matmul")
    for look in (product, tiny_product, underflowing_product, rotation, negative_zeros):
        assert differing(look(kernels), look(Reference())) == 0, look.__name__
    expected = subnormal_sum(Reference())
    with flushing_denormals():
        actual = subnormal_sum(kernels)
    assert differing(actual, expected) == 0


def test_a_reversed_sum_in_the_source_is_seen(build: Callable[..., Kernels]) -> None:
    ascending = "    Op::template step<R, C>(left, right, panel, sum);\n    left += left_step;\n    right += PANEL;\n"
    descending = "    Op::template step<R, C>(left + (step - 1) * left_step, right + (step - 1) * PANEL, panel, sum);\n"
    kernels = build("baseline", "matmul", change=("matmul_tile.h", ascending, descending))
    assert differing(product(kernels), product(Reference())) > 0


# An op, its comparison, and one change of its source: what it does instead is the name.
OPS = {
    "n is not rounded": ("rmsnorm", norm, "rmsnorm.cpp",
        "rounded(vmul(load(x + i, count), vset(rstd)), T{})", "vmul(load(x + i, count), vset(rstd))"),
    "s is not rounded": ("swiglu", gated, "swiglu.cpp",
        "rounded(vsilu(load(gate_up + i, count)), T{})", "vsilu(load(gate_up + i, count))"),
    "a tree of neighbours": ("logprob", partition, "simd.h",
        "v[i] = vadd(v[i], v[i + h]);", "v[i] = vadd(v[2 * i], v[2 * i + 1]);"),
    "p·v in descending order": ("attention", attended, "attention.h",
        "for (int64_t t = 0; t < steps; ++t) {", "for (int64_t t = steps - 1; t >= 0; --t) {"),
    "words of a block side by side": ("noise", noisy, "noise.cpp",
        "store(out + w * W, normal(words[w])", "store(out + w * W, normal(words[3 - w])"),
    "half a step is left out": ("noise", noisy, "noise.cpp", "iset((1 << 24) - 1)", "iset(1 << 24)"),
    "a draw's counter": ("noise", noisy, "noise.cpp", "iset(static_cast<int32_t>(NOISE))", "zero"),
    "half of the key": ("noise", noisy, "philox.h", "ixor(ixor(high_0, c[3]), k1)", "ixor(high_0, c[3])"),
    "the tail is not the nearer end": ("noise", noisy, "noise.cpp",
        "vsub(vset(0.5f), size)", "vsub(vset(0.5f), q)"),
    "no centre": ("centre", centred, "centre.cpp", "vset(w_id - total)", "vset(w_id)"),
    "c is rounded twice": ("centre", centred, "centre.cpp", "vfma(rest, share, qw)", "vadd(vmul(rest, share), qw)"),
    "the id has no weight": ("centre", centred, "centre.cpp", "vset(d_logprob * w_id)", "vset(d_logprob)"),
    "beyond a bound is nothing": ("centre", centred, "centre.cpp", "clamps ? greatest : nothing", "nothing"),
    "the ratio is the other way round": ("centre", centred, "centre.cpp",
        "vsub(vsub(x, vset(policy.log_sum)), vsub(y, vset(base.log_sum)))",
        "vsub(vsub(y, vset(base.log_sum)), vsub(x, vset(policy.log_sum)))"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_a_change_of_an_op_is_seen(build: Callable[..., Kernels], name: str) -> None:
    op, look, *change = OPS[name]
    expected = look(Reference())
    assert differing(look(Cpu("baseline")), expected) == 0, "the control"
    mutant = build("baseline", "sum", op, change=tuple(change))
    assert differing(look(mutant), expected) > 0


def test_contraction_by_the_compiler_is_seen(build: Callable[..., Kernels]) -> None:
    kernels = build("avx2", "sum", "rope", flags=("-ffp-contract=fast",))
    assert differing(rotation(kernels), rotation(Reference())) > 0


def test_a_dropped_positive_zero_in_the_source_is_seen(build: Callable[..., Kernels]) -> None:
    kernels = build("baseline", "matmul", change=("matmul.cpp", "vadd(v, vset(0.0f))", "v"))
    assert differing(underflowing_product(kernels), underflowing_product(Reference())) > 0


def test_a_kernel_that_keeps_the_callers_environment_is_seen(build: Callable[..., Kernels]) -> None:
    kernels = build("avx2", "sum", change=("parallel.h", "_mm_setcsr(0x1f80);", ""))
    expected = subnormal_sum(Reference())
    with flushing_denormals():
        flushed = subnormal_sum(kernels)
    assert differing(flushed, expected) > 0


def test_a_skipped_guard_of_the_bf16_instruction_is_seen(build: Callable[..., Kernels]) -> None:
    kernels = build("avx512bf16", "matmul", change=("matmul_pack.h", ">= -112;", ">= -1000;"))
    assert differing(tiny_product(kernels), tiny_product(Reference())) > 0
