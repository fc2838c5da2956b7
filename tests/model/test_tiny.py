"""`tiny` has the same bits everywhere and hides no faults."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from checkpoints import FAMILIES, build
from vexact.model.checkpoint import fingerprint
from vexact.model.tiny import tiny_config, tiny_weights

GOLDEN = "d852fe59b5d0e6ede7f7534590a003652c1ff8302bf73a4427cb5764b1c8b5ca"


def test_tiny_has_the_recorded_bits() -> None:
    assert fingerprint(tiny_weights(tiny_config())) == GOLDEN


def test_another_seed_or_name_gives_other_numbers() -> None:
    weights = tiny_weights(tiny_config())
    assert fingerprint(tiny_weights(tiny_config(), seed=1)) != fingerprint(weights)
    layers = [weights[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2)]
    assert not bool((layers[0] == layers[1]).any(dim=1).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_hide_nothing(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = FAMILIES[family]()
    for name, value in tiny_weights(config).items():
        if name.endswith("bias"):
            assert value.abs().min() >= 0.25
            assert value.min() < 0 < value.max()
        elif value.ndim == 1:
            assert 0.5 <= value.min() < 0.75 < 1.25 < value.max() <= 1.5
    model = AutoModelForCausalLM.from_pretrained(build(tmp_path / family, config), dtype=torch.float32)
    prompts = torch.arange(512).mul(7919).remainder(config.vocab_size).view(8, 64)
    with torch.no_grad():
        logits = model(prompts).logits
    assert logits.min() < -15
    assert logits.max() > 15
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    assert 1.0 < entropy < math.log(config.vocab_size) - 2  # neither a fixed text nor noise
    assert (logits.argmax(-1) == prompts).float().mean() < 0.2  # the last token is not simply repeated
