"""Rollouts token by token: what the sampler recorded beside what the trainer found, in decimal and in bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from vexact.errors import BadInput
from vexact.model.tokenizer import Tokenizer, load_tokenizer
from vexact.report.deltas import parquet_files, read_table, rows
from vexact.report.number import written
from vexact.report.reading import read_config
from vexact.report.study import EXACT, NULL, Arm, Study

ARMS, ROLLOUTS, TOKENS = 6, 3, 200
FAINTEST, STRONGEST = 1e-7, 1.0  # |Δ| of the weakest and of the full colour


@dataclass(frozen=True)
class Shown:
    """A rollout: its prompt as text, its tokens as texts, float32 log-probabilities and their bits as int32."""

    step: int
    prompt: str
    tokens: tuple[str, ...]
    sampler: tuple[float, ...]
    trainer: tuple[float, ...]
    sampler_bits: tuple[int, ...]
    trainer_bits: tuple[int, ...]
    reward: float | None = None

    @property
    def differing(self) -> int:
        return sum(a != b for a, b in zip(self.sampler_bits, self.trainer_bits, strict=True))

    @property
    def largest(self) -> float:
        return max((abs(p - q) for p, q in zip(self.trainer, self.sampler, strict=True)), default=0.0)

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Shown:
        """Raises KeyError or TypeError for what `document` did not make."""
        given: dict[str, Any] = {name: document[name] for name in cls.__dataclass_fields__}
        lists: dict[str, Any] = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return cls(**{**given, **lists})


def chosen_arms(study: Study, largest: Mapping[str, float]) -> list[Arm]:
    """Those whose rollouts are shown: the exact one, then the others by the size of their largest Δ."""
    known = [arm for arm in study.arms if arm.name in largest]
    exact = [arm for arm in known if arm.role == EXACT][:1]
    others = [arm for arm in known if arm not in exact and arm.role != NULL]
    others = sorted(others, key=lambda arm: -largest[arm.name])[: ARMS - len(exact)]
    return exact + [arm for arm in known if arm in others]


def rollouts_of(arm: Arm) -> list[Shown]:
    """Of its last step: the rollout with the largest |Δ| and the longest others. Raises ReportError."""
    for run in arm.runs:
        files = parquet_files(run.folder) if run.folder else []
        if run.folder and files:
            shown = _read(files[-1], _tokenizer(run.folder))
            shown.sort(key=lambda each: (-each.largest, -len(each.tokens)))
            return shown[:1] + sorted(shown[1:], key=lambda each: -len(each.tokens))[: ROLLOUTS - 1]
    return []


def _read(file: Path, tokenizer: Tokenizer | None) -> list[Shown]:
    table = read_table(file)
    prompts = table.get("prompt") or [""] * len(table["step"])
    rewards = table.get("reward") or [None] * len(table["step"])
    shown = []
    for i, (ids, prompt) in enumerate(zip(table["completion_ids"], prompts, strict=True)):
        compared = list(rows({name: [column[i]] for name, column in table.items()}))
        if not compared or not ids:
            continue
        q, p, q_bits, p_bits = compared[0]
        tokens = tuple(_text(tokenizer, token) for token in ids[:TOKENS])
        if len(ids) == len(q):
            logs, bits = (tuple(q[:TOKENS]), tuple(p[:TOKENS])), (tuple(q_bits[:TOKENS]), tuple(p_bits[:TOKENS]))
            shown.append(Shown(table["step"][i], prompt or "", tokens, *logs, *bits, rewards[i]))
    return shown


def _tokenizer(folder: Path) -> Tokenizer | None:
    """The run's own; None where it is nowhere to be found: tokens are then shown by their ids."""
    places = [str(folder / "checkpoint")] if (folder / "checkpoint").is_dir() else []
    path = read_config(folder).get("model.path")
    for place in [*places, *([str(path)] if path else [])]:
        try:
            return load_tokenizer(place)
        except (BadInput, OSError):
            continue
    return None


def _text(tokenizer: Tokenizer | None, token: int) -> str:
    return (tokenizer.decode([token]) if tokenizer else "") or f"⟨{token}⟩"


def draw(shown: Sequence[Shown]) -> Markup:
    """The rollouts as text whose colours are Δ; what a pointer, a finger or the keyboard finds is in each title."""
    parts = []
    for number, each in enumerate(shown, 1):
        equal = len(each.tokens) - each.differing
        said = (
            f"all {len(each.tokens)} tokens equal in every bit"
            if not each.differing
            else f"{equal} of {len(each.tokens)} tokens equal in every bit, largest |Δ| {written(each.largest)}"
        )
        reward = f", reward {written(each.reward)}" if each.reward is not None else ""
        prompt = each.prompt if len(each.prompt) <= 400 else "…" + each.prompt[-400:]
        parts.append(
            f'<div class="rollout"><p class="said">Step {each.step}, rollout {number}{reward}: {said}.</p>'
            f'<p class="tokens" role="group" aria-label="Tokens of rollout {number}">'
            f'<span class="prompt">{escape(prompt)}</span>'
            f"{''.join(_token(each, i) for i in range(len(each.tokens)))}</p></div>"
        )
    return Markup("".join(parts))


def _token(each: Shown, i: int) -> str:
    q, p = each.sampler[i], each.trainer[i]
    bits = each.sampler_bits[i] & 0xFFFFFFFF, each.trainer_bits[i] & 0xFFFFFFFF
    delta = p - q
    kind = "=" if bits[0] == bits[1] else "+" if delta > 0 else "-"
    shade = "" if kind == "=" else f' style="--a:{_strength(delta):.2f}"'
    name = {"=": "e", "+": "u", "-": "d"}[kind]
    told = (
        f"{each.tokens[i]!r} · sampler {q:.9g} ({bits[0]:08x}) · trainer {p:.9g} ({bits[1]:08x}) · Δ "
        f"{'0, equal in every bit' if kind == '=' else f'{delta:+.3g}'}"
    )
    focus = ' tabindex="0"' if i == 0 else ""
    text = escape(each.tokens[i].replace("\n", "↵\n"))
    return f'<span class="t {name}"{shade}{focus} title="{escape(told)}">{text}</span>'


def _strength(delta: float) -> float:
    """0.15 … 1 of the colour, by the logarithm of |Δ|."""
    if not math.isfinite(delta) or abs(delta) >= STRONGEST:
        return 1.0
    share = math.log(max(abs(delta), FAINTEST) / FAINTEST) / math.log(STRONGEST / FAINTEST)
    return 0.15 + 0.85 * share
