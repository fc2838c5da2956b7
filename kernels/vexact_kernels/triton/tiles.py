"""How outputs are cut into tiles, one table per type of GPU. No entry is searched for by timing.

In the portable profile a tile changes no bit: every output is one chain of fused multiply-adds. In the tensorcore
profile a product's constants are part of its arithmetic (`kernels/README.md`), and all sizes of a batch share them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Product:
    """rows × columns outputs a program, summed in steps of `depth` by `warps` warps, `stages` buffers in flight.

    `registers`: how many a thread may have. Where nothing is said ptxas spills some to fit one more block on a
    multiprocessor.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int = 2
    registers: int | None = None


@dataclass(frozen=True)
class Fold:
    """Attention with heads up to `width`: `rows` pairs (token, head) a program against keys.

    Scores in steps of `depth` over the head, then `keys` keys at a time onto the outputs.
    """

    width: int
    rows: int
    depth: int
    keys: int
    warps: int
    stages: int = 2
    columns: int = 256  # outputs of a head a program: where they are fewer, each program computes the scores
    registers: int | None = None  # as in `Product`


@dataclass(frozen=True)
class Tiles:
    """The constants of one type of GPU."""

    # Chains in registers. Few rows (decoding) take a flat tile, so that no lane works on rows that are not there.
    few: Product = Product(rows=16, columns=64, depth=32, warps=4)
    # Thirty-two outputs a thread, as many as steps of 16 leave room for, float32 gradients and float16 weights too.
    many: Product = Product(rows=64, columns=128, depth=16, warps=8)
    # Gradients of weights hold a lane and a total: half as many outputs a thread.
    streams: Product = Product(rows=64, columns=64, depth=16, warps=8, registers=255)
    # Matrix units. 64 rows are the fewest that reach wgmma on sm_90; decoding pads to them and stays on it.
    few_units: Product = Product(rows=64, columns=128, depth=64, warps=4, stages=4)
    many_units: Product = Product(rows=128, columns=128, depth=64, warps=8, stages=4)
    # Values of K that one accumulator of the matrix units takes before it is added to the running sum in float32. A
    # small batch gives each slice to a program of its own, to keep every multiprocessor busy; the order is the same.
    slice: int = 1024
    # Attention forward, chains in registers: few rows for short chunks (decoding), many for the others. Eight outputs
    # of wide heads a lane are what sm_90 and sm_100 hold without spilling.
    fold_few: tuple[Fold, ...] = (
        Fold(width=64, rows=16, depth=32, keys=32, warps=4),
        Fold(width=128, rows=16, depth=32, keys=16, warps=8),
        Fold(width=256, rows=16, depth=16, keys=16, warps=8),
    )
    fold_many: tuple[Fold, ...] = (
        Fold(width=64, rows=64, depth=16, keys=16, warps=8),
        Fold(width=128, rows=16, depth=32, keys=16, warps=8),
        Fold(width=256, rows=16, depth=16, keys=16, warps=8),
    )
    # On matrix units: 64 rows are the fewest that reach wgmma on sm_90. Decoding takes the same. Four warps
    # spill heads of 128.
    fold_units: tuple[Fold, ...] = (
        Fold(width=64, rows=64, depth=16, keys=64, warps=4),
        Fold(width=128, rows=64, depth=16, keys=64, warps=8),
        Fold(width=256, rows=64, depth=16, keys=64, warps=8, columns=128),
    )
    # Attention backward: dq is queries against blocks of keys, dk and dv are keys against blocks of queries.
    dq: tuple[Fold, ...] = (
        Fold(width=64, rows=32, depth=16, keys=32, warps=4, registers=200),
        Fold(width=128, rows=32, depth=32, keys=32, warps=8),
        Fold(width=256, rows=16, depth=32, keys=32, warps=8),
    )
    dk_dv: tuple[Fold, ...] = (
        Fold(width=64, rows=64, depth=16, keys=32, warps=8, registers=168),
        Fold(width=128, rows=32, depth=32, keys=32, warps=8, registers=255),
        Fold(width=256, rows=16, depth=32, keys=32, warps=8),
    )
    dq_units: tuple[Fold, ...] = (
        Fold(width=64, rows=64, depth=16, keys=64, warps=4),
        Fold(width=128, rows=64, depth=16, keys=32, warps=4),
        Fold(width=256, rows=64, depth=16, keys=32, warps=4, columns=128),
    )
    # Both sums in one program: two warpgroups hold them. Heads of 256 fill the shared memory with blocks of 64 queries.
    dk_dv_units: tuple[Fold, ...] = (
        Fold(width=128, rows=64, depth=16, keys=64, warps=8, registers=255),
        Fold(width=256, rows=64, depth=16, keys=32, warps=8, columns=128),
    )


TABLE = {
    # Shared memory of 164 KB holds three stages of 128 × 64 and 64 × 128 operands of two bytes twice over.
    (8, 0): Tiles(
        few_units=Product(rows=64, columns=128, depth=64, warps=4, stages=3),
        many_units=Product(rows=128, columns=128, depth=64, warps=8, stages=3),
        # 128 columns spill, and four warps do for groups of 8: mma.sync keeps more in registers.
        fold_units=(Fold(width=256, rows=64, depth=16, keys=64, warps=8, columns=64),),
        # Here ptxas spills with a number of registers and not without.
        dk_dv_units=(
            Fold(width=128, rows=64, depth=16, keys=64, warps=8),
            Fold(width=256, rows=64, depth=16, keys=32, warps=8, columns=128),
        ),
    ),
    (9, 0): Tiles(),
    # tcgen05 sums 64 and 128 rows by different instructions: 128 for every batch.
    (10, 0): Tiles(few_units=Product(rows=128, columns=128, depth=64, warps=8, stages=4)),
}


def options_of(tile: Product | Fold) -> dict[str, int | None]:
    """Triton's options of a launch."""
    return {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}


def fold_of(entries: tuple[Fold, ...], width: int) -> Fold:
    """The first entry that is wide enough for a head, or the last."""
    return next((entry for entry in entries if width <= entry.width), entries[-1])


def tiles_of(capability: tuple[int, int]) -> Tiles:
    """The table's entry, or that of the newest older type."""
    older = [known for known in TABLE if known <= capability]
    if not older:
        raise ValueError(f"a GPU of compute capability {capability[0]}.{capability[1]} is too old: 8.0 is needed")
    return TABLE[max(older)]


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; of the interpreter, that of an H100."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
