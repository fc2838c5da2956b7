"""`vexact calibrate --model`: two engines that run here, what they are told, and the dose that comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import assert_same_bits, differing
from vexact import cli
from vexact.model.policy import Policy
from vexact.model.tokenizer import load_tokenizer
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.verification.control import huggingface, logits_alone, logits_batched
from vexact.verification.padded import sample_padded
from vexact_kernels import load

Found = dict[str, Any]
FEW = ("--tokens", "600")


@pytest.fixture
def calibrate(capsys: pytest.CaptureFixture[str]) -> Callable[..., Found]:
    def call(*argv: str) -> Found:
        assert cli.main(["calibrate", *argv, "--json"]) == 0, capsys.readouterr().err
        found: Found = json.loads(capsys.readouterr().out)
        return found

    return call


def measures(found: Found) -> dict[str, float]:
    given: dict[str, float] = found["distribution"]["measures"]
    return given


def test_a_preset_reproduces_its_dose_on_tokens_that_it_was_not_solved_on(calibrate: Callable[..., Found]) -> None:
    found = calibrate("--model", "tiny", "--mismatch", "preset=fp8", "--tokens", "1500")
    dose, target = found["dose"], 3e-3
    assert dose["target"] == target
    assert dose["divergence"] == pytest.approx(target, rel=0.01)
    assert dose["fresh"] == pytest.approx(target, rel=0.1)
    assert dose["k3"] == measures(found)["k3"] == pytest.approx(target, abs=5 * dose["k3_error"])
    assert measures(found)["tokens"] >= 1500 and found["fit"]["best"]["law"] == "gaussian"
    doubled = calibrate("--model", "tiny", "--mismatch", "site=logits", f"sigma={2 * dose['sigma']}", *FEW)
    assert "dose" not in doubled
    assert measures(doubled)["k3"] > target + 5 * dose["k3_error"]  # a size that is wrong is seen


def test_the_placebo_and_the_exact_side_differ_in_nothing(calibrate: Callable[..., Found]) -> None:
    shared = calibrate("--model", "tiny", "--mismatch", "site=logits", "sigma=0.3", "side=both-shared", *FEW)
    assert measures(shared)["differing"] == 0 and shared["fit"]["mismatch"] == {"preset": "none"}
    for side in ("trainer", "sampler"):
        other = calibrate("--model", "tiny", "--mismatch", "site=logits", "sigma=0.3", f"side={side}", *FEW)
        assert measures(other)["differing"] > 500
        assert ["sigma=0.3" in other[name] for name in ("sampler", "trainer")] == [side == "sampler", side == "trainer"]


def test_a_dose_on_the_trainers_side_is_confirmed_on_that_side(calibrate: Callable[..., Found]) -> None:
    dose = calibrate("--model", "tiny", "--mismatch", "preset=fp8", "side=trainer", "--tokens", "1500")["dose"]
    assert dose["fresh"] == pytest.approx(3e-3, rel=0.1)


@pytest.mark.parametrize("words", [("cause=fp8-kv",), ("site=record", "sigma=0.1"), ("preset=weights-0.02",)])
def test_a_cause_the_record_and_weights_are_measured_too(
    calibrate: Callable[..., Found], words: tuple[str, ...]
) -> None:
    found = measures(calibrate("--model", "tiny", "--mismatch", *words, *FEW))
    assert found["k3"] > 1e-5 and found["differing"] > 500


def test_a_dump_is_read_back_and_scored_again_as_it_was(calibrate: Callable[..., Found], tmp_path: Path) -> None:
    path = str(tmp_path / "pairs.jsonl")
    first = calibrate("--model", "tiny", "--mismatch", "preset=bf16-moe", "--dump", path, *FEW)
    read, scored = calibrate(path), calibrate(path, "--model", "tiny")
    assert read["distribution"] == scored["distribution"] == first["distribution"]
    assert read["fit"] == first["fit"]
    first_row, *rest = (json.loads(line) for line in Path(path).read_text().splitlines())
    masked = {**first_row, "mask": [0] + [1] * (len(first_row["logprobs"]) - 1)}
    Path(path).write_text("\n".join(map(json.dumps, [masked, *rest])))
    assert measures(calibrate(path, "--model", "tiny"))["tokens"] == measures(first)["tokens"] - 1
    other = calibrate(path, "--model", "tiny", "--dtype", "bfloat16")
    assert measures(other)["k3"] > 1.1 * measures(first)["k3"]  # another exact side is seen


def test_a_dump_is_scored_at_its_own_temperature(calibrate: Callable[..., Found], tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl"
    first = calibrate("--model", "tiny", "--mismatch", "preset=fp16", "--temperature", "0.5", "--dump", str(path), *FEW)
    assert calibrate(str(path), "--model", "tiny")["distribution"] == first["distribution"]
    assert calibrate(str(path), "--model", "tiny", "--temperature", "0.5")["distribution"] == first["distribution"]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    silent = [{key: value for key, value in each.items() if key != "temperature"} for each in records]
    path.write_text("\n".join(map(json.dumps, silent)))
    assert calibrate(str(path), "--model", "tiny", "--temperature", "0.5")["distribution"] == first["distribution"]
    assert (
        measures(calibrate(str(path), "--model", "tiny"))["k3"] > 100 * measures(first)["k3"]
    )  # at 1, of which it is not
    path.write_text("\n".join(map(json.dumps, [*silent[:3], *records[3:]])))  # the flag is for the first three alone
    assert calibrate(str(path), "--model", "tiny", "--temperature", "0.5")["distribution"] == first["distribution"]


def test_rollouts_of_one_dump_are_scored_at_several_temperatures(
    calibrate: Callable[..., Found], tmp_path: Path
) -> None:
    """As a run's parquet holds them, beside the bits that score them equal."""
    import pyarrow as pa
    import pyarrow.parquet

    requests = [Request(i, [5 + i, 6], temperature=t, max_tokens=20) for i, t in enumerate((0.5, 1.0, 1.7, 0.0))]
    rollouts = Sampler(Policy.load("tiny", load("cpu"), torch.float32)).run(requests)
    columns = {
        "step": [0] * 4,
        "request": [rollout.request for rollout in rollouts],
        "sample": [0] * 4,
        "prompt_ids": [list(rollout.prompt) for rollout in rollouts],
        "completion_ids": [list(rollout.completion) for rollout in rollouts],
        "sampler_logprobs": pa.array([rollout.logprobs.numpy() for rollout in rollouts], pa.list_(pa.float32())),
        "temperature": [rollout.temperature for rollout in rollouts],
    }
    path, narrow = tmp_path / "step-000000.parquet", tmp_path / "narrow.parquet"
    pyarrow.parquet.write_table(pa.table(columns), path)
    found = measures(calibrate(str(path), "--model", "tiny"))
    assert found["tokens"] == 80 and found["differing"] == 0
    only = {name: values[:1] for name, values in columns.items()} | {"temperature": pa.array([0.7], pa.float32())}
    pyarrow.parquet.write_table(pa.table(only), narrow)
    calibrate(str(narrow), "--model", "tiny", "--temperature", "0.7")  # one float32: no contradiction


