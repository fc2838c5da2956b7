"""`vexact generate`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from vexact.commands.model import check_ids, load, logprob_data, name_of
from vexact.errors import BadInput
from vexact.model.policy import Policy
from vexact.model.rollout import Rollout
from vexact.model.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact_kernels import Kernels

if TYPE_CHECKING:
    from vexact.cli import Generate


def run(args: Generate, kernels: Kernels) -> int:
    if not args.prompt and not args.prompt_ids:
        raise BadInput("--prompt or --prompt-ids is needed")
    policy = load(args.model, kernels, args.dtype)
    tokenizer = _tokenizer(args)
    rollouts = _sample(policy, _requests(args, policy, tokenizer))
    if args.json:
        print(json.dumps(_document(args, policy, rollouts, tokenizer), ensure_ascii=False, indent=1))
        return 0
    for rollout in rollouts:
        text = str(list(rollout.completion)) if tokenizer is None else _shown(tokenizer.decode(rollout.completion))
        print(f"[{rollout.request}.{rollout.sample} {rollout.finish}, {len(rollout.completion)} tokens] {text}")
    return 0


def _shown(text: str) -> str:
    """Text that a terminal can be trusted with: signs that cannot be printed as escapes, line ends and tabs kept."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text)


def _tokenizer(args: Generate) -> Tokenizer | None:
    """None only where ids are given and the folder has no tokenizer: ids need none."""
    try:
        return load_tokenizer(args.model)
    except TokenizerError:
        if args.prompt:
            raise
        return None


def _requests(args: Generate, policy: Policy, tokenizer: Tokenizer | None) -> list[Request]:
    prompts: list[list[int]] = []
    for i, text in enumerate(args.prompt):
        assert tokenizer is not None
        if not text:
            raise BadInput(f"--prompt number {i + 1} is empty")
        prompts.append(tokenizer.encode(text, args.chat))
    if args.prompt_ids:
        prompts.append(list(args.prompt_ids))
    for i, prompt in enumerate(prompts):
        check_ids(prompt, policy, f"prompt {i}")
    if args.stop_ids:
        check_ids(args.stop_ids, policy, "--stop-ids")
    stop_ids = frozenset((*policy.config.eos_token_ids, *args.stop_ids))
    return [
        Request(i, tuple(prompt), args.n, args.temperature, args.seed, args.max_tokens, stop_ids)
        for i, prompt in enumerate(prompts)
    ]


def _sample(policy: Policy, requests: list[Request]) -> list[Rollout]:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("sampling", total=sum(request.n for request in requests))
        return Sampler(policy).run(requests, lambda finished: progress.advance(task, finished))


def _document(args: Generate, policy: Policy, rollouts: list[Rollout], tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        "model": args.model,
        "dtype": name_of(policy.dtype),
        "digest": policy.digest,
        "version": policy.version,
        "seed": args.seed,
        "rollouts": [
            {
                "request": rollout.request,
                "sample": rollout.sample,
                "temperature": rollout.temperature,
                "prompt_ids": list(rollout.prompt),
                "completion_ids": list(rollout.completion),
                "text": None if tokenizer is None else tokenizer.decode(rollout.completion),
                **logprob_data(rollout.logprobs),
                "finish": rollout.finish,
                "version": rollout.version,
                "digest": rollout.digest,
            }
            for rollout in rollouts
        ],
    }
