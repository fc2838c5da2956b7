"""Every cause by its name in a recipe. A new one is a function, its line here, its name in the recipe, and a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vexact.model.policy import Policy
from vexact.recipe import MismatchSection
from vexact.study.causes.cache import fp8_kv, int8_kv
from vexact.study.causes.decode import split_kv
from vexact.study.causes.drawing import raw_logprob, temperature
from vexact.study.causes.dtype import other_dtype
from vexact.study.causes.engine import torch_engine
from vexact.study.causes.head import bf16_head, bf16_logits, bf16_softmax
from vexact.study.causes.norm import norm_cast
from vexact.study.causes.rotary import bf16_rope, recomputed_rope
from vexact.study.causes.stale import missed_sync, stale_prefix
from vexact.study.causes.sums import split_k, tensor_parallel
from vexact.study.causes.weights import fp8_weights, int4_weights, int8_weights

Cause = Callable[[Policy, MismatchSection], Policy]  # the policy of a side that computes otherwise
StaleCause = Callable[[Policy, Policy, MismatchSection, int], Policy]  # … from that of the step before, in a step

CAUSES: Mapping[str, Cause] = {
    "split-k": split_k,
    "split-kv": split_kv,
    "tensor-parallel": tensor_parallel,
    "bf16-logits": bf16_logits,
    "bf16-head": bf16_head,
    "bf16-softmax": bf16_softmax,
    "bf16-rope": bf16_rope,
    "recomputed-rope": recomputed_rope,
    "norm-cast": norm_cast,
    "fp8-kv": fp8_kv,
    "int8-kv": int8_kv,
    "fp8-weights": fp8_weights,
    "int8-weights": int8_weights,
    "int4-weights": int4_weights,
    "other-dtype": other_dtype,
    "torch": torch_engine,
    "temperature": temperature,
    "raw-logprob": raw_logprob,
}
STALE: Mapping[str, StaleCause] = {"missed-sync": missed_sync, "stale-prefix": stale_prefix}
BY_SCHEDULE = frozenset({"split-kv", "torch"})  # scoring does not find q again: rollouts keep it
# These draw from another law than their logits', and say from which (`Ops.drawn_from`).
DRAWING = frozenset({"bf16-softmax", "temperature", "raw-logprob"})
FLIPPED = "flipped-token"  # done to rollouts, and to neither policy
