"""The checks of the forward: each computes something in another way and counts the values whose bits moved."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from operator import add

import torch
from torch import Tensor

from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.rollout.request import Request
from vexact.testing import Comparison, compare_bits
from vexact.verification.result import CHUNKS, SAMPLED, THREADS
from vexact.verification.subject import ALL, TEMPERATURES, Replaced, Subject
from vexact_kernels import PORTABLE, Kernels, available, load

EDGES = (63, 64, 65, 127, 128, 129)
HUGE = 1e30
FAINT = 2.0**-124  # so that activations and gradients become subnormal float32 numbers
SLOW = ("cpu:baseline", "reference")
NO_CPU = "no thread of a CPU computes here"
OTHER_BITS = "this profile gives other bits than a CPU"


@dataclass(frozen=True)
class Planned:
    """A line of the table. kind: which of KINDS it shows, and then it runs even when time is up, or empty.

    absent: why there is nothing to check, or empty.
    """

    name: str
    kind: str
    run: Callable[[Subject], Comparison]
    absent: str = ""


def forward_plan(kernels: Kernels, small: bool) -> list[Planned]:
    """The lines about sampling and scoring. kernels: those under verification."""
    nan, no_cpu = float("nan"), absence(kernels)
    return [
        *(
            Planned(f"{SAMPLED}, temperature {t:g}", SAMPLED, partial(sampler_is_scorer, temperature=t))
            for t in TEMPERATURES
        ),
        *(Planned(f"chunks of {size}", f"chunks of {size}", partial(chunks, size=size)) for size in CHUNKS),
        Planned("chunks whole, alone", "chunks whole", alone),
        Planned("prompts of " + ", ".join(map(str, EDGES)), "page edges", page_edges),
        Planned("batch of one", "batch of one", batch_of_one),
        Planned("other orders", "orders", orders),
        Planned("micro-batches of log-probabilities", "micro-batches", micro_batches),
        Planned("shuffled pages", "page layout", shuffled_pages),
        Planned("pages full of NaN", "page contents", partial(filled_pages, value=nan)),
        *(Planned(f"threads {n}", f"threads {n}", partial(threads, count=n), no_cpu) for n in THREADS),
        Planned("flush-denormal: sampler", "flush-denormal: sampler", flushed_sampler, no_cpu),
        subnormal_line(kernels, "logits", flushed_logits, faint_logits),
        *implementation_lines(kernels, small, "instruction sets", implementation),
        Planned("pages full of 1e30", "", partial(filled_pages, value=HUGE)),
        Planned("huge batch mates", "", partial(mates, value=HUGE)),
        Planned("NaN batch mates", "", partial(mates, value=nan)),
    ]


def absence(kernels: Kernels) -> str:
    """Why the CPU's threads and their flush mode are nothing to check, empty where a CPU computes."""
    on_gpu = kernels.device.type != "cpu" or kernels.name.startswith("cuda")  # the latter: interpreted on CPU tensors
    return NO_CPU if on_gpu else ""


def others(kernels: Kernels, small: bool) -> list[Kernels]:
    """What must give the same bits: instruction sets and the reference.

    Slow ones on a small model, or where there is no other. For a large model on a GPU the CPU's best set stands for
    all. None in a profile with bits of its own.
    """
    if kernels.profile != PORTABLE:
        return []
    every = [
        other for other in (*map(partial(load, "cpu"), available()), load("reference")) if other.name != kernels.name
    ]
    quick = [other for other in every if other.name not in SLOW and not absence(kernels)]
    return every if small else quick or every[:1]


def against(run: Callable[[Subject, Kernels], Comparison], other: Kernels) -> Callable[[Subject], Comparison]:
    """The check that compares with that implementation."""
    return lambda subject: run(subject, other)


def implementation_lines(
    kernels: Kernels, small: bool, kind: str, run: Callable[[Subject, Kernels], Comparison], prefix: str = ""
) -> list[Planned]:
    """A line for each other implementation, or one that says why there is none."""
    found = others(kernels, small)
    if not found:
        return [Planned(kind, kind, against(run, kernels), OTHER_BITS)]
    what = "as on a CPU," if absence(kernels) else "instruction set"
    return [Planned(f"{prefix}{what} {other.name.removeprefix('cpu:')}", kind, against(run, other)) for other in found]


