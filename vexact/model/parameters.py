"""How a checkpoint's tensors become the parameters of one transformer.

Hugging Face names are what is saved, clipped and reported. The forward works on *stacks*: q, k and v are one matrix,
gate and up are one, so that each product (and each gradient of its input) is one chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vexact.model.config import ModelConfig
from vexact_kernels import Kernels, Packed

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class Matrix:
    """A weight [rows, columns] in the kernels' layout, with its bias [rows] or None. `name` is that of the stack."""

    name: str
    packed: Packed
    bias: Tensor | None = None


@dataclass(frozen=True)
class Vector:
    """A norm's weight [columns]."""

    name: str
    value: Tensor


def stacks(config: ModelConfig) -> dict[str, list[str]]:
    """Name of each stack → Hugging Face names of the tensors stacked in it, rows ascending.

    A stack of one tensor keeps that tensor's name. A tied head has no entry of its own.
    """
    table: dict[str, list[str]] = {EMBEDDING: [EMBEDDING]}
    for i in range(config.num_layers):
        layer, attention, mlp = f"model.layers.{i}", f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        table[f"{layer}.input_layernorm.weight"] = [f"{layer}.input_layernorm.weight"]
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            table[f"{attention}.qkv_proj.{kind}"] = [f"{attention}.{part}_proj.{kind}" for part in "qkv"]
        if config.qk_norm:
            for part in "qk":
                table[f"{attention}.{part}_norm.weight"] = [f"{attention}.{part}_norm.weight"]
        table[f"{attention}.o_proj.weight"] = [f"{attention}.o_proj.weight"]
        table[f"{layer}.post_attention_layernorm.weight"] = [f"{layer}.post_attention_layernorm.weight"]
        table[f"{mlp}.gate_up_proj.weight"] = [f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"]
        table[f"{mlp}.down_proj.weight"] = [f"{mlp}.down_proj.weight"]
    table[NORM] = [NORM]
    if not config.tie_word_embeddings:
        table[HEAD] = [HEAD]
    return table


def stack(config: ModelConfig, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """One stack as a tensor; a view of the checkpoint's tensor where it is alone."""
    parts = [tensors[part] for part in stacks(config)[name]]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unstack(config: ModelConfig, stacked: Mapping[str, Tensor], *, partly: bool = False) -> dict[str, Tensor]:
    """Hugging Face name → view of the rows in its stack. partly: some stacks may be absent, and so are their tensors.

    Raises KeyError on a stack that is missing otherwise.
    """
    widths = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    tensors: dict[str, Tensor] = {}
    for name, parts in stacks(config).items():
        if partly and name not in stacked:
            continue
        if len(parts) == 1:
            tensors[parts[0]] = stacked[name]
        elif ".qkv_proj." in name:
            rows = [heads * config.head_dim for heads in widths.values()]
            tensors.update(zip(parts, stacked[name].split(rows), strict=True))
        else:
            tensors.update(zip(parts, stacked[name].split(config.intermediate_size), strict=True))
    return tensors


class Parameters:
    """The parameters of one policy in its compute dtype, packed once, on the kernels' device."""

    def __init__(
        self, config: ModelConfig, stacked: Mapping[str, Tensor], dtype: torch.dtype, kernels: Kernels
    ) -> None:
        """stacked: every stack of `stacks(config)` in any storage dtype, wherever it lies; rounded once to `dtype`."""
        self.config, self.dtype, self.device = config, dtype, kernels.device
        self._vectors: dict[str, Vector] = {}
        self._matrices: dict[str, Matrix] = {}
        for name in stacks(config):
            tensor = kernels.cast(stacked[name].to(kernels.device), dtype)
            if tensor.ndim == 1:
                self._vectors[name] = Vector(name, tensor)
            else:
                self._matrices[name] = Matrix(name, kernels.pack(tensor))

    def vector(self, name: str) -> Vector:
        return self._vectors[name]

    def matrix(self, name: str, bias: str | None = None) -> Matrix:
        matrix = self._matrices[name]
        return matrix if bias is None else Matrix(name, matrix.packed, self._vectors[bias].value)

    def stacked(self, kernels: Kernels) -> dict[str, Tensor]:
        """Every stack as a plain tensor in the compute dtype, bit for bit."""
        return {
            name: self._vectors[name].value if name in self._vectors else kernels.unpack(self._matrices[name].packed)
            for name in stacks(self.config)
        }
