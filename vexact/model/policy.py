"""A policy is weights + ops + version, and nothing else may move a log-probability."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vexact.model.batch import Batch, Chunk
from vexact.model.centring import Centres
from vexact.model.checkpoint import load_weights
from vexact.model.config import ModelConfig
from vexact.model.digest import arithmetic_digest
from vexact.model.draws import is_temperature
from vexact.model.gradients import Gradients, lanes_of, segments_of
from vexact.model.ops import Logprobs, Ops, gather_logprobs, token_parts
from vexact.model.origin import Origin
from vexact.model.pages import Pages, pages_for
from vexact.model.parameters import Parameters, stack, stacks
from vexact.model.recording import Recorded, Recording
from vexact.model.rotary import RotaryTables
from vexact.model.tiny import named_config, tiny_weights
from vexact.model.transformer import Transformer
from vexact_kernels import Kernels

TOKENS_AT_ONCE = 4096  # of a micro-batch, unless the caller says otherwise


@dataclass(frozen=True)
class Scored:
    """A sequence to score: log-probabilities of tokens[first:], each given all before it, at a temperature.

    request, sample: as they addressed its draws, for policies that compute by address; `first` then ends its prompt.
    """

    tokens: Sequence[int]
    first: int
    temperature: float = 1.0
    request: int = 0
    sample: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.first <= len(self.tokens):
            raise ValueError(f"first scored token {self.first} must be at least 1 and at most {len(self.tokens)}")
        if not is_temperature(self.temperature):
            raise ValueError(f"temperature is {self.temperature}, must be 0 or a normal float32 number")

    @property
    def rows(self) -> int:
        return len(self.tokens) - self.first


@dataclass(frozen=True)
class Targets:
    """What is scored in the forward of a batch. rows: int64 [R] of it, ascending, on the host; ids int64 [R] and
    temperature float32 [R] on the device."""

    batch: Batch
    rows: Tensor
    ids: Tensor
    temperature: Tensor


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states [R, D] of a policy at what is scored."""

    targets: Targets
    hidden: Tensor

    def logits(self, policy: Policy) -> Iterator[Tensor]:
        """Raw logits float32 [rows, V] that a policy's head and ops make of them, in parts that may stand in memory."""
        ops, head = policy.ops.over(self.targets.batch), policy.transformer.head
        for part in token_parts(len(self.hidden), head.packed.rows):
            yield ops.logits(self.hidden[part], head, self.targets.rows[part])


