"""A reader of Triton's own intermediate form (TTIR): what a kernel computes, before layouts, threads and instructions.

Two questions are asked of it. Which operations round: `forbidden` allows by a list, on float32 alone, and no reduction
or scan over floats but a maximum. And whether two variants of a kernel compute the same: `stored` gives for every
store, and for every loop and branch that depends on floats, the tree of all operations on floats behind it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256

# On float32 only: each rounds once, to nearest even, or not at all.
ROUNDING = r"arith\.(addf|subf|mulf)|math\.fma|tt\.(precise_divf|precise_sqrt)"
EXACT = (
    r"arith\.(negf|cmpf|select|bitcast|maxnumf|minnumf|maximumf|minimumf|extf|truncf|sitofp|uitofp|fptosi|fptoui|constant)"
    r"|math\.absf|tt\.(load|store|splat|broadcast|expand_dims|reshape|trans|split|join|bitcast|fp_to_fp|unsplat|gather|call)"
    r"|ub\.poison|scf\.\w+"
)
DOT = r"tt\.dot"
REGION = r"tt\.(reduce|scan)"  # judged by the operation inside
FLOAT = re.compile(r"(?<![a-wyzA-Z_0-9%])(?:bf16|f16|f32|f64|f8\w*)\b")
OPERATION = re.compile(r"^\s*(?:(%[\w:, %]+?)\s*=\s*)?\"?([a-z_]+\.[a-z_]+(?:\.\w+)*)\"?(.*)$")
# The shape of a value is left out where a constant argument may change how it is written.
# How many of the first operands may change places: a constant argument can turn them round.
COMMUTE = {"arith.addf": 2, "arith.mulf": 2, "math.fma": 2, "arith.maxnumf": 2, "arith.addi": 2}
LEAF = "leaf"
SHAPELESS = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.unsplat")


@dataclass(frozen=True)
class Operation:
    """One line: names that it gives, its own name, and the rest of the line."""

    results: tuple[str, ...]
    name: str
    rest: str

    @property
    def type(self) -> str:
        """The type behind the last arrow, or behind the last colon."""
        text = re.sub(r"\s*(loc\(.*\)|\{)\s*$", "", self.rest)
        return (text.rsplit("->", 1) if "->" in text else text.rsplit(" : ", 1))[-1].strip()

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%[\w]+(?:#\d+)?", self.rest)


def operations(text: str) -> Iterator[Operation]:
    for line in text.splitlines():
        match = OPERATION.match(line)
        if match and not line.lstrip().startswith("#"):
            names = tuple(name.strip() for name in (match[1] or "").split(",") if name.strip())
            yield Operation(names, match[2], match[3])


def forbidden(text: str, units: bool = False) -> Counter[str]:
    """Operations on floats that are not allowed; with `units` a product may take 16-bit operands."""
    found: Counter[str] = Counter()
    for one in operations(text):
        if one.name.startswith("tt.atomic"):
            found[one.name] += 1
        elif not FLOAT.search(one.rest) or one.name in ("tt.func", "tt.return", "tt.addptr"):
            continue
        elif re.fullmatch(ROUNDING, one.name):
            kinds = set(FLOAT.findall(one.rest)) - {"f32"}
            if kinds:
                found[f"{one.name} on {', '.join(sorted(kinds))}"] += 1
        elif re.fullmatch(DOT, one.name):
            found.update(wrong_dot(one, units))
        elif not re.fullmatch(f"{EXACT}|{REGION}", one.name) and not returns(one):
            found[one.name] += 1
    for name, inside in regions(text):
        bad = inside - {"arith.maxnumf", "arith.minnumf", "arith.maximumf", "arith.minimumf"}
        if bad:
            found[f"{name} over floats by {', '.join(sorted(bad))}"] += 1
    return found


def returns(one: Operation) -> bool:
    return one.name in ("tt.reduce.return", "tt.scan.return")


def wrong_dot(one: Operation, units: bool) -> Iterator[str]:
    if "inputPrecision" in one.rest and "inputPrecision = ieee" not in one.rest:
        yield f"tt.dot in {one.rest.split('inputPrecision =')[1].split()[0].strip(',')}"
    kinds = FLOAT.findall(one.type if "->" not in one.rest else one.rest.rsplit(" : ", 1)[-1])
    if kinds[-1] != "f32" or (not units and set(kinds) != {"f32"}):
        yield f"tt.dot on {', '.join(sorted(set(kinds)))}"


def regions(text: str) -> Iterator[tuple[str, set[str]]]:
    """Reductions and scans over floats: the name, and the operations of their combination that touch floats."""
    for match in re.finditer(r"\"(tt\.(?:reduce|scan))\".*?\n(.*?)tt\.(?:reduce|scan)\.return", text, re.S):
        inside = [
            one for one in operations(match[2]) if FLOAT.search(one.rest) and one.name.startswith(("arith", "math"))
        ]
        if any(one.name not in ("arith.cmpf", "arith.select") for one in inside):
            yield match[1], {one.name for one in inside} - {"arith.cmpf", "arith.select"}


def dots(text: str) -> list[tuple[int, int, int]]:
    """M, N and K of each product, as often as it is written."""
    found = []
    for one in operations(text):
        if one.name == "tt.dot":
            a, b, _ = re.findall(r"tensor<(?:\d+x)*?(\d+)x(\d+)x\w+>", one.rest)
            found.append((int(a[0]), int(b[1]), int(a[1])))
    return found


def without_marks(text: str) -> str:
    """The text without what is known of arguments, and without places in the source."""
    text = re.sub(r"\s*\{tt\.divisibility = 16 : i32\}", "", text)
    text = re.sub(r" loc\([^()]*(?:\([^()]*\))?[^()]*\)", "", text)
    return "\n".join(line for line in text.splitlines() if not line.startswith("#loc"))


def stored(text: str) -> Counter[str]:
    """A digest of the tree of operations behind every stored value that is a float or was made of floats.

    A loop's variable stands for what it starts with and its result for what its last round leaves, so that a loop of
    one round and its body alone are the same. Loads, constants and floats made of integers are leaves, and all leaves
    are the same: where a mask is known to be false a load becomes its pad. Which address is loaded is not followed.
    """
    flow = Flow()
    for line in text.splitlines():
        flow.take(line)
    return flow.ends


@dataclass
class Region:
    """What stands in braces: the operation that it belongs to, and the values that its parts have yielded."""

    name: str
    results: tuple[str, ...]
    yielded: list[list[str]] = field(default_factory=list)


class Flow:
    """Follows floats through a kernel, a line at a time. `known`: the digest of each value that depends on floats."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.open: list[Region] = []
        self.ends: Counter[str] = Counter()

    def take(self, line: str) -> None:
        line = re.sub(r" loc\(.*\)$", "", line).strip()
        if line.startswith("}") and not line.endswith("{"):
            self._close(self.open.pop())
            return
        one = next(operations(line), None)
        if line.endswith("{") and not line.startswith("}"):
            self.open.append(Region(one.name if one else "", one.results if one else ()))
        if one is None:
            return
        if one.name in ("scf.for", "scf.while"):
            for name, start in re.findall(r"(%\w+) = (%[\w#]+)", one.rest.split("iter_args", 1)[-1]):
                self.known[name] = self.known.get(start, "")
        elif one.name in ("scf.yield", "scf.condition"):
            self.open[-1].yielded.append([self.known.get(name, "") for name in one.operands])
        elif one.name not in ("module", "tt.func", "tt.return", "scf.if"):
            self._operation(one)

    def _close(self, region: Region) -> None:
        """The results of a loop or a branch."""
        if not region.name.startswith("scf.") or not region.yielded:
            return
        names = [n for result in region.results for n in numbered(result)]
        last = region.yielded[-2:] if region.name == "scf.if" else region.yielded[-1:]
        for name, *values in zip(names, *last, strict=False):
            self.known[name] = values[0] if len(set(values)) == 1 else digest("if", *values)

    def _operation(self, one: Operation) -> None:
        names = [n for result in one.results for n in numbered(result)]
        operands = [self.known[name] for name in one.operands if self.known.get(name)]
        value = self._value(one, operands)
        if one.name == "tt.store" and operands:
            self.ends[digest(*operands)] += 1
        for at, name in enumerate(names):  # names are used again where another region ended
            self.known[name] = digest(value, str(at)) if value and len(names) > 1 else value

    def _value(self, one: Operation, operands: list[str]) -> str:
        """The digest of an operation's result, empty where no float is in it."""
        kinds = FLOAT.findall(one.type)
        if one.name == "tt.load":
            return LEAF if kinds else ""
        if one.name == "arith.constant" and kinds:
            return LEAF
        if "!tt.ptr" in one.type or not (operands or kinds):
            return ""
        if not operands:
            return LEAF  # made of an integer argument
        if one.name in SHAPELESS or (one.name == "tt.reshape" and same_but_for_ones(one.rest)):
            return operands[0]
        swap = COMMUTE.get(one.name, 0)
        attributes = re.sub(r"%[\w#]+", "", one.rest.split(" : ")[0])
        return digest(one.name, attributes, one.type, *sorted(operands[:swap]), *operands[swap:])


def same_but_for_ones(rest: str) -> bool:
    """Whether a reshape only adds or takes away dimensions of 1, which is left out where it undoes another one."""
    before, after = (re.findall(r"(?<![\dx])(\d+(?:x\d+)*)x", part)[-1].split("x") for part in rest.rsplit("->", 1))
    return [n for n in before if n != "1"] == [n for n in after if n != "1"]


def numbered(result: str) -> list[str]:
    """The names under which results are used: %a:2 as %a#0 and %a#1."""
    base, _, count = result.partition(":")
    return [f"{base}#{i}" for i in range(int(count))] if count else [base]


def digest(*parts: str) -> str:
    return sha256("\0".join(parts).encode()).hexdigest()[:16]
