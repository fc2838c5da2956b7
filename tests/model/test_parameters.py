"""Stacks are the checkpoint's tensors in another arrangement, bit for bit."""

from __future__ import annotations

import pytest
import torch

from vexact.model.checkpoint import shapes
from vexact.model.parameters import Parameters, stack, stacks, unstack
from vexact.model.tiny import tiny_config, tiny_weights
from vexact_kernels import load


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_lies_in_exactly_one_stack(family: str, tied: bool) -> None:
    config = tiny_config(family, tie_word_embeddings=tied)
    parts = [part for parts in stacks(config).values() for part in parts]
    assert len(parts) == len(set(parts))
    assert set(parts) == set(shapes(config))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_unstacking_gives_the_tensors_again(family: str) -> None:
    config = tiny_config(family)
    weights = tiny_weights(config)
    again = unstack(config, {name: stack(config, weights, name) for name in stacks(config)})
    assert set(again) == set(weights)
    for name, tensor in weights.items():
        assert again[name].shape == tensor.shape
        assert again[name].contiguous().view(torch.int32).tolist() == tensor.view(torch.int32).tolist(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parameters_are_rounded_once(dtype: torch.dtype) -> None:
    config, kernels = tiny_config("qwen2"), load("cpu")
    weights = tiny_weights(config)
    stacked = {name: stack(config, weights, name) for name in stacks(config)}
    for name, tensor in Parameters(config, stacked, dtype, kernels).stacked(kernels).items():
        expected = stacked[name].to(dtype)
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        assert tensor.view(integer).tolist() == expected.view(integer).tolist(), name
