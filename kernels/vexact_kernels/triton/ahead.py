"""What the host code would start, compiled ahead of time for GPUs that this machine does not have.

A `Collector` takes the place of `launch.Start`: the host code runs on CPU tensors and each launch is kept instead of
started. Types and specialisations are found by Triton's own code for a launch, so what is compiled here is what a GPU
would be given.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton
import triton.backends.nvidia
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# gfx942 has no entry among the tiles: it takes those of the smallest shared memory, only to show that it compiles.
CAPABILITY = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "gfx942": (8, 0)}
Constants = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Variant:
    """A kernel with the types of its arguments, its constants, the arguments that 16 divides, and its options.

    `origin`: "launched", or how the variant was made of a launched one: "undivided", "ones", "one NAME".
    """

    module: str
    name: str
    types: tuple[tuple[str, str], ...]
    constants: Constants
    divisible: frozenset[str]
    options: Constants
    origin: str = field(default="launched", compare=False)

    def source(self) -> ASTSource:
        kernel = getattr(import_module(self.module), self.name)
        at = {name: (i,) for i, (name, _) in enumerate(self.types)}
        return ASTSource(
            kernel,
            signature=dict(self.types),
            constexprs={at[name]: value for name, value in self.constants},
            attrs={at[name]: [["tt.divisibility", 16]] for name in sorted(self.divisible)},
        )

    def undivided(self) -> Variant:
        """Nothing is known to be divisible by 16."""
        return replace(self, divisible=frozenset(), origin="undivided")

    def ones(self) -> Iterator[Variant]:
        """Each integer argument equal to one, which makes it a constant; then all of them."""
        integers = [name for name, kind in self.types if kind in ("i32", "i64")]
        for name in integers:
            yield self._with_ones([name], f"one {name}")
        if len(integers) > 1:
            yield self._with_ones(integers, "ones")

    def _with_ones(self, names: list[str], origin: str) -> Variant:
        return replace(
            self,
            types=tuple((n, "constexpr" if n in names else kind) for n, kind in self.types),
            constants=(*self.constants, *((n, 1) for n in names)),
            divisible=self.divisible - set(names),
            origin=origin,
        )


class Collector:
    """Keeps launches for one target, each variant once, with the uses that led to it. `use` is set by the caller."""

    def __init__(self, target: str) -> None:
        self.backend = make_backend(TARGETS[target])
        self.use: Any = None
        self.found: dict[Variant, list[Any]] = {}

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        uses = self.found.setdefault(self._variant(kernel, arguments, options), [])
        if self.use not in uses:
            uses.append(self.use)

    def _variant(self, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Variant:
        if not isinstance(kernel, JITFunction):
            raise TypeError("kernels are interpreted here (TRITON_INTERPRET is set): these cannot be compiled")
        bound, specialisation, rest = binder(kernel, self.backend)(*arguments, **options)
        kinds = [kind for kind, _ in specialisation]
        for name, kind in zip(bound, kinds, strict=True):
            if not isinstance(kind, str):
                raise TypeError(f"argument {name} of {kernel.__name__} is a {kind}: only tensors and numbers are known")
        return Variant(
            module=kernel.__module__,
            name=kernel.__name__,
            types=tuple(zip(bound, kinds, strict=True)),
            constants=tuple((n, v) for (n, v), kind in zip(bound.items(), kinds, strict=True) if kind == "constexpr"),
            divisible=frozenset(
                n for n, (kind, mark) in zip(bound, specialisation, strict=True) if kind != "constexpr" and mark == "D"
            ),
            options=tuple(sorted(rest.items())),
        )


@cache
def binder(kernel: Any, backend: Any) -> Any:
    """Triton's own reading of a launch's arguments."""
    return create_function_from_signature(kernel.signature, kernel.params, backend)


@dataclass(frozen=True)
class Built:
    """What the compiler made of a variant for one target. `local`: bytes of local memory a thread, 0 without spills."""

    target: str
    ir: str
    assembly: str
    registers: int
    local: int
    shared: int


def compiled(variant: Variant, target: str, **options: Any) -> Built:
    """Compile to the machine's code, as `launch.Start` has it compiled. `options` overrides options of the launch."""
    options = {"enable_fp_fusion": False, **dict(variant.options), **options}
    kernel = triton.compile(variant.source(), target=TARGETS[target], options=options)
    if TARGETS[target].backend == "hip":
        text = kernel.asm["amdgcn"]
        registers, spilled = figure(text, ".vgpr_count:"), figure(text, ".vgpr_spill_count:")
        return Built(target, kernel.asm["ttir"], text, registers, 4 * spilled, kernel.metadata.shared)
    registers, local = resources(kernel.asm["cubin"])
    return Built(target, kernel.asm["ttir"], kernel.asm["ptx"], registers, local, kernel.metadata.shared)


def figure(text: str, name: str) -> int:
    """The number behind a name in assembly."""
    return int(text.split(name, 1)[1].split(maxsplit=1)[0])


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread, as the machine's code itself has them."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    use = dict(part.rsplit(":", 1) for line in said.splitlines() if "REG:" in line for part in line.split())
    return int(use["REG"]), int(use["STACK"]) + int(use["LOCAL"])


def triton_ir(variant: Variant, target: str) -> str:
    """Triton's own intermediate form alone, which takes milliseconds: what the program computes, before any layout."""
    backend = make_backend(TARGETS[target])
    options = backend.parse_options({"enable_fp_fusion": False, **dict(variant.options)})
    stages: dict[str, Any] = {}
    source = variant.source()
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(options)
    module = source.make_ir(TARGETS[target], options, codegen, backend.get_module_map(), context)
    return str(stages["ttir"](module, {}))