@dataclass(frozen=True)
class Policy:
    """The transformer of one version of the weights, the ops it computes with, and where both come from."""

    transformer: Transformer
    ops: Ops
    version: int = 0

    @staticmethod
    def load(model: str | Path, kernels: Kernels, dtype: torch.dtype | None = None) -> Policy:
        """A Hugging Face folder, `tiny` or `tiny-modsum`. dtype: compute dtype, by default that of the checkpoint.

        Raises ConfigError or CheckpointError (both ValueError) naming file, key or tensor.
        """
        config = named_config(model)
        if config is not None:
            weights = tiny_weights(config)
        else:
            config = ModelConfig.from_folder(Path(model))
            weights = load_weights(Path(model), config, dtype or config.dtype)
        return Policy.build(config, lambda name: stack(config, weights, name), kernels, dtype or config.dtype)

    @staticmethod
    def build(
        config: ModelConfig,
        stacked: Callable[[str], Tensor],
        kernels: Kernels,
        dtype: torch.dtype,
        version: int = 0,
        rotary: RotaryTables | None = None,
    ) -> Policy:
        """From the tensor of each stack, rounded once to the compute dtype. rotary: tables of an equal config."""
        parameters = Parameters(config, _Lazy(config, stacked), dtype, kernels)
        return Policy(Transformer(parameters, rotary), Ops(kernels), version)

    @property
    def config(self) -> ModelConfig:
        return self.transformer.config

    @property
    def dtype(self) -> torch.dtype:
        return self.transformer.parameters.dtype

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.ops.kernels.device

    @property
    def digest(self) -> str:
        """Arithmetic digest: equal on every machine and instruction set that keeps the contract."""
        return self.ops.digest(arithmetic_digest(self.ops.kernels, self.dtype))

    def logprobs(self, sequences: Sequence[Scored], tokens_at_once: int = TOKENS_AT_ONCE) -> Logprobs:
        """On the device: log-probability, entropy, finiteness of every scored token, sequences behind one another."""
        parts = [
            self._forward(sequences[begin:end], self.ops, None)
            for begin, end in micro_batches(sequences, tokens_at_once)
        ]
        return _joined(parts, self.device)

    def gradient_passes(
        self,
        sequences: Sequence[Scored],
        gradients: Gradients,
        tokens_at_once: int = TOKENS_AT_ONCE,
        *,
        one_lane: bool = False,
        recompute: bool = False,
        centres: Centres | None = None,
    ) -> Iterator[tuple[slice, Logprobs]]:
        """Micro-batches of a step with gradients: (rows of the step, log-probabilities that autograd can go back from).

        sequences: those of the whole step in order of their ids, or of one lane of it (`one_lane`), each with at least
        one scored token; call backward on every micro-batch before asking for the next. Parameter gradients arrive in
        `gradients`. recompute: keep a layer's input only, and run the layer again when its gradient is due. centres:
        what scores are centred with; behind a micro-batch's backward its `last` says what was found there.
        """
        lane_of = [0] * len(sequences) if one_lane else lanes_of(len(sequences))
        row = 0
        for begin, end in micro_batches(sequences, tokens_at_once):
            part = sequences[begin:end]
            following = lane_of[end] if end < len(sequences) else None
            recording = Recording(self.ops.kernels, gradients, recompute, centres)
            result = self._forward(part, self.ops.around(recording), (lane_of[begin:end], following))
            anchor = torch.zeros((), dtype=torch.float32, device=self.device, requires_grad=True)
            logprob, entropy = Recorded.apply(anchor, recording, result)
            rows = slice(row, row + result.logprob.shape[0])
            row = rows.stop
            yield rows, Logprobs(logprob, entropy, result.finite)

    def logits(self, sequences: Sequence[Scored], tokens_at_once: int = TOKENS_AT_ONCE) -> Iterator[Tensor]:
        """Raw logits float32 [rows, V] of the scored tokens, as many at a time as may stand in memory whole."""
        for states in self.states(sequences, tokens_at_once):
            yield from states.logits(self)

    def states(self, sequences: Sequence[Scored], tokens_at_once: int = TOKENS_AT_ONCE) -> Iterator[HiddenStates]:
        """Hidden states where tokens are scored, micro-batch by micro-batch."""
        for begin, end in micro_batches(sequences, tokens_at_once):
            _, hidden, targets = self.hidden(sequences[begin:end], self.ops, None)
            yield HiddenStates(targets, hidden[targets.rows.to(self.device)])

    def hidden(
        self, sequences: Sequence[Scored], ops: Ops, lanes: tuple[Sequence[int], int | None] | None
    ) -> tuple[Ops, Tensor, Targets]:
        """One forward of whole sequences: the ops over their batch, hidden states [N, D], and what is scored of them.

        lanes: as `segments_of` takes them, None where nobody asks for gradients.
        """
        inputs = [sequence.tokens[:-1] if sequence.rows else sequence.tokens for sequence in sequences]
        pages = Pages(self.config, sum(pages_for(len(i)) for i in inputs), self.dtype, self.device, layers=1)
        chunks = [
            Chunk(tokens, 0, pages.take(pages_for(len(tokens))), Origin(each.request, each.sample, each.first))
            for tokens, each in zip(inputs, sequences, strict=True)
        ]
        segments = None if lanes is None else segments_of([len(tokens) for tokens in inputs], *lanes)
        batch = Batch.of(chunks, self.device, segments)
        over = ops.over(batch)
        hidden = self.transformer.forward(batch, pages, over)
        return over, hidden, _targets(sequences, batch, self.device)

    def _forward(
        self, sequences: Sequence[Scored], ops: Ops, lanes: tuple[Sequence[int], int | None] | None
    ) -> Logprobs:
        ops, hidden, targets = self.hidden(sequences, ops, lanes)
        return ops.logprobs(hidden, targets.rows, self.transformer.head, targets.ids, targets.temperature)


class _Lazy(dict[str, Tensor]):
    """Stacks made one at a time, so that a checkpoint and its packed copy never stand in memory whole together."""

    def __init__(self, config: ModelConfig, make: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._names, self._make = stacks(config), make

    def __missing__(self, name: str) -> Tensor:
        return self._make(name)


def micro_batches(sequences: Sequence[Scored], tokens_at_once: int) -> list[tuple[int, int]]:
    """Consecutive sequences (begin, end) of at most that many tokens together, and at least one sequence."""
    cuts: list[tuple[int, int]] = []
    begin = tokens = 0
    for index, sequence in enumerate(sequences):
        if index > begin and tokens + len(sequence.tokens) > tokens_at_once:
            cuts.append((begin, index))
            begin, tokens = index, 0
        tokens += len(sequence.tokens)
    return [*cuts, (begin, len(sequences))] if sequences else []


def _targets(sequences: Sequence[Scored], batch: Batch, device: torch.device) -> Targets:
    rows: list[int] = []
    ids: list[int] = []
    temperature: list[float] = []
    for sequence, at in zip(sequences, batch.chunks.start.tolist(), strict=False):
        rows.extend(range(at + sequence.first - 1, at + sequence.first - 1 + sequence.rows))
        ids.extend(sequence.tokens[sequence.first :])
        temperature.extend([sequence.temperature] * sequence.rows)
    return Targets(
        batch,
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(ids, dtype=torch.int64).to(device, non_blocking=True),
        torch.tensor(temperature, dtype=torch.float32).to(device, non_blocking=True),
    )


def _joined(parts: Sequence[Logprobs], device: torch.device) -> Logprobs:
    if not parts:
        return gather_logprobs([], device)
    return Logprobs(
        torch.cat([part.logprob for part in parts]),
        torch.cat([part.entropy for part in parts]),
        torch.cat([part.finite for part in parts]),
    )