def subnormal_line(
    kernels: Kernels,
    what: str,
    flushed: Callable[[Subject], Comparison],
    faint: Callable[[Subject, Kernels], Comparison],
) -> Planned:
    """Subnormal numbers under the flush mode of the CPU's threads; of a GPU, which has no such mode, as on a CPU."""
    kind = f"flush-denormal: {what}"
    if not absence(kernels):
        return Planned(f"flush-denormal: subnormal {what}", kind, flushed)
    found = others(kernels, small=False)
    return Planned(
        f"subnormal {what}, as on a CPU", kind, against(faint, [*found, kernels][0]), "" if found else OTHER_BITS
    )


def sampler_is_scorer(subject: Subject, temperature: float) -> Comparison:
    """The theorem itself: what the sampler recorded against what training computes."""
    rollouts = [rollout for rollout in subject.rollouts if rollout.temperature == temperature]
    return compare_bits(recorded(rollouts), subject.rescore(rollouts))


def chunks(subject: Subject, size: int) -> Comparison:
    """On sequences that no other size is given, so that no logit counts twice."""
    sequences = subject.random_sequences(salt=1000 * (1 + size))
    whole = subject.logits_in_cuts(sequences, ALL)
    return compare_bits(whole, subject.logits_in_cuts(sequences, size, fill=float("nan")))


