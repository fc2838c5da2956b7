"""`vexact calibrate`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vexact.commands.arguments import Calibrate, mismatch_override
from vexact.commands.model import DTYPES, check_writable, load
from vexact.errors import BadInput
from vexact.study.distribution import Bin, Distribution, describe
from vexact.study.dumps import Paired, read_column, read_pair
from vexact.study.fit import Fit, fit

if TYPE_CHECKING:
    from vexact.commands.sampled import Reached, SampledPair

# Flags that say how tokens are sampled, and those of an engine at all.
OF_SAMPLING = (
    "mismatch", "block", "against", "against_dtype", "recipe", "prompts", "tokens", "max_tokens", "seed", "dump",
)  # fmt: skip
OF_A_MODEL = (*OF_SAMPLING, "dtype", "temperature", "device", "profile", "threads")
LENGTH = 64  # most tokens of a completion where no recipe says it


def run(args: Calibrate) -> int:
    check_flags(args)
    for flag, path in (("--output", args.output), ("--dump", args.dump)):
        if path is not None:
            check_writable(flag, path)
    paired, reached = compared(args)
    _check_tokens(paired)
    distribution, fitted = describe(paired.pairs), fit(paired.pairs)
    source = f"{paired.names[0]} against\n{paired.names[1]}"
    text = fitted.as_yaml(source)
    if args.output is not None:
        args.output.write_text(text, encoding="utf-8")
    if args.json:
        print(json.dumps(as_json(paired, distribution, fitted, reached), indent=1))
    else:
        print("\n".join([*lines(paired, distribution, fitted), *dose_lines(reached)]))
        print()
        print(text, end="")
    return 0


def compared(args: Calibrate) -> tuple[Paired, Reached | None]:
    """Both sides, and the dose where one was solved for."""
    if args.model is None:
        return read_pair(str(args.sampler), args.trainer), None
    if args.sampler is not None:
        return scored(args, args.sampler, args.model), None
    sampled = sample(args, args.model)
    if args.dump is not None:
        args.dump.write_text("".join(sampled.lines()), encoding="utf-8")
    return sampled.paired, sampled.reached


def check_flags(args: Calibrate) -> None:
    """Raises BadInput where two flags contradict each other, or nothing is to be compared."""
    if args.model is None and args.sampler is None:
        raise BadInput("A, a file or a run's folder, is needed, or --model")
    if args.model is None:
        _refuse(args, OF_A_MODEL, "goes with --model: files are compared as they are")
    elif args.sampler is not None:
        if args.trainer is not None:
            raise BadInput(f"{args.trainer}: --model scores the tokens of A, so no B is read: give one of both")
        _refuse(args, OF_SAMPLING, f"says how to sample, and the tokens are those of {args.sampler}: leave out one")
    else:
        _check_sampling(args)


def _refuse(args: Calibrate, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(args, name) != getattr(Calibrate(), name):
            raise BadInput(f"--{name.replace('_', '-')} {why}")


def _check_sampling(args: Calibrate) -> None:
    if args.recipe is not None and args.prompts is not None:
        raise BadInput("--recipe and --prompts are two sources of prompts: give one")
    if args.against is not None and (args.mismatch or args.block is not None):
        given = "--mismatch" if args.mismatch else "--block"
        raise BadInput(f"--against {args.against} is a mismatch of its own: leave out {given}")
    if args.against_dtype is not None and args.against is None:
        raise BadInput("--against-dtype is that of the engine which --against names: give it too")
    if args.tokens < 1:
        raise BadInput(f"--tokens is {args.tokens}, must be at least 1")


def scored(args: Calibrate, file: str, model: str) -> Paired:
    """The tokens of a file, each rollout's scored by the exact engine at its own temperature."""
    from vexact.commands.sampled import at_temperatures, of_dump
    from vexact.model.policy import TOKENS_AT_ONCE

    dump = at_temperatures(read_column(file), args.temperature)
    return of_dump(dump, load(model, args.kernels(), args.dtype), model, TOKENS_AT_ONCE)


def sample(args: Calibrate, model: str) -> SampledPair:
    """Raises BadInput, before the model is loaded where it can."""
    from vexact.commands.prompts import rounds
    from vexact.commands.sampled import of_transformers, under_mismatch
    from vexact.recipe import load_recipe

    flags = {
        "model.path": model,
        "model.dtype": args.dtype,
        "sampling.max_tokens": LENGTH if args.max_tokens is None and args.recipe is None else args.max_tokens,
        "sampling.temperature": args.temperature,
        "seed": args.seed,
        **dict(map(mismatch_override, args.mismatch)),
    }
    words = {key: str(value) for key, value in flags.items() if value is not None}
    recipe = load_recipe(args.recipe, words, () if args.block is None else (args.block,))
    if args.against is None and recipe.mismatch.off:
        raise BadInput("--model: with what mismatch? Give --mismatch, --block, --against or a recipe that has one")
    policy = load(model, args.kernels(), None if recipe.model.dtype == "checkpoint" else recipe.model.dtype)
    asked = rounds(recipe, policy.config, args.prompts)
    if args.against is None:
        return under_mismatch(policy, recipe, asked, args.tokens)
    dtype = None if args.against_dtype is None else DTYPES[args.against_dtype]
    return of_transformers(policy, recipe, asked, args.tokens, dtype)


def _check_tokens(paired: Paired) -> None:
    if not paired.tokens:
        raise BadInput(f"{paired.names[0]} and {paired.names[1]}: no token was compared, nothing to calibrate by")


