"""The one forward, for sampling, scoring and gradients alike."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from vexact.model.batch import Batch
from vexact.model.config import ModelConfig
from vexact.model.ops import Ops
from vexact.model.pages import Pages
from vexact.model.parameters import EMBEDDING, HEAD, NORM, Parameters
from vexact.model.rotary import RotaryTables


class Layer:
    """Attention and feed-forward of one layer. Letters: N tokens, D width, H, G heads, K head size, F feed-forward."""

    def __init__(self, index: int, parameters: Parameters) -> None:
        config = parameters.config
        self.index, self.config = index, config
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.norm_1 = parameters.vector(f"{prefix}.input_layernorm.weight")
        self.qkv = parameters.matrix(
            f"{attention}.qkv_proj.weight", f"{attention}.qkv_proj.bias" if config.qkv_bias else None
        )
        self.q_norm = parameters.vector(f"{attention}.q_norm.weight") if config.qk_norm else None
        self.k_norm = parameters.vector(f"{attention}.k_norm.weight") if config.qk_norm else None
        self.o = parameters.matrix(f"{attention}.o_proj.weight")
        self.norm_2 = parameters.vector(f"{prefix}.post_attention_layernorm.weight")
        self.gate_up = parameters.matrix(f"{mlp}.gate_up_proj.weight")
        self.down = parameters.matrix(f"{mlp}.down_proj.weight")
        self.scale = config.attention_scale

    def forward(self, batch: Batch, pages: Pages, tables: tuple[Tensor, Tensor], x: Tensor, ops: Ops) -> Tensor:
        """x [N, D] → [N, D]."""
        eps = self.config.rms_norm_eps
        x = ops.add(x, self.attention(ops.rmsnorm(x, self.norm_1, eps), batch, pages, tables, ops))
        return ops.add(x, self.feed_forward(ops.rmsnorm(x, self.norm_2, eps), ops))

    def attention(self, x: Tensor, batch: Batch, pages: Pages, tables: tuple[Tensor, Tensor], ops: Ops) -> Tensor:
        """x [N, D] → [N, D]; writes this layer's keys and values of the batch into pages."""
        config = self.config
        q, k, v = ops.split_heads(ops.matmul(x, self.qkv), config.num_heads, config.num_kv_heads, config.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q = ops.rmsnorm(q, self.q_norm, config.rms_norm_eps)
            k = ops.rmsnorm(k, self.k_norm, config.rms_norm_eps)
        q, k = ops.rope(q, batch.positions, tables), ops.rope(k, batch.positions, tables)
        return ops.matmul(ops.attention(q, k, v, batch.chunks, pages.layer(self.index), self.scale), self.o)

    def feed_forward(self, x: Tensor, ops: Ops) -> Tensor:
        """x [N, D] → [N, D]."""
        return ops.matmul(ops.swiglu(ops.matmul(x, self.gate_up)), self.down)


class Transformer:
    """Weights and their one forward. rotary: tables of an equal config, to be shared; by default new ones."""

    def __init__(self, parameters: Parameters, rotary: RotaryTables | None = None) -> None:
        config = parameters.config
        self.config: ModelConfig = config
        self.parameters = parameters
        self.embedding = parameters.matrix(EMBEDDING)
        self.layers = [Layer(i, parameters) for i in range(config.num_layers)]
        self.norm = parameters.vector(NORM)
        self.head = parameters.matrix(EMBEDDING if config.tie_word_embeddings else HEAD)
        self.rotary = rotary or RotaryTables.of(config, parameters.device)

    def forward(self, batch: Batch, pages: Pages, ops: Ops) -> Tensor:
        """Hidden states [N, D] before the head, which `Ops.logits` and `Ops.logprobs` apply.

        Raises ValueError where a token lies beyond the model's positions, IndexError on an unknown token id.
        """
        if batch.longest > self.config.max_positions:
            raise ValueError(
                f"position {batch.longest - 1} is beyond max_position_embeddings {self.config.max_positions}"
            )
        ops = ops.over(batch)
        tables = self.rotary.upto(batch.longest)
        x = ops.embed(batch.tokens, self.embedding)
        for layer in self.layers:
            x = ops.block(partial(layer.forward, batch, pages, tables), x)
        return ops.rmsnorm(x, self.norm, self.config.rms_norm_eps)