def alone(subject: Subject) -> Comparison:
    """Every sequence whole and without mates."""
    each = [subject.logits_in_cuts([sequence], ALL) for sequence in subject.sequences]
    half = subject.logits_in_cuts([subject.sequences[0][: len(subject.sequences[0]) // 2]], ALL)
    return compare_bits(subject.whole, torch.cat(each)) + compare_bits(subject.whole[: len(half)], half)


def page_edges(subject: Subject) -> Comparison:
    """Prompts that end around the edge of a page, cut in another way each time."""
    tokens = min(8, subject.sizes.tokens)
    requests = [
        Request(5000 + edge, subject.tokens(subject.fitting(edge, tokens), edge), max_tokens=tokens) for edge in EDGES
    ]
    first = subject.sample(requests)
    again = [subject.sample(requests, chunk=chunk, tokens_per_step=96) for chunk in (16, 64)]
    found = compare_bits(recorded(first), subject.rescore(first))
    return reduce(add, (same_rollouts(first, other) for other in again), found)


def batch_of_one(subject: Subject) -> Comparison:
    requests = subject.few_requests[:4]
    ids = {request.id for request in requests}
    many = [rollout for rollout in subject.few if rollout.request in ids]
    return same_rollouts(many, subject.sample(requests, running=1))


def orders(subject: Subject) -> Comparison:
    """Requests reversed, and shuffled with few running at a time."""
    shuffled = random.Random(1).sample(subject.few_requests, len(subject.few_requests))
    found = same_rollouts(subject.few, subject.sample(subject.few_requests[::-1], chunk=16))
    return found + same_rollouts(subject.few, subject.sample(shuffled, running=3, chunk=7))


def micro_batches(subject: Subject) -> Comparison:
    """Scored one by one, a few at a time, all together, and in another order."""
    expected = recorded(subject.few)
    found = reduce(
        add, (compare_bits(expected, subject.rescore(subject.few, at_once)) for at_once in (1, 200, ALL)), Comparison()
    )
    order = random.Random(2).sample(range(len(subject.few)), len(subject.few))
    shuffled = [subject.few[i] for i in order]
    return found + compare_bits(recorded(shuffled), subject.rescore(shuffled, 300))


def shuffled_pages(subject: Subject) -> Comparison:
    return same_rollouts(subject.few, subject.sample(subject.few_requests, shuffled=True, chunk=64))


def filled_pages(subject: Subject, value: float) -> Comparison:
    """Against memory of zeros, and not against what a fresh pool happens to hold."""
    zeros = subject.sample(subject.few_requests, fill=0.0)
    return same_rollouts(subject.few, zeros) + same_rollouts(zeros, subject.sample(subject.few_requests, fill=value))


def mates(subject: Subject, value: float) -> Comparison:
    """Logits of a batch with and without sequences whose every activation is as large as the dtype allows, or NaN."""
    sequences = subject.sequences[:2]
    mate = subject.tokens(70, salt=9)
    crowd = [mate, sequences[0], mate, *sequences[1:], mate]
    rows = embedded(subject, crowd)
    is_mate = torch.cat([torch.full((len(tokens),), tokens is mate) for tokens in crowd]).to(rows.device)
    rows[is_mate] = min(value, torch.finfo(rows.dtype).max)
    ops = subject.policy.ops.around(Replaced(subject.kernels, rows))
    logits = subject.logits_in_cuts(crowd, ALL, ops=ops)
    return compare_bits(subject.logits_in_cuts(sequences, ALL), logits[~is_mate])


def threads(subject: Subject, count: int) -> Comparison:
    with thread_count(count):
        rollouts = subject.sample(subject.few_requests)
        logits = subject.logits_in_cuts(subject.sequences[:1], ALL)
    return same_rollouts(subject.few, rollouts) + compare_bits(subject.whole[: len(logits)], logits)


def flushed_sampler(subject: Subject) -> Comparison:
    expected = subject.few
    with flush_denormal():
        rollouts = subject.sample(subject.few_requests)
        scored = subject.rescore(expected)
    return same_rollouts(expected, rollouts) + compare_bits(recorded(expected), scored)


def flushed_logits(subject: Subject) -> Comparison:
    """Activations so faint that they are subnormal."""
    rows = faint_rows(subject)
    expected = logits_of(rows, subject, subject.policy)
    with flush_denormal():
        logits = logits_of(rows, subject, subject.policy)
    return compare_bits(expected, logits)


def faint_logits(subject: Subject, other: Kernels) -> Comparison:
    """The same activations computed by another implementation."""
    rows = faint_rows(subject)
    policy = computed_by(subject, other)
    return compare_bits(logits_of(rows, subject, subject.policy), logits_of(rows, subject, policy))


def faint_rows(subject: Subject) -> Tensor:
    """The embedding's rows [tokens, D] of the first sequence, made subnormal."""
    return (embedded(subject, subject.sequences[:1]).float() * FAINT).to(subject.policy.dtype)


def logits_of(rows: Tensor, subject: Subject, policy: Policy) -> Tensor:
    """Logits [tokens, V] of the first sequence where its embedding's rows are these."""
    ops = policy.ops.around(Replaced(policy.ops.kernels, rows.to(policy.device)))
    return subject.logits_in_cuts(subject.sequences[:1], ALL, policy, ops)


def implementation(subject: Subject, other: Kernels) -> Comparison:
    """The same weights computed by another implementation."""
    policy = computed_by(subject, other)
    if other.name == "reference":
        tokens = subject.sequences[0][:70]
        expected = subject.logits_in_cuts([tokens], ALL)
        return compare_bits(plain(expected), plain(subject.logits_in_cuts([tokens], 66, policy)))
    logits = subject.logits_in_cuts(subject.sequences[:1], ALL, policy)
    found = compare_bits(plain(subject.whole[: len(logits)]), plain(logits))
    return found + same_rollouts(subject.few, subject.sample(subject.few_requests, policy))


def plain(x: Tensor) -> Tensor:
    """Every NaN is torch's own: payloads are no part of what implementations share."""
    return x.masked_fill(x.isnan(), float("nan"))


def computed_by(subject: Subject, other: Kernels) -> Policy:
    """The policy on another implementation."""
    policy = subject.clean
    stacked = policy.transformer.parameters.stacked(policy.ops.kernels)
    return subject.view(Policy.build(policy.config, stacked.pop, other, policy.dtype, policy.version))


def embedded(subject: Subject, sequences: Sequence[Sequence[int]]) -> Tensor:
    """The embedding's rows [tokens, D] of sequences behind one another."""
    ids = torch.tensor([token for tokens in sequences for token in tokens]).to(subject.policy.device)
    return subject.kernels.embed(ids, subject.policy.transformer.embedding.packed)


def recorded(rollouts: Sequence[Rollout]) -> Tensor:
    """float32 [completion tokens of all rollouts]: what the sampler wrote down."""
    return torch.cat([rollout.logprobs for rollout in rollouts])


def same_rollouts(left: Sequence[Rollout], right: Sequence[Rollout]) -> Comparison:
    """Log-probabilities; ids as well where they part, since another id makes every later value another one."""
    found = _same_integers(left, right, lambda rollout: [len(rollout.completion)], "number of tokens")
    if not found.differ:
        found = _same_integers(left, right, lambda rollout: rollout.completion, "token ids")
    return found if found.differ else compare_bits(recorded(left), recorded(right))


def _same_integers(
    left: Sequence[Rollout], right: Sequence[Rollout], of: Callable[[Rollout], Sequence[int]], where: str
) -> Comparison:
    first, second = (torch.tensor([number for rollout in side for number in of(rollout)]) for side in (left, right))
    return compare_bits(first, second, where)


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def flush_denormal() -> Iterator[None]:
    """The calling thread flushes subnormal numbers inside, and does not outside, which is how a process begins."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