def as_json(paired: Paired, distribution: Distribution, fitted: Fit, reached: Reached | None = None) -> dict[str, Any]:
    """Plain data; what has no upper end says null."""
    described = distribution.as_json()
    for each in (*described["by_probability"], *described["by_position"]):
        each["high"] = each["high"] if math.isfinite(each["high"]) else None
    return {
        "sampler": paired.names[0],
        "trainer": paired.names[1],
        "only": [list(ids) for ids in paired.only],
        "unscored": paired.unscored,
        "distribution": described,
        "fit": fitted.as_json(),
        **({} if reached is None else {"dose": asdict(reached)}),
    }


def lines(paired: Paired, distribution: Distribution, fitted: Fit) -> list[str]:
    """For reading: Δ is the second column's less the first one's, in nats."""
    found, sequences = distribution.measures, distribution.sequences
    slope = (
        "" if sequences.slope_per_1000 is None else f"; slope {_pm(sequences.slope_per_1000, sequences.slope_error)}"
    )
    text = [
        f"log p of {paired.names[1]}",
        f"less that of {paired.names[0]}",
        *_left_out(paired),
        f"tokens {found['tokens']:,} of {found['sequences']:,} rollouts, {found['differing']:,} differ in a bit",
        f"|Δ| mean {found['abs_mean']:.4g}, p95 {found['abs_p95']:.4g}, p99 {found['abs_p99']:.4g}, "
        f"max {found['abs_max']:.4g}",
        f"K1 {found['k1']:.4g}, K2 {found['k2']:.4g}, K3 {found['k3']:.4g}, "
        f"of it {100 * distribution.tail_share:.0f} % in {distribution.tail_tokens:,} tokens (1 %)",
        f"ESS of tokens {found['ess']:.4g}, of sequences {found['ess_sequence']:.4g} (n = {found['sequences']:,})",
        f"log-odds: median deviation {found['log_odds_mad']:.4g}, 5 % {found['log_odds_p05']:.4g}, "
        f"95 % {found['log_odds_p95']:.4g}",
        f"ΣΔ of a sequence {sequences.min:.4g} … {sequences.max:.4g}, std {sequences.std:.4g}, "
        f"per 1000 tokens {sequences.per_1000:.4g}{slope}",
        "",
        _row("probability", "tokens", "mean |Δ|", "max |Δ|", "K3", "log-odds: mad", "5 %", "95 %"),
        *(_bin_row(each, ".3f") for each in distribution.by_probability),
        "",
        _row("position", "tokens", "mean |Δ|", "max |Δ|", "K3", "log-odds: mad", "5 %", "95 %"),
        *(_bin_row(each, ".0f") for each in distribution.by_position),
        "",
        _row("law of log-odds", "width", "mean |Δ|", "p95", "p99", "top 1 % of K3", "", ""),
        _law_row("measured", None, fitted.found),
        *(_law_row(each.law, each.sigma, each.core) for each in fitted.candidates),
    ]
    if fitted.spikes:
        text.append(f"spikes beside it: {fitted.spikes:,} tokens, of size {fitted.spike_size:.3g}")
    return text


def dose_lines(reached: Reached | None) -> list[str]:
    """What was asked for, and what it gave."""
    if reached is None:
        return []
    shares = tuple(100.0 * (value / reached.target - 1.0) for value in (reached.divergence, reached.fresh, reached.k3))
    return [
        "",
        f"dose asked for: K3 {reached.target:.4g} a token; solved: sigma {reached.sigma:.6g}",
        f"KL {reached.divergence:.4g} ({shares[0]:+.1f} %) on {reached.positions:,} positions that it was solved on",
        f"KL {reached.fresh:.4g} ({shares[1]:+.1f} %) on {reached.fresh_positions:,} others, sampled under it",
        f"K3 {_pm(reached.k3, reached.k3_error)} ({shares[2]:+.1f} %) of all tokens sampled under it",
    ]


def _left_out(paired: Paired) -> list[str]:
    said = [
        f"only in {name}: {len(ids):,} rollouts" for ids, name in zip(paired.only, paired.names, strict=True) if ids
    ]
    said += [f"not scored: {paired.unscored:,} rollouts"] if paired.unscored else []
    return said + ([paired.at_two_temperatures] if paired.at_two_temperatures else [])


def _bin_row(each: Bin, form: str) -> str:
    low = f"{each.low:{form}}".removeprefix("0" if "." in f"{each.low:{form}}" else "")
    return _row(
        f">= {low}",
        f"{each.tokens:,}",
        f"{each.abs_mean:.4g}",
        f"{each.abs_max:.4g}",
        f"{each.k3:.3g}",
        f"{each.log_odds_mad:.4g}",
        f"{each.log_odds_p05:.4g}",
        f"{each.log_odds_p95:.4g}",
    )


def _law_row(name: str, sigma: float | None, core: Any) -> str:
    width = "" if sigma is None else f"{sigma:.4g}"
    numbers = (f"{core.mean:.4g}", f"{core.p95:.4g}", f"{core.p99:.4g}", f"{100 * core.tail_share:.0f} %")
    return _row(name, width, *numbers, "", "")


def _row(first: str, *rest: str) -> str:
    return f"{first:16}{''.join(f'{cell:>14}' for cell in rest)}".rstrip()


def _pm(value: float, error: float | None) -> str:
    return f"{value:.4g} ± {error or 0.0:.2g}"
