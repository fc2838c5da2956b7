"""Triton's interpreter, made to compute what the hardware would.

As it comes (triton 3.9) it truncates float32 to bfloat16, reads bfloat16 subnormals wrongly, and multiplies bfloat16
operands of a dot as integers. What is replaced here is checked by `kernels/triton/test_interpreter.py`.
Import this module before any kernel is decorated: Triton reads TRITON_INTERPRET then.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton.runtime import interpreter

import vexact_kernels
from vexact_kernels.contract import Segments, Stream
from vexact_kernels.cpu import Cpu

Handle = interpreter.TensorHandle
FLOATS = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}
_cpu = Cpu(vexact_kernels.available()[0])
REPLACED = ("cast_impl", "create_dot")
_patch: Any = interpreter._patch_lang
_scopes: list[Any] = []
_run = interpreter.InterpretedFunction.run
SHIPPED = {name: getattr(interpreter.InterpreterBuilder, name) for name in REPLACED}


def floats(handle: Any) -> torch.Tensor:
    """A handle's values as a tensor of its own dtype. The interpreter keeps bfloat16 as uint16."""
    data = np.ascontiguousarray(handle.data)
    kind = FLOATS[handle.dtype.scalar]
    return torch.from_numpy(data.view(np.int16)).view(kind) if kind == torch.bfloat16 else torch.from_numpy(data)


def handle_of(x: torch.Tensor, kind: Any) -> Any:
    """The other way round."""
    return Handle(x.view(torch.int16).numpy().view(np.uint16) if kind == tl.bfloat16 else x.numpy(), kind)


def cast(builder: Any, source: Any, target: Any) -> Any:
    """Between storage types: exact, or rounded once to nearest even. Everything else as it was."""
    kind = target.scalar
    if source.dtype.scalar in FLOATS and kind in FLOATS:
        return handle_of(floats(source).to(FLOATS[kind], copy=True), kind)
    return SHIPPED["cast_impl"](builder, source, target)


def fp_to_fp(builder: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """What a cast with a rounding of its own calls."""
    raise NotImplementedError("kernels round to nearest even alone")


def dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """d + a·b as one chain of fused multiply-adds an output, k ascending, on operands widened to float32.

    The matrix units' own order is not public: in the tensorcore profile this stands for it.
    """
    assert d.dtype.scalar == tl.float32, "an accumulator is float32"
    left, right = (floats(x).to(torch.float32).contiguous() for x in (a, b))
    lane = floats(d).clone().contiguous()
    one = Segments(torch.tensor([left.shape[1]]), torch.zeros(1, dtype=torch.uint8))
    _cpu.matmul_dw(left.T.contiguous(), right, one, Stream(lane, torch.empty_like(lane)))
    return Handle(lane.numpy(), tl.float32)


def run(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A launch. What overflows or is not a number is no news to a kernel."""
    with np.errstate(all="ignore"):
        return _run(function, *args, **kwargs)


def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A device function inside a kernel. The language is patched already; doing it again takes milliseconds."""
    return function.rewrite()(*args, **kwargs)


def patched_once(function: Any) -> Any:
    """Triton patches its language for each launch and takes that back, which costs more than most launches."""
    if not _scopes:
        _scopes.append(_patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core})))
    return interpreter._LangPatchScope()  # nothing to take back


interpreter._patch_lang = patched_once
interpreter.InterpreterBuilder.cast_impl = cast
interpreter.InterpreterBuilder.create_fp_to_fp = fp_to_fp
interpreter.InterpreterBuilder.create_dot = dot
interpreter.InterpretedFunction.run = run
interpreter.InterpretedFunction.__call__ = call
