"""A recipe: everything that a training run depends on, as frozen dataclasses read from a YAML file.

Each value has a type and a range that live beside its default. A key that is not known is refused by name, from a file
and from the command line alike.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from vexact.errors import BadInput


class RecipeError(BadInput):
    """A recipe that cannot be run. One line: file or flag, key, what is wrong."""


def _number(default: Any, *, at_least: float = -math.inf, above: float = -math.inf, below: float = math.inf) -> Any:
    return field(default=default, metadata={"at_least": at_least, "above": above, "below": below})


def _choice(default: str, *choices: str) -> Any:
    return field(default=default, metadata={"choices": (default, *choices)})


_OPEN = {"free": True}  # metadata of a mapping with somebody else's keys: they are checked where they are used


@dataclass(frozen=True)
class ModelSection:
    """Where the weights come from and the dtype they are computed in."""

    path: str = "tiny"  # a Hugging Face folder, or `tiny`, or `tiny-modsum` which reads modsum's signs only
    dtype: str = _choice("checkpoint", "float32", "bfloat16", "float16")  # `checkpoint`: the one it names


@dataclass(frozen=True)
class RewardSection:
    """Who scores completions, and what becomes of a score that fails: vexact/tasks/scoring.py has the rule."""

    function: str = ""  # `module:function`, `file.py:function` or `math_verify`; empty: the task's own scorer
    signature: str = _choice("auto", "trl", "verl")  # auto: seen from the names of the function's parameters
    options: dict[str, Any] = field(default_factory=dict, metadata=_OPEN)  # the function's further arguments
    seconds: float = _number(10.0, above=0.0)  # of a call: one completion, under trl all of a step
    on_error: float = _number(0.0)  # the reward where a call raises, is too slow or gives no finite number
    fatal: bool = False  # end the run instead
    success_at: float = _number(1.0)  # a completion succeeds where its unflipped reward is at least this
    flip: float = _number(0.0, at_least=0.0, below=1.0)  # probability that a reward r of 0 or 1 becomes 1 - r


@dataclass(frozen=True)
class TaskSection:
    """What is asked and how it is scored."""

    name: str = "chain_sum"  # chain_sum, modsum, file, or the name of a reasoning-gym task
    options: dict[str, Any] = field(
        default_factory=dict, metadata=_OPEN
    )  # of that task: vexact/tasks, or the library's
    held_out: float = _number(0.0, at_least=0.0, below=1.0)  # share of the questions that are kept for evaluation
    stop: str = ""  # a completion also ends with the first token whose text holds this
    chat: bool = False  # text prompts become a user's message
    system: str = ""  # message in front of every chat
    chat_template_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata=_OPEN
    )  # variables of the tokenizer's template, as enable_thinking
    reward: RewardSection = field(default_factory=RewardSection)


@dataclass(frozen=True)
class SamplingSection:
    """What a step samples. The last three change the speed and no bit."""

    prompts: int = _number(8, at_least=1)  # of a step
    samples: int = _number(4, at_least=1)  # of a prompt: the group
    temperature: float = _number(1.0, above=0.0)
    max_tokens: int = _number(8, at_least=1)  # of a completion
    tokens_per_step: int = _number(512, at_least=1)
    chunk: int = _number(256, at_least=1)
    running: int = _number(64, at_least=1)


@dataclass(frozen=True)
class KLSection:
    """Penalty for leaving the reference policy: the one that a run began with. vexact/training/kl.py has the formulas.

    Raises RecipeError for k1 in the loss.
    """

    coef: float = _number(0.0, at_least=0.0)  # TRL's beta; 0: no reference policy is kept
    estimator: str = _choice("k2", "k3", "k3+", "k1")  # k3+: the value of k3 with the gradient of k2
    place: str = _choice("loss", "reward")  # of a token in the loss, of a whole rollout in its reward
    importance: bool = True  # in the loss, off-policy: times π/π_old, held constant (TRL's use_bias_correction_kl)

    def __post_init__(self) -> None:
        if (self.place, self.estimator) == ("loss", "k1"):
            raise RecipeError(
                "loss.kl.estimator = k1 in the loss: log π − log π_ref has the gradient of log π alone, whose mean is "
                "0 whatever π_ref is: noise and no penalty; use k2 or k3+, or loss.kl.place = reward"
            )


@dataclass(frozen=True)
class RemedySection:
    """What is done about sampler and trainer disagreeing: vexact/training/remedy.py. By default nothing."""

    token_cap: float = _number(0.0, at_least=0.0)  # token TIS: weights min(ratio, cap); 0: off, common: 2
    token_floor: float = _number(0.0, at_least=0.0)  # … and at least this
    sequence: str = _choice("off", "product", "geometric")  # sequence rejection by that value of its ratios
    sequence_low: float = _number(0.0, at_least=0.0)  # kept from here …
    sequence_high: float = _number(2.0, above=0.0)  # … to here
    sequence_ratio: str = _choice("correction", "current")  # π_old/q, or π/q anew before each update

    def __post_init__(self) -> None:
        if 0.0 < self.token_cap < self.token_floor:
            raise RecipeError(f"loss.remedy.token_floor = {self.token_floor} is above token_cap = {self.token_cap}")
        if self.token_floor and not self.token_cap:
            raise RecipeError("loss.remedy.token_floor needs a token_cap")
        if self.sequence_low > self.sequence_high:
            raise RecipeError(f"loss.remedy.sequence_low = {self.sequence_low} is above {self.sequence_high}")


@dataclass(frozen=True)
class LossSection:
    """Advantages, the policy loss and what is added to it, and how often a rollout batch is used.

    The names that people know are combinations, here with what their papers and TRL or verl add up to:

    - GRPO: ppo, group_std, seq-mean-token-mean, often kl k3 0.04 · Dr. GRPO: ppo, group_mean, seq-mean-token-sum-norm
    - DAPO: ppo, group_std, token-mean, epsilon_high 0.28, overlong_buffer, groups without spread sampled anew
    - REINFORCE: reinforce with batch_token (REINFORCE++), batch_sequence or leave_one_out (RLOO)
    - GSPO: gspo, group_std, seq-mean-token-mean, epsilons 3e-4 and 4e-4 · CISPO: cispo, group_std, token-mean
    """

    name: str = _choice("ppo", "reinforce", "gspo", "cispo")  # vexact/training/surrogate.py
    advantage: str = _choice("group_std", "group_mean", "leave_one_out", "batch_sequence", "batch_token")
    epsilon_low: float = _number(0.2, above=0.0, below=1.0)  # ratios below 1 - epsilon_low are clipped where A < 0
    epsilon_high: float = _number(0.2, above=0.0)  # ratios above 1 + epsilon_high are clipped where A > 0
    dual_clip: float = _number(0.0, at_least=0.0)  # ppo: ratios above it are clipped where A < 0; 0: off, common: 3
    cap: float = _number(5.0, above=0.0)  # cispo: the largest weight itself (TRL's epsilon_high; elsewhere 1 + ε)
    aggregation: str = _choice("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    loss_scale_factor: int = _number(1, at_least=1)  # the constant of seq-mean-token-sum-norm: usually max_tokens
    entropy_coef: float = _number(0.0, at_least=0.0)
    anchor: str = _choice("bypass", "recomputation")  # π_old: as recorded by the sampler, or scored by the trainer
    epochs: int = _number(1, at_least=1)  # passes over a rollout batch (TRL's num_iterations)
    mini_batches: int = _number(1, at_least=1)  # updates of a pass
    overlong_buffer: int = _number(0, at_least=0)  # last tokens before max_tokens in which the reward sinks; 0: off
    overlong_penalty: float = _number(1.0, at_least=0.0)  # by how much at max_tokens
    kl: KLSection = field(default_factory=KLSection)
    remedy: RemedySection = field(default_factory=RemedySection)

    def __post_init__(self) -> None:
        if 0.0 < self.dual_clip <= 1.0:
            raise RecipeError(f"loss.dual_clip = {self.dual_clip} must be above 1, or 0 for none")
        if self.remedy.token_cap and self.anchor == "bypass" and self.name != "reinforce":
            raise RecipeError(
                f"loss.remedy.token_cap with loss.anchor = bypass: the ratio to the sampler that {self.name} clips "
                "holds that correction already; use loss.anchor = recomputation"
            )


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW on float32 masters. Weight decay moves matrices only, not norms and biases."""

    lr: float = _number(1e-6, above=0.0)
    beta1: float = _number(0.9, at_least=0.0, below=1.0)
    beta2: float = _number(0.999, at_least=0.0, below=1.0)
    eps: float = _number(1e-8, above=0.0)
    weight_decay: float = _number(0.0, at_least=0.0)
    max_grad_norm: float = _number(1.0, above=0.0)
    tokens_at_once: int = _number(1024, at_least=1)  # of a micro-batch; changes memory and speed, no bit