@pytest.mark.parametrize("recorded, flags, words", [
    (0.5, ("--temperature", "1"), "--temperature is 1.0, and {} says 0.5 of rollout 0: leave out the flag"),
    (None, ("--temperature", "-1"), "--temperature is -1.0, must be 0 or a normal float32 number"),
    (None, ("--temperature", "1e300"), "--temperature is 1e+300, must be 0 or a normal float32 number"),
    (-0.5, (), "{}: rollout 0: temperature is -0.5, must be 0 or a normal float32 number"),
    (float("nan"), (), "{}: rollout 0: temperature is nan, must be 0 or a normal float32 number"),
    ("hot", (), "{} line 1: temperature is 'hot', not a number"),
])  # fmt: skip
def test_a_temperature_that_contradicts_the_dump_or_is_none_is_refused(
    recorded: Any, flags: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.jsonl"
    row = {"prompt_ids": [1], "completion_ids": [5], "logprobs": [-1.0], "temperature": recorded}
    path.write_text(json.dumps(row))
    assert cli.main(["calibrate", str(path), "--model", "tiny", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == f"vexact: {words.format(path)}\n"


def test_transformers_samples_by_seed_and_its_dtype_is_seen(calibrate: Callable[..., Found], tmp_path: Path) -> None:
    def dumped(*flags: str) -> tuple[Found, str]:
        path = tmp_path / "pairs.jsonl"
        found = calibrate("--model", "tiny", "--against", "transformers", "--dump", str(path), *FEW, *flags)
        return found, path.read_text()

    (wide, text), (again, same), (narrow, _) = dumped(), dumped(), dumped("--against-dtype", "bfloat16")
    assert measures(wide) == measures(again) and text == same
    assert dumped("--seed", "1")[1] != text
    assert measures(wide)["differing"] > 0 and measures(wide)["abs_max"] < 1e-4
    assert 1e-5 < measures(narrow)["k3"] < 1e-2
    assert "transformers bfloat16" in narrow["sampler"] and "vexact float32" in narrow["trainer"]


def test_prompts_come_from_texts_ids_or_a_recipe(calibrate: Callable[..., Found], tmp_path: Path) -> None:
    texts = ["One and two.", "Three"]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    ids = [{"prompt_ids": load_tokenizer("tiny").encode(text)} for text in texts]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, [ids[0], {"prompt": texts[1]}])))
    noise = ("--model", "tiny", "--mismatch", "preset=fp8", *FEW)
    given, same, other = (
        calibrate(*noise, "--prompts", str(tmp_path / name), "--seed", seed)
        for name, seed in (("a.txt", "0"), ("b.jsonl", "0"), ("a.txt", "1"))
    )
    assert given == same != other
    recipe = tmp_path / "r.yaml"
    recipe.write_text("sampling: {max_tokens: 5}\nmismatch: {site: logits, k3: 0.01}\n")
    own = calibrate("--model", "tiny", "--recipe", str(recipe), *FEW)
    assert own["dose"]["target"] == 0.01 and own["distribution"]["sequences"]["longest"] == 5
    over = calibrate("--model", "tiny", "--block", str(recipe), "--mismatch", "k3=0.02", *FEW)
    assert over["dose"]["target"] == 0.02


