"""Numbers rounded to few digits and widened again: elementwise, in float32, the same on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_LARGEST = 448.0
INT8_LARGEST, INT4_LARGEST = 127.0, 7.0  # symmetric: the lowest integer is not used


def e4m3(x: Tensor) -> Tensor:
    """float32 rounded to float8 e4m3 (three bits behind the point, down to 2^−9), to nearest even; ±448 at most."""
    # the clamp: versions of torch differ in what becomes of larger numbers
    return x.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).to(torch.float32)


def scaled_e4m3(x: Tensor) -> Tensor:
    """float32 [..., n]: with one scale for the last dimension, so that its largest value becomes 448."""
    scale = scales(x, E4M3_LARGEST)
    return e4m3(x / scale) * scale


def integers(x: Tensor, largest: float) -> Tensor:
    """float32 [..., n]: multiples of one scale for the last dimension, −largest … largest, to nearest even."""
    scale = scales(x, largest)
    return (x / scale).round().clamp(-largest, largest) * scale


def grouped(x: Tensor, largest: float, group: int) -> Tensor:
    """float32 [rows, columns]: `integers` with a scale for each group of that many columns; the last may be shorter."""
    whole = x.shape[1] // group * group
    first = integers(x[:, :whole].unflatten(1, (-1, group)), largest).flatten(1) if whole else x[:, :0]
    return torch.cat([first, integers(x[:, whole:], largest)], dim=1) if whole < x.shape[1] else first


def scales(x: Tensor, largest: float) -> Tensor:
    """The largest |x| over the last dimension, by `largest`; 1 where all are 0."""
    greatest = x.abs().amax(dim=-1, keepdim=True)
    return torch.where(greatest == 0, 1.0, greatest / largest)
