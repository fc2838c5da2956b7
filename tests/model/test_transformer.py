"""The same function as transformers computes: logits in fp32 within a bound, for every family and the real model.

The bound: both sides round in fp32, in other orders. A logit is a sum of `hidden` products behind a handful of
layers; on these models twice float64's distance from transformers' own fp32 result stays below 2e-4 of the
logits' spread, while a wrong rope, norm, head split or bias moves logits by more than a tenth of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import FAMILIES, LLAMA3, bits, build, l3
from vexact.model.batch import Batch, Chunk
from vexact.model.pages import Pages, pages_for
from vexact.model.policy import Policy
from vexact_kernels import load


def logits(policy: Policy, tokens: list[int]) -> Tensor:
    pages = Pages(policy.config, pages_for(len(tokens)), policy.dtype, layers=1)
    batch = Batch.of([Chunk(tokens, 0, pages.take(pages.count))])
    return policy.ops.logits(policy.transformer.forward(batch, pages, policy.ops), policy.transformer.head)


def theirs(folder: Path, tokens: list[int]) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def agrees(folder: Path, length: int = 300) -> None:
    policy = Policy.load(folder, load("cpu"), torch.float32)
    tokens = [(i * 53 + 7) % min(250, policy.config.vocab_size) for i in range(length)]
    ours, expected = logits(policy, tokens), theirs(folder, tokens)
    assert expected.max() > 15
    assert expected.min() < -15
    assert (ours - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_are_those_of_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    agrees(build(tmp_path / family, FAMILIES[family](dtype="float32", tie_word_embeddings=tied)))


SPELLINGS: list[dict[str, Any]] = [
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
    {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
]


def test_three_spellings_of_llama3_scaling_are_one_function(tmp_path: Path) -> None:
    seen = []
    for i, spelling in enumerate(SPELLINGS):
        folder = build(tmp_path / str(i), l3(dtype="float32", **spelling))
        agrees(folder, length=512)
        seen.append(logits(Policy.load(folder, load("cpu"), torch.float32), list(range(200))))
    assert bits(seen[0]) == bits(seen[1]) == bits(seen[2])


def test_a_head_size_of_null_is_the_quotient(tmp_path: Path) -> None:
    shape = {"head_dim": None, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    agrees(build(tmp_path / "l3", l3(dtype="float32", **shape)))


def test_the_real_model_agrees_at_every_position_of_real_text(smollm2: Path) -> None:
    from pydoc_data.topics import topics

    from vexact.model.tokenizer import load_tokenizer

    text = "".join(topics[name] for name in ("lambda", "integers", "yield"))
    tokens = load_tokenizer(smollm2).encode(text)[:512]
    assert len(tokens) == 512
    policy = Policy.load(smollm2, load("cpu"), torch.float32)
    ours, expected = logits(policy, tokens), theirs(smollm2, tokens)
    assert ours.argmax(-1).tolist() == expected.argmax(-1).tolist()
    assert (ours - expected).abs().max() < 1e-3  # logits reach from -29 to 41; measured 2.0e-4
