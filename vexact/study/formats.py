"""What programs leave of their rollouts: one record of a dump as rows of per-token log-probabilities.

Known shapes, each recognised by its fields; lists have one entry a completion token unless said otherwise.

| from | fields |
|---|---|
| vexact, a run's `rollouts/*.parquet` | step, request, sample, prompt_ids, completion_ids, *sampler_logprobs*, trainer_logprobs |
| vexact, `generate --json` | rollouts: request, sample, prompt_ids, completion_ids, *logprobs* |
| JSONL, a rollout a line | id, prompt_ids, completion_ids, *logprobs*, any further columns; mask: 0 where a token is not compared |
| vLLM, `RequestOutput` | request_id, prompt_token_ids, outputs: index, token_ids, *logprobs*: a mapping of ids to {logprob} |
| vLLM and SGLang, OpenAI's completions | choices: index, *logprobs*: tokens, token_logprobs; token_ids, prompt_token_ids where asked for |
| vLLM and SGLang, OpenAI's chat | choices: index, *logprobs*: content: token, logprob; the same where asked for |
| SGLang, `/generate` and `Engine` | meta_info: *output_token_logprobs*: (logprob, id, text); output_ids |
| verl, a `DataProto`'s batch | prompts, responses, response_mask, *rollout_log_probs*, old_log_probs |
| TRL, the server's answer and a rollout function's | prompt_ids, completion_ids, *logprobs*, logprob_token_ids |
| TRL, what its trainer makes of it | prompt_ids, prompt_mask, completion_ids, completion_mask, *sampling_per_token_logps*, old_per_token_logps |

In *slant*: the column taken where none is named. A record may hold one rollout or lists of them. A rollout's id is its
`id`, its `custom_id` or vLLM's `request_id`, for ours step/request/sample; elsewhere its number in the file, as servers
give random ids. A choice beyond the first has its index behind a slash.

Any shape may also hold `temperature`, as ours do: what logits were divided by before the log-probabilities were taken,
one number for a record or a list of one a rollout. `vexact calibrate --model` scores each rollout at its own, and
`vexact compare` says where the two sides of a rollout have different ones. 0 is greedy sampling, whose
log-probabilities are those at 1; where a server recorded raw ones, as vLLM does by default, it is 1.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vexact.errors import BadInput

TOKENS = ("completion_ids", "responses", "token_ids", "output_ids")
PROMPTS = ("prompt_ids", "prompt_token_ids", "prompts")
MASKS = ("mask", "completion_mask", "response_mask")
NOT_COLUMNS = {
    *TOKENS,
    *PROMPTS,
    *MASKS,
    "prompt_mask",
    "attention_mask",
    "input_ids",
    "position_ids",
    "logprob_token_ids",
}
SAMPLER = ("logprobs", "sampler_logprobs", "rollout_log_probs", "sampling_per_token_logps")
TRAINER = ("trainer_logprobs", "old_log_probs", "old_per_token_logps")
TOKEN_ID = "token_id:"  # before the number where a server was asked to return ids for tokens

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A rollout. prompt: None where the dump does not say. tokens: ids, or texts where it has no ids.

    columns: raw lists by name, None where the dump says that nothing was found. live: 0 where a token is not compared.
    temperature: as it was found; None where the dump does not say.
    """

    id: str
    prompt: tuple[int, ...] | None
    tokens: tuple[int | str, ...]
    columns: Mapping[str, Sequence[Any] | None]
    live: tuple[int, ...] | None = None
    temperature: float | None = None

    @property
    def divisor(self) -> float | None:
        """The temperature that the log-probabilities are at: those of greedy sampling, 0, are at 1."""
        return 1.0 if self.temperature == 0 else self.temperature


