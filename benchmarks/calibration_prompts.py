"""Prompts for a calibration of SmolLM2, as ids: 24 sums with four examples before them, 24 pieces of technical prose
from Python's own documentation, 16 chats.

    python benchmarks/calibration_prompts.py prompts.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from vexact.model.tokenizer import Tokenizer, load_tokenizer
from vexact.recipe import load_recipe
from vexact.tasks import load_task

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
RECIPE = ROOT / "recipes" / "smollm2_chain_sum.yaml"
SUMS, PIECES = 24, 24
SHORTEST, LONGEST = 200, 1400  # of a piece, in characters
QUESTIONS = (
    "Write a short story about a lighthouse keeper.",
    "What is 12 + 7?",
    "Explain how a bicycle stays upright.",
    "Name three rivers in Europe.",
    "Give me advice for a job interview.",
    "Translate 'good morning' into French.",
    "Why is the sky blue?",
    "What is a prime number?",
)
SYSTEM = "You are brief."


def sums(tokenizer: Tokenizer) -> Iterator[list[int]]:
    recipe = load_recipe(RECIPE)
    task = load_task(recipe.task, recipe.seed)
    for i in range(SUMS):
        prompt = task.item(i).prompt
        yield tokenizer.encode(prompt if isinstance(prompt, str) else prompt[-1]["content"])


def prose(tokenizer: Tokenizer) -> Iterator[list[int]]:
    from pydoc_data.topics import topics

    text, rng = "\n".join(topics[name] for name in sorted(topics)), random.Random(0)
    for _ in range(PIECES):
        begin = rng.randrange(len(text) - LONGEST)
        yield tokenizer.encode(text[begin : begin + rng.randrange(SHORTEST, LONGEST)])


def chats(tokenizer: Tokenizer) -> Iterator[list[int]]:
    for question in QUESTIONS:
        asked = {"role": "user", "content": question}
        yield tokenizer.chat([asked], {})
        yield tokenizer.chat([{"role": "system", "content": SYSTEM}, asked], {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="written")
    parser.add_argument("--model", type=Path, default=MODEL)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.model)
    prompts = [*sums(tokenizer), *prose(tokenizer), *chats(tokenizer)]
    text = "".join(json.dumps({"id": i, "prompt_ids": prompt}) + "\n" for i, prompt in enumerate(prompts))
    arguments.prompts.write_text(text, encoding="utf-8")
    print(f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens")


if __name__ == "__main__":
    main()
