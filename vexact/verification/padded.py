"""transformers as an engine that samples: one left-padded batch over a cache, as its `generate` computes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from vexact.model.rollout import Rollout
from vexact.rollout.request import Request


class PaddedBatch:
    """Sequences of a batch that grows by a token each at a time.

    The first forward takes the prompts, each further one the tokens behind them.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        """model: transformers', in evaluation mode. prompts: none empty."""
        from transformers import DynamicCache

        longest = max(map(len, prompts))
        pads = [longest - len(prompt) for prompt in prompts]
        self.model = model
        self._ids = self._tensor([[0] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)])
        self._mask = self._tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        self._position = (self._mask.cumsum(1) - 1).clamp(min=0)
        # Newer versions of transformers call the argument `cache`, and warn of the old name. It is updated in place.
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._cache = {name: DynamicCache(config=model.config)}

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Behind the tokens that are new since the last call: float32 [B, V]."""
        out = self.model(
            self._ids,
            attention_mask=self._mask,
            position_ids=self._position,
            use_cache=True,
            logits_to_keep=1,
            **self._cache,
        )
        return out.logits[:, -1].float()

    def append(self, ids: Sequence[int]) -> None:
        """One more token of each sequence."""
        self._ids = self._tensor([[token] for token in ids])
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], 1)
        self._position = self._position[:, -1:] + 1

    def _tensor(self, rows: list[list[int]]) -> Tensor:
        return torch.tensor(rows).to(self.model.device)


def sample_padded(model: Any, requests: Sequence[Request], seed: int) -> list[Rollout]:
    """All requests in one batch, rollouts in order of their ids. Temperatures are above 0.

    Tokens are drawn by torch's own generator from the softmax of the tempered logits in float32, and their
    log-probabilities are its log_softmax, as `generate` takes and reports them.
    """
    rows = [(request, sample) for request in requests for sample in range(request.n)]
    batch = PaddedBatch(model, [request.prompt for request, _ in rows])
    generator = torch.Generator().manual_seed(seed)
    temperature = torch.tensor([[request.temperature] for request, _ in rows]).to(model.device)
    drawn: list[list[int]] = [[] for _ in rows]
    found: list[list[float]] = [[] for _ in rows]
    open_rows = {i for i, (request, _) in enumerate(rows) if request.max_tokens}
    while open_rows:
        logprobs = torch.log_softmax(batch.logits() / temperature, -1).cpu()
        ids = torch.multinomial(logprobs.exp(), 1, generator=generator)
        values = logprobs.gather(1, ids)[:, 0].tolist()
        tokens = ids[:, 0].tolist()
        for i in sorted(open_rows):
            drawn[i].append(tokens[i])
            found[i].append(values[i])
            if tokens[i] in rows[i][0].stop_ids or len(drawn[i]) == rows[i][0].max_tokens:
                open_rows.remove(i)
        batch.append(tokens)
    digest = f"transformers-{version('transformers')}/{str(model.dtype).removeprefix('torch.')}"
    return sorted(
        (
            Rollout(
                request=request.id,
                sample=sample,
                prompt=request.prompt,
                completion=tokens,
                logprobs=torch.tensor(values, dtype=torch.float32),
                finish="stop" if tokens and tokens[-1] in request.stop_ids else "length",
                temperature=request.temperature,
                version=0,
                digest=digest,
            )
            for (request, sample), tokens, values in zip(rows, drawn, found, strict=True)
        ),
        key=lambda rollout: rollout.id,
    )
