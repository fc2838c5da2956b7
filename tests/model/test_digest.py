"""The arithmetic digest names the arithmetic: equal wherever the contract is kept, another where one bit moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import INTEGERS
from vexact.model.digest import arithmetic_digest
from vexact_kernels import Kernels, Packed, Stream, available, load

# A change here is a change of the contract: it needs a new CONTRACT_VERSION and a commit of its own. But for a new op,
# whose probe is put behind the others: then golden.json shows that what was there has kept its bits.
GOLDEN = {
    torch.float32: "212518a683134145",
    torch.bfloat16: "38096f498d47c83d",
    torch.float16: "998bfb901cbecbde",
}
OPS = sorted(name for name, value in vars(Kernels).items() if callable(value) and not name.startswith("_"))


@pytest.mark.parametrize("dtype", GOLDEN, ids=str)
@pytest.mark.parametrize("implementation", ["reference", *available()])
def test_every_implementation_has_the_golden_digest(implementation: str, dtype: torch.dtype) -> None:
    kernels = load("reference") if implementation == "reference" else load("cpu", implementation)
    assert arithmetic_digest(kernels, dtype) == GOLDEN[dtype]


class _Mutant:
    """Another implementation that differs in the last bit of one element of one op."""

    def __init__(self, kernels: Kernels, op: str) -> None:
        self._kernels, self._op = kernels, op
        self.name = f"{kernels.name} with a wrong {op}"

    def __getattr__(self, op: str) -> object:
        function = getattr(self._kernels, op)
        if op != self._op:
            return function

        def wrong(*args: object, **options: object) -> object:
            result = function(*args, **options)
            _written(result, args)[(0,)] ^= 1
            return result

        return wrong


def _written(result: object, args: tuple[object, ...]) -> Tensor:
    """The bits [n] of the first tensor that an op wrote: a result, a stream's total, or the master weights."""
    if isinstance(result, tuple):
        result = result[0]
    if result is None:
        result = next((arg.total for arg in args if isinstance(arg, Stream)), args[0])
    if isinstance(result, Packed):
        result = result.data
    assert isinstance(result, Tensor)
    return result.view(-1).view(INTEGERS[result.itemsize])


def test_the_ops_are_those_of_the_interface() -> None:
    assert len(OPS) == 28
    assert {"pack", "matmul_db", "adamw", "draw", "sum_squares"} <= set(OPS)


@pytest.mark.parametrize("dtype", GOLDEN, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_one_wrong_bit_in_any_op_is_another_digest(op: str, dtype: torch.dtype) -> None:
    assert arithmetic_digest(_Mutant(load("cpu"), op), dtype) != GOLDEN[dtype]