def rows_of(record: Any, first: int, where: str) -> list[Row]:
    """The rollouts of one record. first: how many the file held before it. Raises BadInput, beginning with `where`."""
    if not isinstance(record, Mapping):
        raise BadInput(f"{where}: not an object with fields")
    if isinstance(record.get("rollouts"), list):
        inner = [{**_outer(record), **each} if isinstance(each, Mapping) else each for each in record["rollouts"]]
        return [row for i, each in enumerate(inner) for row in rows_of(each, first + i, where)]
    if isinstance(record.get("response"), Mapping) and isinstance(record["response"].get("body"), Mapping):
        record = {**_outer(record), **record["response"]["body"], "custom_id": record.get("custom_id")}
    if isinstance(record.get("outputs"), list):
        return _vllm(record, first, where)
    if isinstance(record.get("choices"), list):
        return _openai(record, first, where)
    if isinstance(record.get("meta_info"), Mapping):
        return [_sglang(record, first, where)]
    tokens = _first(record, TOKENS)
    if tokens is None:
        raise BadInput(f"{where}: {_unknown(record)}")
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], list):
        unpacked = enumerate(_unpacked(record, len(tokens), where))
        return [_unpadded(_plain(each, first + i, where)) for i, each in unpacked]
    return [_plain(record, first, where)]


def _plain(record: Record, number: int, where: str) -> Row:
    tokens = _ids(_first(record, TOKENS), where)
    prompt = _first(record, PROMPTS)
    if prompt is not None:
        shown = record.get("prompt_mask")
        prompt = prompt if shown is None else [token for token, live in zip(prompt, shown, strict=False) if live]
    mask = _first(record, MASKS)
    columns = {name: _column(name, value, record) for name, value in record.items() if _is_column(name, value)}
    return Row(
        id=_named(record, number),
        prompt=None if prompt is None else _ids(prompt, where),
        tokens=tokens,
        columns=columns,
        live=None if mask is None else tuple(int(bool(live)) for live in mask),
        temperature=_temperature(record, where),
    )


def _unpadded(row: Row) -> Row:
    """Without the tokens behind the last live one: what fills a batch's rows up to one length."""
    if row.live is None or all(row.live):
        return row
    end = len(row.live) - next((i for i, live in enumerate(reversed(row.live)) if live), len(row.live))
    columns = {name: value if value is None else value[:end] for name, value in row.columns.items()}
    return replace(row, tokens=row.tokens[:end], columns=columns, live=row.live[:end])


def _named(record: Record, number: int) -> str:
    if record.get("id") is not None:
        return str(record["id"])
    ours = [record[name] for name in ("step", "request", "sample") if name in record]
    return "/".join(map(str, ours)) if {"request", "sample"} <= record.keys() else str(number)


def _is_column(name: str, value: Any) -> bool:
    if value is None:
        return "logprob" in name
    plain = isinstance(value, list) and name not in NOT_COLUMNS and not name.endswith(("_bits", "_ids"))
    return plain and all(isinstance(each, (int, float, list)) or each is None for each in value)


def _column(name: str, value: Any, record: Record) -> Sequence[Any] | None:
    """One number a token. TRL gives the most likely tokens of each position, and their ids beside them."""
    if value is None or not (value and isinstance(value[0], list)):
        return value if value is None else list(value)
    ids, chosen = record.get("logprob_token_ids"), _first(record, TOKENS)
    if ids is None:
        return [each[0] if len(each) == 1 else None for each in value]
    # lists of unequal lengths give too few values, which is found out and named where a column is read
    found = [dict(zip(known, given, strict=False)) for known, given in zip(ids, value, strict=False)]
    return [at.get(token) for at, token in zip(found, chosen, strict=False)]


def _vllm(record: Record, number: int, where: str) -> list[Row]:
    base = number if record.get("request_id") is None else record["request_id"]
    rows = []
    for i, output in enumerate(record["outputs"]):
        tokens = _ids(output.get("token_ids"), where)
        given = output.get("logprobs") or []
        values = [_of_mapping(at, token) for at, token in zip(given, tokens, strict=False)]
        prompt = record.get("prompt_token_ids")
        rows.append(_answer(_part(record, i, "outputs"), base, output.get("index", i), prompt, tokens, values, where))
    return rows


def _of_mapping(at: Any, token: int) -> Any:
    """vLLM: {id: Logprob}, whose keys JSON made texts; a number alone is what other writers leave of it."""
    if isinstance(at, Mapping):
        at = at.get(str(token), at.get(token))
        return at.get("logprob") if isinstance(at, Mapping) else at
    return at


