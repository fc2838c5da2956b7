"""Ops that remember how to go back: each forward is the very same kernel, and leaves one step on a tape.

The tape is ours and not autograd's because the written order matters there too: a gradient that meets another (the
residual) is added inside one kernel and rounded once, gradients of float16 activations stay float32, and parameter
gradients go into lanes. `Recorded` hands the whole of it to autograd as a single function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vexact.model.batch import Batch
from vexact.model.centring import Centres
from vexact.model.gradients import Gradients, part_of, rows_in
from vexact.model.ops import Edit, Logprobs, Ops, edited, gather_logprobs, token_parts
from vexact.model.parameters import Matrix, Vector
from vexact_kernels import Chunks, Kernels, Segments, Softmax, Stream


class Tape:
    """Backward steps in the order of the forward, and the gradients waiting for the tensors they belong to.

    A tensor is known by its id(): the steps that wait for it keep it alive, so no other can take that id meanwhile.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []
        self._spent = False
        self._waiting: dict[int, Tensor] = {}

    def append(self, step: Callable[[], None]) -> None:
        self._steps.append(step)

    def give(self, tensor: Tensor, gradient: Tensor) -> None:
        """Leave the gradient of `tensor`. Only one can wait: a second one takes the first along (`take`)."""
        if id(tensor) in self._waiting:
            raise RuntimeError("a gradient is already waiting for this tensor")
        self._waiting[id(tensor)] = gradient

    def take(self, tensor: Tensor) -> Tensor | None:
        return self._waiting.pop(id(tensor), None)

    def need(self, tensor: Tensor) -> Tensor:
        gradient = self.take(tensor)
        if gradient is None:
            raise RuntimeError("no gradient reached an operation's result")
        return gradient

    def backward(self, given: Mapping[Tensor, Tensor]) -> None:
        """Walk back once from the gradients of results; each step is dropped, with what it kept, as soon as it is done.

        Raises RuntimeError the second time: what the first one kept is gone, so its gradient would be lost in silence.
        """
        if self._spent:
            raise RuntimeError("this micro-batch has gone back already: add up its losses and call backward once")
        self._spent = True
        for tensor, gradient in given.items():
            self.give(tensor, gradient)
        while self._steps:
            self._steps.pop()()


