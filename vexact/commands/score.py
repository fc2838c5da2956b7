"""`vexact score`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vexact.commands.model import DTYPES, check_ids, from_bits, load, logprob_data, name_of
from vexact.errors import BadInput
from vexact.model.draws import is_temperature
from vexact.model.policy import Policy, Scored
from vexact.model.tokenizer import load_tokenizer
from vexact.testing import compare_bits
from vexact_kernels import Kernels

if TYPE_CHECKING:
    from vexact.cli import Score


def run(args: Score, kernels: Kernels) -> int:
    given = [flag for flag, value in (("--text", args.text), ("--ids", args.ids), ("--file", args.file)) if value]
    if len(given) != 1:
        raise BadInput(f"one of --text, --ids and --file is needed, not {' and '.join(given) or 'none'}")
    if not is_temperature(args.temperature):
        raise BadInput(f"--temperature is {args.temperature}, must be 0 or a normal float32 number")
    return _score_file(args, args.file, kernels) if args.file is not None else _score_ids(args, kernels)


def _score_ids(args: Score, kernels: Kernels) -> int:
    policy = load(args.model, kernels, args.dtype)
    tokenizer = load_tokenizer(args.model) if args.text is not None else None
    ids = list(args.ids) if tokenizer is None else tokenizer.encode(str(args.text))
    check_ids(ids, policy, "--ids" if tokenizer is None else "--text", least=2)
    values = policy.logprobs([Scored(ids, 1, args.temperature)]).logprob.cpu()
    if args.json:
        document = {"ids": ids, "temperature": args.temperature, **_about(args, policy), **logprob_data(values)}
        print(json.dumps(document, ensure_ascii=False, indent=1))
        return 0
    for token, value in zip(ids[1:], values, strict=True):
        shown = "" if tokenizer is None else f"  {tokenizer.decode([token])!r}"
        print(f"{token:>8} {value.item():>14.9g}{shown}")
    total = float(values.double().sum())
    print(f"{len(values)} tokens, log-probability {total:.6f}, {total / len(values):.6f} a token")
    return 0


def _score_file(args: Score, path: Path, kernels: Kernels) -> int:
    saved = _read(path)
    dtype = args.dtype or saved.get("dtype")
    if dtype not in DTYPES:
        raise BadInput(f"{path}: dtype is {dtype!r}, must be one of {', '.join(DTYPES)}")
    policy = load(args.model, kernels, dtype)
    sequences, recorded = _rollouts(path, saved, policy)
    values = policy.logprobs(sequences).logprob.cpu()
    if not len(recorded):
        raise BadInput(f"{path}: holds no log-probability to compare with")
    found = compare_bits(recorded, values)
    if args.json:
        counts = {"compared": found.compared, "differ": found.differ}
        print(json.dumps({**_about(args, policy), **counts, **logprob_data(values)}, indent=1))
        return 1 if found.differ else 0
    if policy.digest != saved.get("digest"):
        print(f"arithmetic digest {saved.get('digest')} in the file, {policy.digest} here")
    verdict = f"first {found.first}" if found.first else "bits agree"
    print(f"score: {found.compared:,} values compared, {found.differ:,} differ, {verdict}")
    return 1 if found.differ else 0


def _read(path: Path) -> dict[str, Any]:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(saved, dict) or not isinstance(saved.get("rollouts"), list):
        raise BadInput(f"{path}: has no list `rollouts`, as the output of `vexact generate --json` does")
    return saved


def _ids(values: Any) -> list[int]:
    """Raises TypeError where they are not a list of integers."""
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise TypeError("ids are a list of integers")
    return values


def _rollouts(path: Path, saved: dict[str, Any], policy: Policy) -> tuple[list[Scored], Tensor]:
    """What is to be scored, and the values that were recorded. Raises BadInput naming file and rollout."""
    sequences, recorded = [], [torch.empty(0)]
    for i, each in enumerate(saved["rollouts"]):
        where = f"{path}: rollout {i}"
        try:
            prompt, completion = _ids(each["prompt_ids"]), _ids(each["completion_ids"])
            temperature, values = float(each["temperature"]), from_bits(each["logprob_bits"])
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"{where}: {error!r}") from None
        if len(values) != len(completion):
            raise BadInput(f"{where}: {len(completion)} completion_ids and {len(values)} logprob_bits")
        if not is_temperature(temperature):
            raise BadInput(f"{where}: temperature is {temperature}, must be 0 or a normal float32 number")
        check_ids(prompt, policy, f"{where}: prompt_ids")
        check_ids([*prompt, *completion], policy, where)
        sequences.append(Scored([*prompt, *completion], len(prompt), temperature))
        recorded.append(values)
    return sequences, torch.cat(recorded)


def _about(args: Score, policy: Policy) -> dict[str, Any]:
    return {"model": args.model, "dtype": name_of(policy.dtype), "digest": policy.digest, "version": policy.version}