BOTH = ("--model", "tiny", "--mismatch", "preset=fp8")


@pytest.mark.parametrize("argv, words", [
    ((), "A, a file or a run's folder, is needed, or --model"),
    (("--model", "tiny"), "--model: with what mismatch?"),
    ((*BOTH, "--against", "transformers"), "--against transformers is a mismatch of its own: leave out --mismatch"),
    (("--model", "tiny", "--block", "b", "--against", "transformers"), "leave out --block"),
    ((*BOTH, "--against-dtype", "bfloat16"), "--against-dtype is that of the engine which --against names"),
    ((*BOTH, "--prompts", "a", "--recipe", "b"), "--recipe and --prompts are two sources"),
    (("a.jsonl", "--tokens", "3"), "--tokens goes with --model"),
    (("a.jsonl", "--dtype", "float32"), "--dtype goes with --model"),
    (("a.jsonl", *BOTH), "--mismatch says how to sample, and the tokens are those of a.jsonl"),
    (("a.jsonl", "b.jsonl", "--model", "tiny"), "b.jsonl: --model scores the tokens of A"),
    ((*BOTH, "--tokens", "0"), "--tokens is 0"),
    ((*BOTH, "--temperature", "0"), "sampling.temperature = 0.0 must be above 0"),
    ((*BOTH, "--max-tokens", "4000"), "prompt 0: 384 tokens and max_tokens 4000 exceed the model's 2048 positions"),
    ((*BOTH, "--prompts", "nowhere.txt"), "--prompts: nowhere.txt: cannot be read"),
    (("--model", "tiny", "--block", "nowhere.yaml"), "nowhere.yaml: no such file"),
    (("--model", "tiny", "--mismatch", "preset"), "--mismatch preset: is written key=value"),
    (("--model", "tiny", "--mismatch", "cause=missed-sync"), "mismatch.cause = missed-sync is seen only in a run"),
    (("--model", "tiny", "--mismatch", "site=gradients", "side=trainer"), "mismatch.site = gradients is seen only"),
])  # fmt: skip
def test_flags_that_contradict_are_one_line_and_two(
    argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["calibrate", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and words in captured.err


@pytest.mark.parametrize("line, words", [
    ('{"prompt_ids": []}', "line 2: has neither prompt_ids"),
    ('{"prompt_ids": [1, "a"]}', "line 2: has neither prompt_ids"),
    ("[1, 2]", "line 2: has neither prompt_ids"),
    ("{", "line 2: not JSON"),
    ('{"prompt_ids": [99999]}', "prompt 1: token id 99999 is outside"),
])  # fmt: skip
def test_a_prompt_that_cannot_be_asked_is_named(
    line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a"}}\n{line}\n')
    assert cli.main(["calibrate", *BOTH, "--prompts", str(tmp_path / "p.jsonl")]) == 2
    assert words in capsys.readouterr().err


def test_a_dump_without_prompts_or_with_texts_cannot_be_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, whole = tmp_path / "d.jsonl", {"prompt_ids": [1], "completion_ids": [5], "logprobs": [-1.0]}
    for missing in ("prompt_ids", "completion_ids"):
        path.write_text(json.dumps({key: value for key, value in whole.items() if key != missing}))
        assert cli.main(["calibrate", str(path), "--model", "tiny"]) == 2
        assert str(path) in capsys.readouterr().err


def test_transformers_records_what_it_drew_from() -> None:
    policy = Policy.load("tiny", load("cpu"), torch.float32)
    model = huggingface(policy)
    prompts, end = [[5, 6, 7], [9], [30, 40, 50, 60, 70]], frozenset(range(0, 320, 9))
    requests = [Request(i, prompt, 2, 0.7 + 0.3 * i, 0, 12, end) for i, prompt in enumerate(prompts)]
    rollouts = sample_padded(model, requests, seed=4)
    assert [rollout.id for rollout in rollouts] == [(i, sample) for i in range(3) for sample in range(2)]
    assert len({rollout.completion[0] for rollout in rollouts}) > 1
    for rollout in rollouts:
        *before, last = rollout.completion
        assert not end & set(before)
        assert rollout.finish == ("stop" if last in end else "length")
        assert rollout.finish == "stop" or len(rollout.completion) == 12
        logits, temperature = logits_alone(model, [rollout])[0], rollout.temperature
        tempered, raw = (
            torch.log_softmax(each, -1)[range(len(logits)), list(rollout.completion)]
            for each in (logits / temperature, logits)
        )
        assert (tempered - rollout.logprobs).abs().max() < 1e-4
        assert temperature == 1.0 or (raw - rollout.logprobs).abs().max() > 1e-2  # the mutant: not tempered


def test_a_padded_batch_is_fed_the_same_way_for_control_and_for_sampling() -> None:
    model = huggingface(Policy.load("tiny", load("cpu"), torch.float32))
    requests = [Request(i, prompt, 1, 1.0, 0, 6) for i, prompt in enumerate([[5, 6, 7], [9], [30, 40, 50, 60]])]
    rollouts = sample_padded(model, requests, seed=0)
    for logits, rollout in zip(logits_batched(model, rollouts, 6), rollouts, strict=True):
        found = torch.log_softmax(logits, -1)[range(6), list(rollout.completion)]
        assert_same_bits(found, rollout.logprobs)
    narrow = huggingface(Policy.load("tiny", load("cpu"), torch.float32), torch.bfloat16)
    assert differing(sample_padded(narrow, requests, seed=0)[0].logprobs, rollouts[0].logprobs) > 0


def test_of_many_prompts_a_few_are_taken_evenly(calibrate: Callable[..., Found], tmp_path: Path) -> None:
    prompts, dump = tmp_path / "p.jsonl", tmp_path / "d.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt_ids": [i]}) for i in range(100)))
    calibrate("--model", "tiny", "--against", "transformers", "--prompts", str(prompts), "--max-tokens", "8",
              "--tokens", "32", "--dump", str(dump))  # fmt: skip
    asked = [json.loads(line)["prompt_ids"][0] for line in dump.read_text().splitlines()]
    assert asked[:4] == [0, 25, 50, 75]