class Recording(Ops):
    """Exact ops that record one micro-batch for gradients.

    recompute: of a block only its input is kept; its forward, the same kernels on the same bits, runs again on the way
    back and is recorded then. centres: what scores are centred with, by default not.
    """

    def __init__(
        self, kernels: Kernels, gradients: Gradients, recompute: bool = False, centres: Centres | None = None
    ) -> None:
        super().__init__(kernels)
        self.gradients, self.recompute, self.centres = gradients, recompute, centres
        self.tape = Tape()
        self._segments: Segments | None = None
        self._batch: Batch | None = None

    @property
    def segments(self) -> Segments:
        if self._segments is None:
            raise RuntimeError("a batch without lanes cannot be recorded")
        return self._segments

    def over(self, batch: Batch) -> Recording:
        self._segments, self._batch = batch.segments, batch
        return self

    def _stream(self, weight: Matrix | Vector) -> Stream:
        shape = (weight.packed.rows, weight.packed.columns) if isinstance(weight, Matrix) else tuple(weight.value.shape)
        return self.gradients.stream(weight.name, shape)

    def block(self, run: Callable[[Tensor, Ops], Tensor], x: Tensor) -> Tensor:
        if not self.recompute:
            return run(x, self)
        y = run(x, Ops(self.kernels))

        def back() -> None:
            again = Recording(self.kernels, self.gradients)
            again._segments = self.segments
            again.tape.backward({run(x, again): self.tape.need(y)})
            self.tape.give(x, again.tape.need(x))

        self.tape.append(back)
        return y

    def stand_in(self, x: Tensor, value: Tensor) -> Tensor:
        if value is not x:
            self.tape.append(lambda: self.tape.give(x, self.tape.need(value)))
        return value

    def embed(self, tokens: Tensor, weight: Matrix) -> Tensor:
        y = super().embed(tokens, weight)
        stream = self.gradients.stream(weight.name, (weight.packed.rows, weight.packed.columns), embedding=True)

        def back() -> None:
            self.kernels.embed_dw(tokens, self.tape.need(y), self.segments, stream)

        self.tape.append(back)
        return y

    def matmul(self, x: Tensor, weight: Matrix) -> Tensor:
        y = super().matmul(x, weight)

        def back() -> None:
            dy = self.tape.need(y)
            self.kernels.matmul_dw(dy, x, self.segments, self._stream(weight))
            if weight.bias is not None:
                name = weight.name.removesuffix("weight") + "bias"
                self.kernels.matmul_db(dy, self.segments, self.gradients.stream(name, tuple(weight.bias.shape)))
            self.tape.give(x, self.kernels.matmul_dx(dy, weight.packed))

        self.tape.append(back)
        return y

    def add(self, residual: Tensor, branch: Tensor) -> Tensor:
        y = super().add(residual, branch)

        def back() -> None:
            dy = self.tape.need(y)
            self.tape.give(residual, dy)
            self.tape.give(branch, dy)

        self.tape.append(back)
        return y

    def rmsnorm(self, x: Tensor, weight: Vector, eps: float) -> Tensor:
        y, rstd = self.kernels.rmsnorm(x, weight.value, eps)

        def back() -> None:
            dy = self.tape.need(y)
            self.kernels.rmsnorm_dw(x, rstd, dy, self.segments, self._stream(weight))
            self.tape.give(x, self.kernels.rmsnorm_dx(x, weight.value, rstd, dy, self.tape.take(x)))

        self.tape.append(back)
        return y

    def split_heads(self, qkv: Tensor, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        parts = super().split_heads(qkv, heads, kv_heads, head_dim)

        def back() -> None:
            self.tape.give(qkv, torch.cat([self.tape.need(part) for part in parts], dim=1).flatten(1))

        self.tape.append(back)
        return parts

    def rope(self, x: Tensor, positions: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        y = super().rope(x, positions, tables)

        def back() -> None:
            self.tape.give(x, self.kernels.rope(self.tape.need(y), positions, *tables, inverse=True))

        self.tape.append(back)
        return y

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, pages: tuple[Tensor, Tensor], scale: float
    ) -> Tensor:
        y, lse = self.kernels.attention(q, k, v, chunks, *pages, scale)
        flat = y.flatten(1)

        def back() -> None:
            dy = self.tape.need(flat).view(y.shape)
            gradients = self.kernels.attention_backward(q, k, v, y, dy, lse, chunks, scale)
            for tensor, gradient in zip((q, k, v), gradients, strict=True):
                self.tape.give(tensor, gradient)

        self.tape.append(back)
        return flat

    def swiglu(self, gate_up: Tensor) -> Tensor:
        y = super().swiglu(gate_up)

        def back() -> None:
            self.tape.give(gate_up, self.kernels.swiglu_backward(gate_up, self.tape.need(y)))

        self.tape.append(back)
        return y

    def logits(self, hidden: Tensor, head: Matrix, rows: Tensor | None = None) -> Tensor:
        raise RuntimeError("logits have no gradient of their own: use logprobs, which never holds them whole")

    def logprobs(
        self, hidden: Tensor, rows: Tensor, head: Matrix, ids: Tensor, temperature: Tensor, edit: Edit | None = None
    ) -> Logprobs:
        kernels, at = self.kernels, rows.to(hidden.device, non_blocking=True)
        kept = hidden[at]
        parts = token_parts(rows.shape[0], head.packed.rows)

        def logits_of(part: slice) -> Tensor:
            return edited(kernels.matmul(kept[part], head.packed, logits=True), rows[part], edit)

        saved = [kernels.logprob(logits_of(part), ids[part], temperature[part]) for part in parts]
        result = gather_logprobs(saved, hidden.device)
        centre = None if self.centres is None or self._batch is None else self.centres.over(self._batch, rows)

        def back() -> None:
            d_logprob, d_entropy = self.tape.need(result.logprob), self.tape.take(result.entropy)
            if centre is not None and d_entropy is not None:
                raise RuntimeError("an entropy bonus has no centred gradient")
            segments = rows_in(self.segments, rows)
            d_kept = []
            for part, (_, entropy, max_, sum_, _) in zip(parts, saved, strict=True):
                if centre is None:
                    d_logits = kernels.logprob_backward(
                        logits_of(part), ids[part], temperature[part], max_, sum_, entropy,
                        d_logprob[part], None if d_entropy is None else d_entropy[part], hidden.dtype,
                    )  # fmt: skip
                else:
                    policy = Softmax(logits_of(part), max_, sum_)
                    d_logits = centre.back(
                        kernels, part, policy, ids[part], temperature[part], d_logprob[part], hidden.dtype
                    )
                kernels.matmul_dw(d_logits, kept[part], part_of(segments, part), self._stream(head))
                d_kept.append(kernels.matmul_dx(d_logits, head.packed))
            gathered = torch.cat(d_kept)
            d_hidden = torch.zeros(hidden.shape, dtype=gathered.dtype, device=hidden.device)
            d_hidden[at] = gathered
            self.tape.give(hidden, d_hidden)

        self.tape.append(back)
        return result


class Recorded(torch.autograd.Function):
    """A recorded micro-batch as one node of autograd: (logprob, entropy) with a gradient that runs the tape."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recording: Recording, result: Logprobs) -> tuple[Tensor, Tensor]:
        ctx.recording, ctx.result = recording, result
        ctx.set_materialize_grads(False)
        return result.logprob.clone(), result.entropy.clone()

    @staticmethod
    def backward(ctx: Any, d_logprob: Tensor | None, d_entropy: Tensor | None) -> tuple[None, None, None]:
        tape, result = ctx.recording.tape, ctx.result
        given = {result.logprob: torch.zeros_like(result.logprob) if d_logprob is None else d_logprob.contiguous()}
        if d_entropy is not None:
            given[result.entropy] = d_entropy.contiguous()
        tape.backward(given)
        return None, None, None
