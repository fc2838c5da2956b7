"""What the C++ kernels make of rows of logits, and random numbers: logprob, centre, draw, noise. A part of `cpu.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vexact_kernels.arguments import CODES, bounded, dense, indices, require, rows
from vexact_kernels.contract import CLAMP, Softmax, grad_dtype


class CpuLogits:
    """logprob, logprob_backward, centre, draw and noise of `contract.Kernels`."""

    _c: Any  # the C functions of the instruction set

    def logprob(
        self, logits: Tensor, ids: Tensor, temperature: Tensor, *, entropy: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        n, vocabulary = logits.shape
        require("logits", logits, torch.float32, (n, vocabulary))
        logits, ids = rows(logits), indices("token id", ids, n, vocabulary)
        temperature = dense("temperature", temperature, torch.float32, (n,))
        logprob, max_, sum_ = (torch.empty(n, dtype=torch.float32) for _ in range(3))
        entropies = torch.empty(n, dtype=torch.float32) if entropy else None
        finite = torch.empty(n, dtype=torch.bool)
        self._c.logprob(
            n, vocabulary, logits.data_ptr(), logits.stride(0), ids.data_ptr(), temperature.data_ptr(),
            logprob.data_ptr(), None if entropies is None else entropies.data_ptr(), max_.data_ptr(), sum_.data_ptr(),
            finite.data_ptr(),
        )  # fmt: skip
        return logprob, entropies, max_, sum_, finite

    def logprob_backward(
        self,
        logits: Tensor,
        ids: Tensor,
        temperature: Tensor,
        max_: Tensor,
        sum_: Tensor,
        entropy: Tensor | None,
        d_logprob: Tensor,
        d_entropy: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        n, vocabulary = logits.shape
        require("logits", logits, torch.float32, (n, vocabulary))
        logits, ids = rows(logits), indices("token id", ids, n, vocabulary)
        named = {"temperature": temperature, "max": max_, "sum": sum_, "d_logprob": d_logprob}
        temperature, max_, sum_, d_logprob = (dense(key, x, torch.float32, (n,)) for key, x in named.items())
        entropy_at = d_entropy_at = None
        if d_entropy is not None:
            if entropy is None:
                raise ValueError("a gradient of the entropy needs the entropy")
            entropy = dense("entropy", entropy, torch.float32, (n,))
            d_entropy = dense("d_entropy", d_entropy, torch.float32, (n,))
            entropy_at, d_entropy_at = entropy.data_ptr(), d_entropy.data_ptr()
        d_logits = torch.empty(n, vocabulary, dtype=grad_dtype(dtype))
        self._c.logprob_backward(
            CODES[dtype], n, vocabulary, logits.data_ptr(), logits.stride(0), ids.data_ptr(), temperature.data_ptr(),
            max_.data_ptr(), sum_.data_ptr(), entropy_at, d_logprob.data_ptr(), d_entropy_at, d_logits.data_ptr(),
            vocabulary,
        )  # fmt: skip
        return d_logits

    def centre(
        self,
        policy: Softmax,
        sampler: Softmax,
        base: Softmax | None,
        ids: Tensor,
        temperature: Tensor,
        d_logprob: Tensor,
        low: Tensor | None,
        high: Tensor | None,
        outside: str,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        bounds = bounded(base, low, high, outside)
        if base is None or bounds is None:
            given = (sampler.logits, ids, temperature, sampler.max, sampler.sum)
            ones = torch.ones_like(d_logprob)
            return self.logprob_backward(*given, None, d_logprob, None, dtype), ones, ones.clone()
        n, vocabulary = sampler.logits.shape
        three = [_dense_softmax(name, x, n, vocabulary) for name, x in _named(policy, sampler, base)]
        ids = indices("token id", ids, n, vocabulary)
        named = {"temperature": temperature, "d_logprob": d_logprob, "low": bounds[0], "high": bounds[1]}
        per_row = [dense(key, x, torch.float32, (n,)) for key, x in named.items()]
        d_logits = torch.empty(n, vocabulary, dtype=grad_dtype(dtype))
        w_id, total = torch.empty(n, dtype=torch.float32), torch.empty(n, dtype=torch.float32)
        addresses = [
            part
            for x in three
            for part in (x.logits.data_ptr(), x.logits.stride(0), x.max.data_ptr(), x.sum.data_ptr())
        ]
        self._c.centre(
            CODES[dtype], n, vocabulary, *addresses, ids.data_ptr(), *(x.data_ptr() for x in per_row),
            outside == CLAMP, d_logits.data_ptr(), vocabulary, w_id.data_ptr(), total.data_ptr(),
        )  # fmt: skip
        return d_logits, w_id, total

    def draw(
        self, logits: Tensor, temperature: Tensor, seed: Tensor, request: Tensor, sample: Tensor, position: Tensor
    ) -> Tensor:
        n, vocabulary = logits.shape
        require("logits", logits, torch.float32, (n, vocabulary))
        logits, temperature = rows(logits), dense("temperature", temperature, torch.float32, (n,))
        seed, request = dense("seed", seed, torch.int64, (n,)), dense("request", request, torch.int64, (n,))
        sample = dense("sample", sample, torch.int64, (n,)).to(torch.int32)  # the low 32 bits
        position = dense("position", position, torch.int64, (n,)).to(torch.int32)
        ids = torch.empty(n, dtype=torch.int64)
        self._c.draw(
            n, vocabulary, logits.data_ptr(), logits.stride(0), temperature.data_ptr(), seed.data_ptr(),
            request.data_ptr(), sample.data_ptr(), position.data_ptr(), ids.data_ptr(),
        )  # fmt: skip
        return ids

    def noise(self, key: Tensor, columns: int) -> Tensor:
        (n,) = key.shape
        key = dense("key", key, torch.int64, (n,))
        y = torch.empty(n, columns, dtype=torch.float32)
        self._c.noise(n, columns, key.data_ptr(), y.data_ptr(), columns)
        return y


def _named(policy: Softmax, sampler: Softmax, base: Softmax) -> list[tuple[str, Softmax]]:
    return [("the policy's", policy), ("the sampler's", sampler), ("the base's", base)]


def _dense_softmax(whose: str, x: Softmax, n: int, vocabulary: int) -> Softmax:
    """The rows with their largest z and sum, checked. Raises ValueError saying whose do not fit."""
    require(f"{whose} logits", x.logits, torch.float32, (n, vocabulary))
    max_, sum_ = (dense(f"{whose} {key}", y, torch.float32, (n,)) for key, y in (("max", x.max), ("sum", x.sum)))
    return Softmax(rows(x.logits), max_, sum_)
