"""A device that does not exist, so that whatever is forgotten on the way to it is noticed on a machine without a GPU.

Its tensors hold CPU memory and compute on it, but say that they are on torch's device "meta", mix with host tensors no
more than a GPU's do, and count what the host reads of them. torch itself never computes on "meta", so a tensor that
says so and is not one of these was made without data. Stricter than a GPU in one point: host tensors that index are
refused, because torch would copy them on every use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from vexact_kernels import CPU, PORTABLE, Chunks, Kernels, Packed, Segments, Softmax, Stream

DEVICE = torch.device("meta")
aten = torch.ops.aten
CROSSING = {aten.copy_.default, aten._to_copy.default}  # the only ops whose tensors may lie on both sides
# Beside copies to the host: values, and shapes that follow from values, for which the host has to wait.
READING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
}


class OnDevice(Tensor):
    """A tensor of the pretended device around the memory that it lies in."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        assert held.device == CPU and not isinstance(held, OnDevice)
        self: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=DEVICE
        )
        self.held = held
        return self

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("a tensor of the pretended device has no numpy array: copy it to the host first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} on a tensor of the pretended device outside of it")


class Pretended(TorchDispatchMode):
    """Inside, torch knows the device. reads: how often the host has read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        mine = [x for x in tensors if isinstance(x, OnDevice)]
        asked = kwargs.get("device")
        to_device = bool(mine) if asked is None else asked.type == DEVICE.type
        check(func, tensors, crossing=func in CROSSING)
        if asked is not None and to_device:
            kwargs["device"] = CPU
        if func == aten.copy_.default:
            to_device = isinstance(args[0], OnDevice)
        self.reads += bool(mine) and (func in READING or not to_device or by_mask(func, args))
        result = func(*tree_map(held_by, args), **tree_map(held_by, kwargs))
        if not to_device:
            return result
        known = {id(x.held): x for x in mine}  # an op in place returns the very tensor that it was given
        return tree_map(lambda x: known[id(x)] if id(x) in known else made(x), result)


def check(func: Any, tensors: list[Tensor], crossing: bool) -> None:
    """Raise RuntimeError where host and device meet. torch takes single host values (0 dimensions) beside a GPU's."""
    if any(x.is_meta and not isinstance(x, OnDevice) and x.numel() for x in tensors):
        raise RuntimeError(f"{func}: a tensor was made on the pretended device without data")
    host = [x for x in tensors if not x.is_meta and x.dim() > 0]
    if host and any(x.is_meta for x in tensors) and not crossing:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {list(host[0].shape)} on cpu")


def by_mask(func: Any, args: Any) -> bool:
    """Whether an op takes the places where a mask is true, which the host has to count first."""
    return func in (aten.index.Tensor, aten.index_put_.default) and any(
        x is not None and x.dtype == torch.bool for x in args[1]
    )


def held_by(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_meta:
        return x.held if isinstance(x, OnDevice) else torch.empty_like(x, device=CPU)  # of no elements
    return x


class OnPretended:
    """Kernels of the pretended device: those of a CPU on the memory behind its tensors, and on no other."""

    def __init__(self, kernels: Kernels, profile: str = PORTABLE) -> None:
        self.kernels, self.device, self.profile = kernels, DEVICE, profile
        self.name = f"pretended:{kernels.name}"

    def __getattr__(self, op: str) -> Callable[..., Any]:
        function = getattr(self.kernels, op)

        def call(*args: Any, **options: Any) -> Any:
            held = [argument(op, x) for x in args]
            result = function(*held, **{name: argument(op, x) for name, x in options.items()})
            for outer, inner in zip(args, held, strict=True):
                if isinstance(outer, Stream):
                    outer.exact, outer.lane_is_zero = inner.exact, inner.lane_is_zero
                    outer.total_is_zero = inner.total_is_zero
            return tuple(map(made, result)) if isinstance(result, tuple) else made(result)

        return call


def argument(op: str, x: Any) -> Any:
    """What the CPU's kernels are given. Raises RuntimeError where a tensor is on the wrong side."""
    if isinstance(x, Chunks | Segments):
        if any(tensor.device != CPU for tensor in vars(x).values()):
            raise RuntimeError(f"{op}: the schedule belongs to the host")
        return x
    if isinstance(x, Packed):
        return replace(x, data=on_device(op, x.data))
    if isinstance(x, Stream):
        touched = None if x.touched is None else on_device(op, x.touched)
        return replace(x, lane=on_device(op, x.lane), total=on_device(op, x.total), touched=touched)
    if isinstance(x, Softmax):
        return Softmax(*(on_device(op, tensor) for tensor in vars(x).values()))
    return on_device(op, x) if isinstance(x, Tensor) else x


def on_device(op: str, x: Tensor) -> Tensor:
    """The memory behind a tensor of the device."""
    if not isinstance(x, OnDevice):
        raise RuntimeError(f"{op}: a tensor {list(x.shape)} is on {x.device}, and the kernels are not")
    return x.held


def made(x: Any) -> Any:
    if isinstance(x, Packed):
        return replace(x, data=OnDevice(x.data))
    return OnDevice(x) if isinstance(x, Tensor) else x
