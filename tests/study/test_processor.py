"""transformers' own generate under addressed noise: the engine's noise, the same whatever the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers import assert_same_bits, differing
from vexact.errors import BadInput
from vexact.model.origin import Addresses, Origin
from vexact.model.policy import Policy, Scored
from vexact.recipe import MismatchSection
from vexact.study.mismatch import Mismatch
from vexact.study.processor import NoiseProcessor
from vexact_kernels import load

SECTION = MismatchSection(site="logits", persistence="prefix", sigma=0.5)
IDS = torch.tensor([[5, 6, 7], [5, 6, 8]])


def scores(rows: int = 2, columns: int = 100) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def test_it_is_the_noise_that_a_run_of_that_section_meets() -> None:
    kernels = load("reference")
    noise = Mismatch(SECTION, 3).sampler(Policy.load("tiny", load("cpu"), None), 0).ops.noise  # type: ignore[attr-defined]
    processor = NoiseProcessor.of(SECTION, 3, kernels)
    assert processor.noise == noise
    at = Addresses.of([Origin(), Origin()], IDS.tolist(), [0, 0]).at(torch.tensor([2, 5]))
    assert_same_bits(processor(IDS, scores()), noise.logits(scores(), at, kernels))


@pytest.mark.parametrize("shape", ["gaussian", "laplace", "student", "one-sided"])
def test_a_row_does_not_know_its_batch_and_knows_its_prefix_and_its_seed(shape: str) -> None:
    processor = NoiseProcessor.of(replace(SECTION, shape=shape), 0, load("cpu"))
    both = processor(IDS, scores())
    assert_same_bits(processor(IDS[1:], scores()[1:])[0], both[1])
    assert_same_bits(processor(IDS.flip(0), scores().flip(0)).flip(0), both)
    for other in (
        processor(IDS + 1, scores()),
        processor(IDS[:, 1:], scores()),
        NoiseProcessor.of(replace(SECTION, shape=shape), 1, load("cpu"))(IDS, scores()),
    ):
        assert differing(other, both) > 190


def test_the_compiled_kernels_and_the_specification_draw_the_same_bits() -> None:
    compiled, specified = (
        NoiseProcessor.of(SECTION, 0, load(device))(IDS, scores()) for device in ("cpu", "reference")
    )
    assert_same_bits(compiled, specified)


def test_padding_on_the_left_is_no_part_of_a_prefix() -> None:
    processor = NoiseProcessor.of(SECTION, 0, load("cpu"))
    padded = torch.tensor([[2, 2, 5, 6, 7]])
    for mask in (torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[False, False, True, True, True]])):
        assert_same_bits(processor.over(mask)(padded, scores(1)), processor(IDS[:1], scores(1)))
    assert differing(processor(padded, scores(1)), processor(IDS[:1], scores(1))) > 90


def test_prompts_that_begin_with_the_padding_id_meet_the_noise_of_a_run() -> None:
    """GPT-2 and its kin pad with the id that texts begin with."""
    policy = Policy.load("tiny", load("cpu"), None)
    noisy = Mismatch(SECTION, 3).sampler(policy, 0)
    prompts, answers = [[0, 0, 7], [0, 5, 6, 7, 8], [9]], [[1, 2], [3, 0], [0, 4]]
    mask = torch.tensor([[0] * (5 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ids = torch.tensor([[0] * (5 - len(prompt)) + prompt for prompt in prompts])
    sequences = [
        Scored([*prompt, *answer], len(prompt), request=i)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    clean, expected = (torch.cat(list(each.logits(sequences))).view(3, 2, -1) for each in (policy, noisy))
    processor = NoiseProcessor.of(SECTION, 3, load("cpu"))
    for step in range(2):
        so_far = torch.cat([ids, torch.tensor(answers)[:, :step]], 1)
        assert_same_bits(processor.over(mask)(so_far, clean[:, step].contiguous()), expected[:, step].contiguous())
        twice = processor.over(mask)(so_far.repeat_interleave(2, 0), clean[:, step].repeat_interleave(2, 0))
        assert_same_bits(twice, expected[:, step].repeat_interleave(2, 0))
        assert differing(processor(so_far, clean[:, step].contiguous()), expected[:, step].contiguous()) > 0


@pytest.mark.parametrize("mask, words", [
    ([[1, 1], [1, 0]], "attention_mask: row 1 has padding behind a token"),
    ([[0, 1], [0, 0]], "attention_mask: row 1 holds no token"),
])  # fmt: skip
def test_a_mask_that_is_not_of_the_left_is_refused(mask: list[list[int]], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        NoiseProcessor.of(SECTION, 0, load("reference")).over(torch.tensor(mask))


@pytest.mark.parametrize("ids", [IDS[:1], torch.cat([IDS, IDS[:1]]), IDS[:, :1]])
def test_rows_of_other_prompts_than_the_masks_are_refused(ids: torch.Tensor) -> None:
    processor = NoiseProcessor.of(SECTION, 0, load("reference")).over(torch.tensor([[0, 1, 1], [1, 1, 1]]))
    processor(IDS, scores())
    with pytest.raises(BadInput, match=r"attention_mask is of 2 prompts, padded by up to 1: \d rows of \d ids"):
        processor(ids, scores(len(ids)))


def test_noise_has_the_width_of_the_section_and_excluded_tokens_stay_excluded() -> None:
    processor = NoiseProcessor.of(SECTION, 0, load("cpu"))
    clean = scores(2, 20_000)
    clean[0, 3] = float("-inf")
    noisy = processor(IDS, clean)
    assert noisy[0, 3] == float("-inf")
    assert (noisy - clean)[1].std().item() == pytest.approx(0.5, rel=0.02)
    assert_same_bits(clean, torch.where(clean.isinf(), clean, scores(2, 20_000)))  # what was given is as it was


@pytest.fixture
def model() -> Any:
    sizes: dict[str, Any] = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)).eval()


def generated(model: Any, ids: torch.Tensor, sigma: float, first: tuple[int, ...] = (), **options: Any) -> Any:
    """first: of each row, where its prompt begins behind the padding; by default nothing is padded."""
    mask = torch.tensor([[int(i >= begin) for i in range(ids.shape[1])] for begin in first or [0] * len(ids)])
    processor = NoiseProcessor.of(replace(SECTION, sigma=sigma), 0, load("cpu")).over(mask)
    chosen = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, **options}
    return model.generate(ids, attention_mask=mask, logits_processor=[processor], **chosen)


def test_generate_takes_it_and_repeats_itself(model: Any) -> None:
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(generated(model, ids, 4.0), generated(model, ids, 4.0))
    assert torch.equal(generated(model, ids, 0.0), model.generate(ids, max_new_tokens=12, do_sample=False))
    assert not torch.equal(generated(model, ids, 4.0), generated(model, ids, 0.0))


def test_a_prompt_generates_the_same_alone_and_padded_in_a_batch(model: Any) -> None:
    batch = generated(model, torch.tensor([[0, 0, 7, 8], [3, 4, 5, 6], [0, 0, 0, 8]]), 4.0, (2, 0, 1))
    for row, prompt in zip(batch, ([7, 8], [3, 4, 5, 6], [0, 0, 8]), strict=True):
        assert torch.equal(row[4:], generated(model, torch.tensor([prompt]), 4.0)[0, len(prompt) :])


def test_several_sequences_of_a_prompt_meet_the_noise_of_that_prompt(model: Any) -> None:
    ids, first = torch.tensor([[0, 0, 7], [3, 4, 5]]), (1, 0)
    options: Any = {"do_sample": True, "num_return_sequences": 3, "output_scores": True, "output_logits": True}
    found = generated(model, ids, 0.5, first, top_k=0, return_dict_in_generate=True, **options)
    alone = NoiseProcessor.of(SECTION, 0, load("cpu"))
    for step, (clean, used) in enumerate(zip(found.logits, found.scores, strict=True)):
        for row in range(6):
            own = found.sequences[row : row + 1, first[row // 3] : 3 + step]
            assert_same_bits(used[row : row + 1], alone(own, clean[row : row + 1]))


def test_generate_disturbs_the_logits_before_it_tempers_and_filters_them(model: Any) -> None:
    ids = torch.tensor([[3, 4, 5], [3, 4, 6]])
    options: Any = {"do_sample": True, "temperature": 0.5, "top_k": 9, "output_scores": True, "output_logits": True}
    found = generated(model, ids, 0.5, return_dict_in_generate=True, **options)
    processor = NoiseProcessor.of(SECTION, 0, load("cpu"))
    for step, (clean, used) in enumerate(zip(found.logits, found.scores, strict=True)):
        noisy = processor(found.sequences[:, : 3 + step], clean)
        kept = noisy >= noisy.topk(9).values[:, -1:]
        assert_same_bits(used, torch.where(kept, noisy / 0.5, -torch.inf))
        assert differing(noisy, clean) > 100


@pytest.mark.parametrize("section, words", [
    (MismatchSection(site="logits", sigma=0.1), "mismatch.persistence = fresh"),
    (MismatchSection(site="hidden", persistence="prefix", sigma=0.1), "mismatch.site = hidden"),
    (MismatchSection(site="logits", persistence="prefix", k3=1e-3), "mismatch.k3 is solved for on a policy"),
    (MismatchSection(), "mismatch.site = off"),
    (replace(SECTION, side="trainer"), "mismatch.side = trainer: a logits processor knows sampler only"),
    (replace(SECTION, side="both-shared"), "mismatch.side = both-shared"),
    (replace(SECTION, side="both-independent"), "mismatch.side = both-independent"),
    (replace(SECTION, start=2), "mismatch.start = 2: a logits processor knows no steps"),
    (replace(SECTION, stop=9), "mismatch.stop = 9"),
    (replace(SECTION, ramp=4), "mismatch.ramp = 4"),
])  # fmt: skip
def test_what_a_processor_cannot_know_is_refused(section: MismatchSection, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        NoiseProcessor.of(section, 0, load("reference"))


@pytest.mark.parametrize("mask", [torch.ones(3), torch.tensor([[-1e9, 0.0, 0.0]]), torch.tensor([[2, 1, 1]])])
def test_what_is_no_mask_of_prompts_is_refused(mask: torch.Tensor) -> None:
    section = MismatchSection(site="logits", persistence="prefix", sigma=0.05)
    with pytest.raises(BadInput, match=r"attention_mask: .* not \[B, T\] of 1 and 0"):
        NoiseProcessor.of(section, seed=0).over(mask)