@dataclass(frozen=True)
class RunSection:
    """Where results go."""

    root: str = "runs"
    folder: str = ""  # by default ROOT/NAME-TIME
    checkpoint: bool = True  # save the trained weights at the end


@dataclass(frozen=True)
class Recipe:
    """A training run. `seed` addresses data and draws; nothing else is random.

    device, profile: what it is computed with; `portable` gives the same bits on every device.
    """

    name: str = "train"
    seed: int = _number(0, at_least=0, below=2.0**63)
    steps: int = _number(5, at_least=0)
    device: str = _choice("cpu", "cuda")
    profile: str = _choice("portable", "tensorcore")  # tensorcore: the matrix units of a GPU
    model: ModelSection = field(default_factory=ModelSection)
    task: TaskSection = field(default_factory=TaskSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    loss: LossSection = field(default_factory=LossSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    run: RunSection = field(default_factory=RunSection)

    def to_yaml(self) -> str:
        """The whole recipe, defaults included; `load_recipe` reads it back."""
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)


def load_recipe(path: str | Path, overrides: Mapping[str, str] | Sequence[str] = ()) -> Recipe:
    """Read a YAML file, then lay overrides over it.

    overrides: dotted key → text, or the words of a command line (`--optimizer.lr 1e-5 --steps=5`). Raises RecipeError.
    """
    values = dict(_flatten(_read(Path(path)), str(path)))
    sources = dict.fromkeys(values, str(path))
    pairs = overrides if isinstance(overrides, Mapping) else _pairs(overrides)
    for key, text in pairs.items():
        values[key], sources[key] = _parse(key, text), f"--{key}"
    _gather(values, sources)
    known = dict(_keys(Recipe))
    for key in values:
        if key not in known:
            raise RecipeError(f"{sources[key]}: unknown key {key}{_hint(key, known)}")
    checked = {key: _checked(value, *known[key], f"{sources[key]}: {key}") for key, value in values.items()}
    return _build(Recipe, checked, "")


def _read(path: Path) -> Any:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: is not YAML ({' '.join(str(error).split())})") from None
    return {} if content is None else content


def _flatten(content: Any, source: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys. A section's name with a plain value stays and is refused as a key that takes none."""
    if not isinstance(content, dict):
        raise RecipeError(f"{source}: holds {type(content).__name__}, not keys and values")
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and prefix[:-1] not in _FREE:
            yield from _flatten(value, source, f"{key}.")
        elif value is None and key in _SECTIONS:
            continue  # a section with nothing in it
        else:
            yield key, value


def _gather(values: dict[str, Any], sources: dict[str, str]) -> None:
    """Put the keys of somebody else's back into one mapping: task.options.terms → task.options, with terms in it."""
    for key in list(values):
        section = next((free for free in _FREE if key.startswith(f"{free}.")), None)
        if section is not None:
            inner = values.get(section, {})
            if not isinstance(inner, dict):
                raise RecipeError(f"{sources[section]}: {section} = {inner!r} is not keys and values")
            values[section] = {**inner, key[len(section) + 1 :]: values.pop(key)}
            sources.setdefault(section, sources[key])


def _pairs(words: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise RecipeError(f"{word}: overrides are written --key value")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not rest:
                raise RecipeError(f"{word}: a value is missing")
            value = rest.pop(0)
        pairs[key] = value
    return pairs


def _parse(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        raise RecipeError(f"--{key}: {text!r} is not a value") from None


def _keys(section: type, prefix: str = "") -> Iterator[tuple[str, tuple[type, Field[Any]]]]:
    types = get_type_hints(section)
    for item in fields(section):
        if is_dataclass(types[item.name]):
            yield from _keys(types[item.name], f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", (types[item.name], item)


_FREE = frozenset(key for key, (_, item) in _keys(Recipe) if "free" in item.metadata)
_SECTIONS = frozenset(key[:i] for key, _ in _keys(Recipe) for i, sign in enumerate(key) if sign == ".") | _FREE


def _hint(key: str, known: Mapping[str, Any]) -> str:
    if key in _SECTIONS - _FREE:
        return f"; {key} is a section with keys of its own, as {next(k for k in known if k.startswith(f'{key}.'))}"
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(list(known))}
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    near = near or [by_leaf[leaf] for leaf in difflib.get_close_matches(key.rpartition(".")[2], by_leaf, n=1)]
    return f"; did you mean {near[0]}?" if near else f"; known keys: {', '.join(known)}"


def _checked(value: Any, kind: type, item: Field[Any], where: str) -> Any:
    """The value in its type, inside its range. YAML 1.1 reads 1e-6 as text: numbers may come as text."""
    if "free" in item.metadata:
        kind = dict
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            value = float(value)
        except ValueError:
            raise RecipeError(f"{where} = {value!r} is not a number") from None
    elif kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RecipeError(f"{where} = {value!r} is not {_NAMES[kind]}")
    limits = item.metadata
    if "choices" in limits and value not in limits["choices"]:
        raise RecipeError(f"{where} = {value!r} is not one of {', '.join(limits['choices'])}")
    if "above" in limits:
        _check_range(value, limits, where)
    return value


def _check_range(value: Any, limits: Mapping[str, float], where: str) -> None:
    if not math.isfinite(value):
        raise RecipeError(f"{where} = {value} is not finite")
    if value < limits["at_least"]:
        raise RecipeError(f"{where} = {value} is below {limits['at_least']:g}")
    if value <= limits["above"]:
        raise RecipeError(f"{where} = {value} must be above {limits['above']:g}")
    if value >= limits["below"]:
        raise RecipeError(f"{where} = {value} must be below {limits['below']:g}")


_NAMES: dict[type, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "keys and values",
}


def _build(section: type, values: Mapping[str, Any], prefix: str) -> Any:
    types = get_type_hints(section)
    arguments: dict[str, Any] = {}
    for item in fields(section):
        key = f"{prefix}{item.name}"
        if is_dataclass(types[item.name]):
            arguments[item.name] = _build(types[item.name], values, f"{key}.")
        elif key in values:
            arguments[item.name] = values[key]
    return section(**arguments)
