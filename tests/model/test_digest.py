"""The arithmetic digest names the arithmetic: equal wherever the contract is kept, another where one bit moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vexact.model.digest import arithmetic_digest
from vexact_kernels import Kernels, available, load

# A change here is a change of the contract: it needs a new CONTRACT_VERSION and a commit of its own.
GOLDEN = {
    torch.float32: "bb11f75d27b4b6fb",
    torch.bfloat16: "18f827ed7586d4dc",
    torch.float16: "8ec5328fb7008a0f",
}


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
            first: Tensor = result[0] if isinstance(result, tuple) else result
            bits = first.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[first.itemsize])
            bits[tuple(0 for _ in bits.shape)] ^= 1
            return result

        return wrong


@pytest.mark.parametrize(
    "op",
    [
        *("matmul", "matmul_dx", "rmsnorm", "rmsnorm_dx", "rope", "attention", "attention_backward"),
        *("swiglu", "add", "logprob", "logprob_backward", "draw"),
    ],
)
def test_one_wrong_bit_in_any_op_is_another_digest(op: str) -> None:
    mutant = _Mutant(load("cpu"), op)
    assert arithmetic_digest(mutant, torch.float32) != GOLDEN[torch.float32]
