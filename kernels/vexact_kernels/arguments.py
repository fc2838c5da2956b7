"""What the compiled kernels need of a tensor before its address may leave Python, checked cheaply."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import IntFlag

import torch
from torch import Tensor

from vexact_kernels.contract import DTYPES, OUTSIDE, PAGE, Chunks, Segments, Softmax, Stream

SMALL = 32  # up to here a Python list is quicker than a torch reduction


class DtypeCodes(dict[torch.dtype, int]):
    """The numbers that cpu/vexact.h gives to storage types."""

    def __missing__(self, dtype: torch.dtype) -> int:
        raise ValueError(f"{dtype} is not a storage type: float32, bfloat16, float16 are")


CODES = DtypeCodes({dtype: code for code, dtype in enumerate(DTYPES)})


class State(IntFlag):
    """What matmul_dw is told of a stream's buffers, and what it answers (cpu/vexact.h)."""

    EXACT_LANE = 1
    LANE_IS_ZERO = 2
    TOTAL_IS_ZERO = 4


def rows(x: Tensor) -> Tensor:
    """`strided_rows` of a tensor that has to be on the CPU."""
    if not x.is_cpu:
        raise ValueError(f"a tensor is on {x.device}: these kernels run on the CPU")
    return x if x.is_contiguous() else strided_rows(x)


def strided_rows(x: Tensor) -> Tensor:
    """x with everything behind its first dimension contiguous: itself wherever that is so already, else a copy."""
    inner = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != inner:
            return x.contiguous()
        inner *= size
    return x


def require(name: str, x: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Raise ValueError unless x has that dtype and shape."""
    if x.dtype != dtype or x.shape != shape:
        raise ValueError(f"{name} is {x.dtype} {list(x.shape)}, needed is {dtype} {list(shape)}")


def dense(name: str, x: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """x of that dtype and shape, contiguous."""
    require(name, x, dtype, shape)
    return x if x.is_contiguous() and x.is_cpu else rows(x).contiguous()


def buffer(name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
    """The address of a tensor that is written in place. Raises ValueError unless it is contiguous and fits."""
    require(name, x, dtype, shape)
    if not (x.is_cpu and x.is_contiguous()):
        raise ValueError(f"{name} is written in place and has to be contiguous on the CPU")
    return x.data_ptr()


def indices(name: str, x: Tensor, count: int, limit: int) -> Tensor:
    """int64 [count], contiguous. Raises IndexError naming the first value outside 0 … limit - 1."""
    x = dense(name, x, torch.int64, (count,))
    if count == 0:
        return x
    if count <= SMALL:
        values = x.tolist()
        lowest, highest = min(values), max(values)
    else:
        lowest, highest = (int(v) for v in torch.aminmax(x))
    if lowest < 0 or highest >= limit:
        first = next(v for v in x.tolist() if not 0 <= v < limit)
        raise IndexError(f"{name} {first} is outside 0 … {limit - 1}")
    return x


def heads(query: int, groups: int, size: int) -> None:
    """Raise ValueError unless attention's tiles fit: whole groups of query heads, sixteen values a vector."""
    if groups == 0 or query % groups:
        raise ValueError(f"{query} query heads are no multiple of {groups} key and value heads")
    if size % 16:
        raise ValueError(f"the head size of attention is {size}, needed is a multiple of 16")


def bounded(
    base: Softmax | None, low: Tensor | None, high: Tensor | None, outside: str
) -> tuple[Tensor, Tensor] | None:
    """The bounds of centre's ratio, None without a base. Raises ValueError unless the four go together."""
    if outside not in OUTSIDE:
        raise ValueError(f"outside is {outside!r}: a ratio beyond its bounds can {' or '.join(OUTSIDE)}")
    given = [name for name, x in (("low", low), ("high", high)) if x is not None]
    if base is None and given:
        raise ValueError(f"centre has the bound {' and '.join(given)} and no base that makes a ratio")
    if base is not None and len(given) < 2:
        raise ValueError("centre has a base and needs both bounds of the ratio to it, low and high")
    return None if low is None or high is None else (low, high)


def segments(parts: Segments, tokens: int) -> tuple[int, Tensor, Tensor]:
    """Number of segments, ends, fold. Raises ValueError unless the ends ascend to the number of tokens."""
    n = len(parts.ends)
    ends = dense("segments.ends", parts.ends, torch.int64, (n,))
    fold = dense("segments.fold", parts.fold, torch.uint8, (n,))
    values = [0, *ends.tolist()]
    if values[-1] != tokens or any(a > b for a, b in itertools.pairwise(values)):
        raise ValueError(f"segments.ends {values[1:]} do not ascend to the {tokens} tokens of the batch")
    return n, ends, fold


def state_of(stream: Stream) -> int:
    """The stream's flags as cpu/vexact.h numbers them."""
    return (
        stream.exact * State.EXACT_LANE
        | stream.lane_is_zero * State.LANE_IS_ZERO
        | stream.total_is_zero * State.TOTAL_IS_ZERO
    )


def keep_state(stream: Stream, state: int) -> None:
    """Set the stream's flags from that number."""
    stream.exact = bool(state & State.EXACT_LANE)
    stream.lane_is_zero = bool(state & State.LANE_IS_ZERO)
    stream.total_is_zero = bool(state & State.TOTAL_IS_ZERO)


def starts(chunks: Chunks, tokens: int) -> list[int]:
    """chunks.start as a list. Raises ValueError unless it ascends from 0 to the number of tokens."""
    sequences = chunks.prefix.size(0)
    require("chunks.start", chunks.start, torch.int64, (sequences + 1,))
    require("chunks.prefix", chunks.prefix, torch.int64, (sequences,))
    start: list[int] = chunks.start.tolist()
    if start[0] != 0 or start[-1] != tokens or any(a > b for a, b in itertools.pairwise(start)):
        raise ValueError(f"chunks.start {start} does not ascend from 0 to the {tokens} tokens of the batch")
    return start


def pages(chunks: Chunks, tokens: int, limit: int) -> None:
    """Raise ValueError or IndexError unless every token of the chunks has its place in one of `limit` pages."""
    start, prefix = starts(chunks, tokens), chunks.prefix.tolist()
    require("chunks.table_start", chunks.table_start, torch.int64, (len(prefix) + 1,))
    first: list[int] = chunks.table_start.tolist()
    for s, before in enumerate(prefix):
        held, length = first[s + 1] - first[s], before + start[s + 1] - start[s]
        if before < 0 or first[s] < 0 or first[s + 1] > len(chunks.table) or held * PAGE < length:
            raise ValueError(f"sequence {s} of the batch has {held} pages for {length} tokens")
    indices("page", chunks.table, len(chunks.table), limit)
    for name in ("start", "prefix", "table_start", "table"):
        part: Tensor = getattr(chunks, name)
        if not (part.is_cpu and part.is_contiguous()):
            raise ValueError(f"chunks.{name} has to be contiguous on the CPU")
