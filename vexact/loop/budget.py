"""What a run needs of each device's memory, from its recipe and the shape of its model alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vexact.loop.versions import most_held, spare_of, version_bytes
from vexact.model.config import ModelConfig
from vexact.model.gradients import stream_shapes
from vexact.model.law import row_bytes
from vexact.model.ops import LOGITS_AT_ONCE
from vexact.model.pages import pages_for
from vexact.recipe import Recipe
from vexact.rollout.sampler import default_pages, page_bytes
from vexact.study.mismatch import Mismatch
from vexact.study.remedies import remedy_of
from vexact.training.shards import bundles, owners, stack_shape

FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Budget:
    """Bytes of one device, of the rank that needs most, by what they hold."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def budget_of(recipe: Recipe, config: ModelConfig, dtype: torch.dtype, ranks: int = 1) -> Budget:
    """dtype: what the policy computes in. ranks: how many share the run."""
    versions, weights = most_versions(recipe), version_bytes(config, dtype)
    name = str(dtype).removeprefix("torch.")
    most, largest_message = shares(config, ranks)
    gradients = 2 * FLOAT32 * sum(math.prod(shape) for shape in stream_shapes(config).values())
    parts = {
        f"weights, {versions} versions, {name}": versions * weights,
        "masters, float32": FLOAT32 * most,
        "moments, float32": 2 * FLOAT32 * most,
        "gradients: running lane and total, float32": gradients,
    }
    if config.tie_word_embeddings:
        parts["sum of the tied weight's two streams, float32"] = FLOAT32 * config.vocab_size * config.hidden_size
    if recipe.loss.kl.coef:
        parts[f"reference policy, {name}"] = weights
    if ranks > 1:
        parts["gradients of owned stacks, and one message, float32"] = FLOAT32 * (most + largest_message)
    laws = law_bytes(recipe, config)
    if laws and recipe.device == "cpu":  # they lie on the host
        parts["laws that a step's rollouts were drawn from, at most"] = laws
    tokens = recipe.optimizer.tokens_at_once
    scores = FLOAT32 * 2 * min(LOGITS_AT_ONCE, tokens * config.vocab_size)
    pages = recipe.sampling.pages or default_pages(config, dtype)
    parts["pages of the sampler, when all are in use"] = pages * page_bytes(config, dtype)
    parts[f"activations of {tokens} tokens"] = activation_bytes(recipe, config, dtype)
    parts["logits and their gradient, float32"] = scores
    return Budget(parts)


def law_bytes(recipe: Recipe, config: ModelConfig) -> int:
    """Of what a step's rollouts keep where scores are centred with what no policy finds again, else 0."""
    sampling, remedy = recipe.sampling, remedy_of(recipe.loss.remedy)
    centred = recipe.run.diagnose or (remedy is not None and remedy.centre is not None)
    if not centred or not Mismatch(recipe.mismatch, recipe.seed).keeps_laws(recipe.mismatch.start):
        return 0
    tokens = sampling.rounds * sampling.prompts * sampling.samples * sampling.max_tokens
    return tokens * row_bytes(config.vocab_size)


def most_versions(recipe: Recipe) -> int:
    """Versions of the weights that are held at once. While the next is made, the trainer's own still stands."""
    return min(most_held(recipe.sync.every, recipe.delay) + spare_of(recipe), recipe.steps + 1) + 1


def shares(config: ModelConfig, ranks: int) -> tuple[int, int]:
    """Numbers of the stacks that the busiest rank owns, and of the largest message."""
    shapes, owned = stream_shapes(config), [0] * ranks
    owner_of = owners(config, ranks)
    for stack, owner in owner_of.items():
        owned[owner] += math.prod(stack_shape(shapes, stack))
    messages = [sum(math.prod(shapes[name]) for name in names) for _, names in bundles(shapes, owner_of)]
    return max(owned), max(messages)


def activation_bytes(recipe: Recipe, config: ModelConfig, dtype: torch.dtype) -> int:
    """Of one micro-batch of `tokens_at_once` tokens: what its tape keeps until the way back, and its pages."""
    tokens, width = recipe.optimizer.tokens_at_once, dtype.itemsize
    hidden = tokens * config.hidden_size * width
    layer = tokens * layer_bytes(config, width)
    kept = config.num_layers * hidden + layer if recipe.optimizer.recompute else config.num_layers * layer
    return kept + 3 * hidden + pages_for(tokens) * page_bytes(config, dtype) // config.num_layers


def layer_bytes(config: ModelConfig, width: int) -> int:
    """That one layer keeps of a token. width: bytes of a number of the compute dtype."""
    size, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    queries_and_keys = (heads + kv_heads) * size
    normed = 1 if config.qk_norm else 0
    numbers = (
        6 * config.hidden_size  # two norms, what attention and feed-forward add, and both sums
        + queries_and_keys + kv_heads * size  # q, k, v
        + (1 + normed) * queries_and_keys  # rotated, and before that normed
        + heads * size  # attention
        + 3 * config.intermediate_size  # gate, up, and their product
    )  # fmt: skip
    statistics = 2 + heads + normed * (heads + kv_heads)  # 1/rms of each norm, log-sum-exp of each head
    return numbers * width + statistics * FLOAT32
