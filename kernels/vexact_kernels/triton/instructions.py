"""The PTX instructions that a kernel may hold, and the reading of what a compiler made.

Instructions are allowed by a list; anything the list does not know is reported by its name. What it lets through on
floating-point data is correctly rounded and keeps subnormals, so that its result is given by its operands. Integers,
memory and moves are free: they cannot round. What the list cannot see is which operands meet.
"""

from __future__ import annotations

import re
from collections import Counter

INTEGER = r"(s|u|b)(8|16|32|64)"
COMPARE = r"(eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan)"
SPACE = r"(global|shared(::cta)?|param|local|const)"

# On float data: one rounding to nearest even, or none. No .ftz, no .approx, no other rounding, nothing on 16 bits.
FLOATS = (
    r"(fma|add|sub|mul)\.rn\.f32(x2)?",
    r"(fma|add|sub)\.rn\.f32\.(bf16|f16)",  # 16-bit operands, widened to float32 exactly by the instruction itself
    r"(div|sqrt)\.rn\.f32",
    r"(max|min)(\.NaN)?\.f32",
    r"(neg|abs)\.f32",
    rf"setp\.{COMPARE}\.f32",
    r"(selp|mov)\.f32",
    r"cvt\.rn\.(bf16|f16)(x2)?\.f32",
    r"cvt\.f32\.(bf16|f16)",
    r"cvt\.rn\.f32\.(s|u)(32|64)",
    r"cvt\.rzi\.(s|u)(32|64)\.f32",
)
OTHERS = (
    rf"(add|sub|mul|mad)(\.(lo|hi|wide))?(\.cc)?\.{INTEGER}",
    rf"(addc|subc)(\.cc)?\.{INTEGER}",
    rf"(div|rem|min|max|neg|abs|and|or|xor|not|cnot|shl|shr|bfe|bfi|brev|clz|popc|mov|selp)\.({INTEGER}|pred)",
    r"(lop3|prmt)\.b32",
    r"shf\.(l|r)\.(wrap|clamp)\.b32",
    rf"setp\.{COMPARE}(\.and|\.or)?\.{INTEGER}",
    rf"cvt\.{INTEGER}\.{INTEGER}",
    rf"cvta(\.to)?\.{SPACE}\.u64",
    rf"(ld|st)(\.volatile)?\.{SPACE}(\.(nc|L1::[a-z_]+|L2::[a-z_0-9]+))*(\.v[248])?\.{INTEGER}",
    r"cp\.async\.(ca|cg)\.shared\.global(\.L2::[a-z_0-9]+)*",
    r"cp\.async\.(commit_group|wait_group|wait_all)",
    r"(ld|st)matrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16",
    r"shfl\.sync\.(idx|bfly|up|down)\.b32",
    r"redux\.sync\.((add|min|max)\.(s|u)32|(min|max)(\.NaN)?\.f32)",  # the largest of floats: order-free
    r"vote\.sync\.(any|all|ballot)\.(pred|b32)",
    r"bar\.(warp\.)?sync|barrier\.sync",
    r"bra(\.uni)?",
    r"ret",
)
# The tensorcore profile's products: 16-bit operands, float32 sums. TF32 (.tf32, kind::tf32) is not among them.
UNITS = (
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16\.bf16|f16\.f16)\.f32",
    r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.(bf16\.bf16|f16\.f16)",
    r"wgmma\.(fence|commit_group|wait_group)\.sync\.aligned",
    r"tcgen05\.mma\.cta_group::1\.kind::f16",
    r"tcgen05\.(alloc|dealloc|relinquish_alloc_permit)\..*b32|tcgen05\.relinquish_alloc_permit\..*",
    r"tcgen05\.(ld|st|wait|commit|fence|cp)\b.*",
    r"mbarrier\..*",
    r"fence\..*",
    r"elect\.sync",
)

PORTABLE = re.compile("|".join((*FLOATS, *OTHERS)))
TENSORCORE = re.compile("|".join((*FLOATS, *OTHERS, *UNITS)))
STATEMENT = re.compile(r"(?:^|[;{}:])\s*(?:@!?%p\d+\s+)?([a-z][a-zA-Z0-9_.:]*)(?=[\s;])", re.MULTILINE)


def counts(ptx: str) -> Counter[str]:
    """How often each instruction stands in the bodies of a PTX text."""
    text = re.sub(r"//[^\n]*|\"[^\"]*\"", "", ptx)
    bodies = text[text.index("{") :]
    return Counter(match[1] for match in STATEMENT.finditer(bodies))


def forbidden(ptx: str, units: bool = False) -> dict[str, int]:
    """The instructions that the list does not allow, and how often each occurs. units: the matrix units are allowed."""
    allowed = TENSORCORE if units else PORTABLE
    return {op: count for op, count in counts(ptx).items() if not allowed.fullmatch(op)}