def _openai(record: Record, number: int, where: str) -> list[Row]:
    base = number if record.get("custom_id") is None else record["custom_id"]
    rows = []
    for i, choice in enumerate(record["choices"]):
        given = choice.get("logprobs") or {}
        if isinstance(given.get("content"), list):  # chat
            texts, values = ([each.get(name) for each in given["content"]] for name in ("token", "logprob"))
        else:
            texts, values = given.get("tokens") or [], given.get("token_logprobs") or []
        ids = choice.get("token_ids")
        tokens = tuple(map(_token, texts)) if ids is None else _ids(ids, where)
        prompt = choice.get("prompt_token_ids", record.get("prompt_token_ids"))
        rows.append(_answer(_part(record, i, "choices"), base, choice.get("index", i), prompt, tokens, values, where))
    return rows


def _token(text: Any) -> int | str:
    number = str(text).removeprefix(TOKEN_ID)
    return int(number) if str(text).startswith(TOKEN_ID) and number.isdigit() else str(text)


def _sglang(record: Record, number: int, where: str) -> Row:
    given = record["meta_info"].get("output_token_logprobs")
    if given is None:
        raise BadInput(f"{where}: meta_info has no output_token_logprobs; ask SGLang for return_logprob")
    values, tokens = [each[0] for each in given], [each[1] for each in given]
    before = record["meta_info"].get("input_token_logprobs")
    whole = before is not None and len(before) == record["meta_info"].get("prompt_tokens")
    prompt = [each[1] for each in before] if whole and before is not None else None
    base = number if record.get("id") is None else record["id"]
    return _answer(record, base, 0, prompt, _ids(tokens, where), values, where)


def _answer(
    record: Record,
    base: Any,
    index: int,
    prompt: Any,
    tokens: tuple[int | str, ...],
    values: Sequence[Any],
    where: str,
) -> Row:
    if tokens and not values:
        raise BadInput(f"{where}: no log-probabilities; ask the server for logprobs of the sampled tokens")
    name = str(base) if not index else f"{base}/{index}"
    ids = None if prompt is None else _ids(prompt, where)
    return Row(name, ids, tokens, {"logprobs": values}, temperature=_temperature(record, where))


def _outer(record: Record) -> Record:
    """What a record says of all rollouts in it, unless they say it themselves."""
    return {"temperature": record["temperature"]} if "temperature" in record else {}


def _part(record: Record, place: int, name: str) -> Record:
    """As the answer at that place has it: of a list with one value an answer, its own."""
    value = record.get("temperature")
    if isinstance(value, list) and len(value) == len(record[name]):
        return {**record, "temperature": value[place]}
    return record


def _temperature(record: Record, where: str) -> float | None:
    """Of any size: what only compares columns has no use for it."""
    value = record.get("temperature")
    if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool)):
        raise BadInput(f"{where}: temperature is {value!r}, not a number")
    return value


def _unpacked(record: Record, count: int, where: str) -> Iterator[Record]:
    """A batch as its rollouts: of each list of that many lists, the one at its place."""
    for name, value in record.items():
        nested = isinstance(value, list) and value and isinstance(value[0], list)
        if nested and len(value) != count:
            raise BadInput(f"{where}: {name} holds {len(value)} rollouts, the tokens are of {count}")
    for i in range(count):
        yield {
            name: value[i] if isinstance(value, list) and len(value) == count else value
            for name, value in record.items()
            if name != "id" or isinstance(value, list)
        }


def _ids(tokens: Any, where: str) -> tuple[int, ...]:
    if not isinstance(tokens, (list, tuple)) or any(not isinstance(t, int) or isinstance(t, bool) for t in tokens):
        raise BadInput(f"{where}: token ids are not a list of whole numbers")
    return tuple(tokens)


def _first(record: Record, names: Sequence[str]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _unknown(record: Record) -> str:
    if {"input", "output", "score"} <= record.keys():
        return "verl's rollout_data_dir keeps texts and no log-probabilities; save the batch's tensors (see formats.py)"
    if {"prompt", "completion", "advantage"} <= record.keys():
        return "TRL's log of completions keeps texts and no log-probabilities; save what the trainer scored"
    return f"no known shape of a rollout; fields: {', '.join(map(str, record)) or 'none'}"
