"""Every program's dump of the same rollouts reads as the same numbers; what cannot be compared is named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vexact.errors import BadInput
from vexact.study.dumps import read_column, read_pair

PROMPTS = [[5, 6], [7]]
TOKENS = [[11, 12, 13], [14, 15]]
LOGPROBS = [[-0.5, -1.25, -0.0078125], [-2.0, -0.25]]
FOUND = [[-0.5, -1.5, -0.0078125], [-2.0, -0.375]]


def lines(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def rollouts(logprobs: list[list[float]]) -> list[dict[str, Any]]:
    """The documented shape."""
    return [{"id": i, "prompt_ids": PROMPTS[i], "completion_ids": TOKENS[i], "logprobs": logprobs[i]} for i in range(2)]


def vllm() -> list[Any]:
    def at(token: int, value: float) -> dict[str, Any]:
        other = {"logprob": -0.01, "rank": 1, "decoded_token": "x"}
        return {"99": other, str(token): {"logprob": value, "rank": 2, "decoded_token": "y"}}

    return [
        {"request_id": str(i), "prompt": "…", "prompt_token_ids": PROMPTS[i], "outputs": [
            {"index": 0, "text": "…", "token_ids": TOKENS[i],
             "logprobs": [at(*pair) for pair in zip(TOKENS[i], LOGPROBS[i], strict=True)]}]}
        for i in range(2)
    ]  # fmt: skip


def completions() -> list[Any]:
    return [
        {"id": "cmpl-7f", "object": "text_completion", "choices": [
            {"index": 0, "text": "…", "logprobs": {
                "tokens": [f"token_id:{t}" for t in TOKENS[i]], "token_logprobs": LOGPROBS[i], "top_logprobs": None}}]}
        for i in range(2)
    ]  # fmt: skip


def chat() -> list[Any]:
    return [
        {"custom_id": str(i), "response": {"body": {"id": "chatcmpl-1", "choices": [
            {"index": 0, "message": {}, "prompt_token_ids": PROMPTS[i], "token_ids": TOKENS[i], "logprobs": {
                "content": [{"token": "x", "logprob": p, "bytes": [120], "top_logprobs": []} for p in LOGPROBS[i]]}}]}}}
        for i in range(2)
    ]  # fmt: skip


def sglang() -> list[Any]:
    return [
        {"text": "…", "output_ids": TOKENS[i], "meta_info": {
            "id": "b3c1", "prompt_tokens": len(PROMPTS[i]),
            "input_token_logprobs": [[None, t, None] for t in PROMPTS[i]],
            "output_token_logprobs": [[p, t, None] for p, t in zip(LOGPROBS[i], TOKENS[i], strict=True)]}}
        for i in range(2)
    ]  # fmt: skip


def verl() -> list[Any]:
    batch = {
        "prompts": [[0, *PROMPTS[1]] if i else PROMPTS[i] for i in range(2)],
        "responses": [TOKENS[0], [*TOKENS[1], 0]],
        "response_mask": [[1, 1, 1], [1, 1, 0]],
        "rollout_log_probs": [LOGPROBS[0], [*LOGPROBS[1], 0.0]],
        "old_log_probs": [FOUND[0], [*FOUND[1], 0.0]],
    }
    return [batch]


def trl() -> list[Any]:
    ids = [[[t, 99] for t in row] for row in TOKENS]
    values = [[[p, -0.01] for p in row] for row in LOGPROBS]
    return [{"prompt_ids": PROMPTS, "completion_ids": TOKENS, "logprobs": values, "logprob_token_ids": ids}]


def trl_trainer() -> list[Any]:
    return [{
        "prompt_ids": [PROMPTS[0], [0, *PROMPTS[1]]], "prompt_mask": [[1, 1], [0, 1]],
        "completion_ids": [TOKENS[0], [*TOKENS[1], 0]], "completion_mask": [[1, 1, 1], [1, 1, 0]],
        "sampling_per_token_logps": [LOGPROBS[0], [*LOGPROBS[1], None]],
        "old_per_token_logps": [FOUND[0], [*FOUND[1], float("nan")]],
        "advantages": [0.5, -0.5],
    }]  # fmt: skip


def generated() -> list[Any]:
    listed = [{**each, "request": 0, "sample": each["id"], "logprob_bits": ["0"] * 3} for each in rollouts(LOGPROBS)]
    return [{"model": "tiny", "rollouts": listed}]


@pytest.mark.parametrize(
    "made", [vllm, completions, chat, sglang, trl, trl_trainer, generated, lambda: rollouts(LOGPROBS)]
)
def test_the_same_rollouts_read_the_same_from_every_program(made: Callable[[], list[Any]], tmp_path: Path) -> None:
    paired = read_pair(lines(tmp_path / "a.jsonl", made()), lines(tmp_path / "found.jsonl", rollouts(FOUND)))
    assert paired.ids == ("0", "1") and paired.only == ((), ())
    assert [a.tolist() for a, _ in paired.pairs] == LOGPROBS
    assert [b.tolist() for _, b in paired.pairs] == FOUND
    assert paired.tokens == 5


@pytest.mark.parametrize("made, columns", [
    (verl, ("rollout_log_probs", "old_log_probs")),
    (trl_trainer, ("sampling_per_token_logps", "old_per_token_logps")),
])  # fmt: skip
def test_a_batch_that_holds_both_sides_needs_no_second_file(
    made: Callable[[], list[Any]], columns: tuple[str, str], tmp_path: Path
) -> None:
    paired = read_pair(lines(tmp_path / "batch.jsonl", made()))
    assert [name.rpartition(" ")[2] for name in paired.names] == [f"({column})" for column in columns]
    assert [(a.tolist(), b.tolist()) for a, b in paired.pairs] == list(zip(LOGPROBS, FOUND, strict=True))


@pytest.mark.parametrize(
    "made", [vllm, completions, chat, sglang, trl, trl_trainer, verl, generated, lambda: rollouts(LOGPROBS)]
)
def test_a_temperature_is_read_from_every_shape(made: Callable[[], list[Any]], tmp_path: Path) -> None:
    def read(records: list[Any]) -> list[float | None]:
        return [row.temperature for row in read_column(lines(tmp_path / "a.jsonl", records)).rows.values()]

    def tempered(record: Any, value: Any) -> Any:
        if "rollouts" in record:
            return {**record, "rollouts": [tempered(each, value) for each in record["rollouts"]]}
        if "response" in record:
            return {**record, "response": {"body": {**record["response"]["body"], "temperature": value}}}
        return {**record, "temperature": value}

    records = made()
    assert read(records) == [None, None]
    assert read([tempered(each, 0.5) for each in records]) == [0.5, 0.5]
    assert read([{**each, "temperature": 0.5} for each in records]) == [0.5, 0.5]  # outside of what a batch wraps
    if made in (trl, trl_trainer, verl):
        assert read([tempered(records[0], [0.5, 0.75])]) == [0.5, 0.75]


def test_a_list_of_temperatures_is_one_of_each_answer_of_a_prompt(tmp_path: Path) -> None:
    answers = [{"index": i, "token_ids": [3, 4], "logprobs": [-1.0, -2.0]} for i in range(2)]
    record = {"prompt_token_ids": [1], "outputs": answers, "temperature": [0.5, 0.75]}
    found = read_column(lines(tmp_path / "a.jsonl", [record])).rows.values()
    assert [row.temperature for row in found] == [0.5, 0.75]
    with pytest.raises(BadInput, match=r"temperature is \[0\.5\], not a number"):
        read_column(lines(tmp_path / "b.jsonl", [{**record, "temperature": [0.5]}]))


def test_tensors_of_a_batch_read_as_its_lists_do(tmp_path: Path) -> None:
    path = tmp_path / "batch.pt"
    torch.save({name: torch.tensor(value) for name, value in verl()[0].items() if name != "prompts"}, path)
    assert [a.tolist() for a, _ in read_pair(str(path)).pairs] == LOGPROBS
    torch.save([1, 2], path)
    with pytest.raises(BadInput, match=r"batch\.pt: not a dictionary of tensors"):
        read_pair(str(path))


def test_a_choice_beyond_the_first_has_its_index_in_its_id(tmp_path: Path) -> None:
    record = vllm()[0]
    record["outputs"].append({**record["outputs"][0], "index": 1})
    path = lines(tmp_path / "n.jsonl", [record])
    both = lines(tmp_path / "b.jsonl", [rollouts(FOUND)[0], {**rollouts(FOUND)[0], "id": "0/1"}])
    assert read_pair(path, both).ids == ("0", "0/1")


def test_our_own_parquet_reads_as_a_file_and_as_a_run(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    folder = tmp_path / "run" / "rollouts"
    folder.mkdir(parents=True)
    for step in (0, 1):
        table = pa.table({
            "step": [step] * 2, "request": pa.array([3, 4], pa.uint64()), "sample": [0, 0],
            "prompt": ["a", "b"], "completion": ["c", "d"],
            "prompt_ids": PROMPTS, "completion_ids": TOKENS,
            "sampler_logprobs": pa.array(LOGPROBS, pa.list_(pa.float32())),
            "sampler_logprobs_bits": pa.array([[0], [0]], pa.list_(pa.int32())),
            "trainer_logprobs": pa.array([FOUND[0], None] if step else FOUND, pa.list_(pa.float32())),
            "advantage": [0.5, None],
        })  # fmt: skip
        pyarrow.parquet.write_table(table, folder / f"step-{step:06d}.parquet")
    whole = read_pair(str(tmp_path / "run"))
    assert whole.ids == ("0/3/0", "0/4/0", "1/3/0") and whole.unscored == 1
    one = read_pair(
        f"{folder / 'step-000000.parquet'}:sampler_logprobs", f"{folder / 'step-000000.parquet'}:trainer_logprobs"
    )
    assert [(a.tolist(), b.tolist()) for a, b in one.pairs] == list(zip(LOGPROBS, FOUND, strict=True))


def test_decimals_of_one_float32_are_equal_bits(tmp_path: Path) -> None:
    value = float(np.float32(-7.5737281))
    shapes = [{"id": "a", "completion_ids": [1], "logprobs": [value], "short": [float(f"{value:.8g}")]}]
    path = lines(tmp_path / "a.jsonl", shapes)
    assert value != shapes[0]["short"][0]
    paired = read_pair(path, f"{path}:short")
    assert torch.equal(*(x.view(torch.int32) for x in paired.pairs[0]))


def test_compressed_text_and_a_document_of_many_lines_read_alike(tmp_path: Path) -> None:
    plain = lines(tmp_path / "found.jsonl", rollouts(FOUND))
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, rollouts(LOGPROBS))).encode()))
    document = tmp_path / "a.json"
    document.write_text(json.dumps(rollouts(LOGPROBS), indent=2))
    for path in (packed, document):
        assert [a.tolist() for a, _ in read_pair(str(path), plain).pairs] == LOGPROBS
    packed.write_bytes(packed.read_bytes()[:40])
    with pytest.raises(BadInput, match=r"a\.jsonl\.gz: not text, or damaged"):
        read_pair(str(packed), plain)


def test_masked_tokens_are_not_compared_on_either_side(tmp_path: Path) -> None:
    first = [{**each, "mask": [0, *[1] * (len(each["completion_ids"]) - 1)]} for each in rollouts(LOGPROBS)]
    first[0]["logprobs"] = [None, *LOGPROBS[0][1:]]
    second = [*rollouts(FOUND)[:1], {**rollouts(FOUND)[1], "mask": [1, 0]}]
    paired = read_pair(lines(tmp_path / "a.jsonl", first), lines(tmp_path / "b.jsonl", second))
    assert [(a.tolist(), b.tolist()) for a, b in paired.pairs] == [(LOGPROBS[0][1:], FOUND[0][1:])]
    assert paired.empty == 1


def test_rollouts_of_one_side_alone_are_told(tmp_path: Path) -> None:
    first = lines(tmp_path / "a.jsonl", rollouts(LOGPROBS)[:1])
    second = lines(tmp_path / "b.jsonl", rollouts(FOUND)[1:])
    paired = read_pair(first, second)
    assert paired.only == (("0",), ("1",)) and not paired.pairs


def changed(place: int, **fields: Any) -> list[dict[str, Any]]:
    records = rollouts(LOGPROBS)
    records[place] = {**records[place], **fields}
    return records


@pytest.mark.parametrize("records, words", [
    (changed(1, completion_ids=[14, 16]), "rollout 1: token 1 of the completion is 16 in .* and 15 in .*b.jsonl"),
    (changed(0, prompt_ids=[5, 7]), "rollout 0: token 1 of the prompt is 7 in"),
    (changed(0, prompt_ids=[5]), "rollout 0: the prompt has 1 tokens in .* and 2 in"),
    (changed(1, completion_ids=[14], logprobs=[-2.0]), "rollout 1: the completion has 1 tokens in"),
    (changed(1, logprobs=[-2.0]), r"a.jsonl: rollout 1: logprobs has 1 values for 2 tokens"),
    (changed(1, mask=[1]), "rollout 1: logprobs has 1 mask entries for 2 tokens"),
    (changed(0, logprobs=[-0.5, float("nan"), -1.0]), r"rollout 0: logprobs\[1\] is nan, not a log-probability"),
    (changed(0, logprobs=[-0.5, 0.01, -1.0]), r"logprobs\[1\] is 0.01, not a log-probability"),
    (changed(0, logprobs=[-0.5, -9999.0, -1.0]), r"logprobs\[1\] is -9999.0, not a log-probability"),
    (changed(0, logprobs=[-0.5, float("-inf"), -1.0]), r"logprobs\[1\] is -inf"),
    (changed(0, logprobs=[-0.5, None, -1.0]), r"logprobs\[1\] is None, not a number"),
    (changed(0, logprobs=[-0.5, True, -1.0]), r"logprobs\[1\] is True, not a number"),
    (changed(0, completion_ids=[11, "x", 13]), "line 1: token ids are not a list of whole numbers"),
    (changed(1, id=0), "line 2: rollout 0 is there twice"),
    ([7], "line 1: not an object with fields"),
    ([{"id": 1}], "line 1: no known shape of a rollout; fields: id"),
    ([{"input": "a", "output": "b", "score": 1.0, "step": 2}], "verl's rollout_data_dir keeps texts and no log-prob"),
    ([{"prompt": "a", "completion": "b", "advantage": 1.0}], "TRL's log of completions keeps texts"),
    ([{"choices": [{"index": 0, "token_ids": [1]}]}], "line 1: no log-probabilities; ask the server"),
    ([{"meta_info": {"id": "x"}, "output_ids": [1]}], "ask SGLang for return_logprob"),
    ([], "a.jsonl: no rollouts"),
])  # fmt: skip
def test_what_cannot_be_compared_is_named(records: list[Any], words: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", records)
    with pytest.raises(BadInput, match=words):
        read_pair(path, lines(tmp_path / "b.jsonl", rollouts(LOGPROBS)))


def test_a_rounding_above_zero_is_a_log_probability_and_keeps_its_bits(tmp_path: Path) -> None:
    first = lines(tmp_path / "a.jsonl", changed(0, logprobs=[1e-6, -1.0, -1.0]))
    paired = read_pair(first, lines(tmp_path / "b.jsonl", rollouts(LOGPROBS)))
    assert paired.pairs[0][0][0].item() == np.float32(1e-6)
    second = lines(tmp_path / "c.jsonl", changed(0, logprobs=[-0.0, -1.0, -1.0]))
    assert read_pair(first, second).pairs[0][1][0].signbit()


def test_files_and_columns_that_are_not_there_are_named(tmp_path: Path) -> None:
    records = [{**each, "other": each["logprobs"], "third": each["logprobs"]} for each in rollouts(LOGPROBS)]
    path = lines(tmp_path / "a.jsonl", records)
    for given, words in (
        ((str(tmp_path / "no.jsonl"), path), r"no\.jsonl: no such file or folder"),
        ((path, f"{path}:none"), "rollout 0: none is not there; columns: logprobs, other, third"),
        ((path, path), "the same column on both sides: logprobs"),
        ((path,), "which column holds the log-probabilities beside logprobs.*columns: logprobs, other, third"),
        ((str(tmp_path), path), r"no rollouts/step-\*\.parquet"),
    ):
        with pytest.raises(BadInput, match=words):
            read_pair(*given)
    assert read_pair(path, f"{path}:other").tokens == 5
    (tmp_path / "c:d.jsonl").write_text(Path(path).read_text())
    assert read_pair(str(tmp_path / "c:d.jsonl"), f"{path}:other").tokens == 5


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(rollouts(LOGPROBS)[0]) + "\n{broken\n")
    with pytest.raises(BadInput, match=r"a\.jsonl line 2: not JSON"):
        read_pair(str(path), str(path))
