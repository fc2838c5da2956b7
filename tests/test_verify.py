"""`verify` says equal, differs or inconclusive, and each of its checks can fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import vexact_kernels
from vexact import cli, verify
from vexact.errors import BadInput
from vexact.model.checkpoint import save_folder
from vexact.model.origin import Addresses
from vexact.model.policy import Policy
from vexact.model.tiny import tiny_config, tiny_weights
from vexact.recipe import MismatchSection
from vexact.study.noise import Noise, Noisy
from vexact.testing import Comparison, compare_bits
from vexact.verification import checks, control, mutants, updates
from vexact.verification.report import as_annotations, as_json, as_junit
from vexact.verification.result import (
    CHUNKED,
    DIFFERS,
    EQUAL,
    GRADIENTS,
    INCONCLUSIVE,
    KINDS,
    SAMPLED,
    Caught,
    Check,
    Control,
    Verification,
)
from vexact.verification.subject import Sizes, Subject
from vexact.verification.updates import update_plan

FEW = Sizes(requests=8, samples=2, tokens=12, few=4, sequences=2, length=140)
DIFFERENT = compare_bits(torch.ones(3), torch.tensor([1.0, 2.0, 3.0]), "logits")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Other processes of a busy machine make a second thread a burden on kernels as small as these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def policy(dtype: torch.dtype = torch.float32) -> Policy:
    return Policy.load("tiny", vexact_kernels.load(), dtype)


def small_minima(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same checks on fewer values."""
    monkeypatch.setattr(verify, "SAMPLED_SMALL", 150)
    monkeypatch.setattr(verify, "LOGITS", 100_000)
    monkeypatch.setattr(verify, "sizes_for", lambda config, affordable: FEW)


def of(*found: Comparison, reasons: tuple[str, ...] = (), caught: tuple[Caught, ...] = ()) -> Verification:
    lines = [Check(f"check {i}", "float32", "logits", each) for i, each in enumerate(found)]
    return Verification("tiny", lines, [Control("float32", 8, 8)], caught, reasons)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiny_is_equal_in_every_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    small_minima(monkeypatch)
    result = verify.verify("tiny", policy().ops.kernels, [dtype], seconds=300)
    assert result.exit_code == EQUAL, result.summary
    assert result.summary == f"verify: equal, {result.compared:,} values compared, 0 differ"
    assert {check.status for check in result.checks} == {"equal"}
    assert all(check.found.compared > 0 for check in result.checks)


def complete(without: str = "") -> list[Check]:
    """A line a kind, with as much compared as any minimum asks."""
    return [Check(f"{kind}!", "float32", kind, Comparison(10**7)) for kind in KINDS if kind != without]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_folder_of_another_family_is_equal_by_every_kind_of_check_however_short_the_time(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_minima(monkeypatch)
    config = tiny_config(family, tie_word_embeddings=False)
    save_folder(tmp_path / family, config, tiny_weights(config))
    result = verify.verify(tmp_path / family, policy().ops.kernels, [dtype], seconds=0.01)
    assert result.exit_code == EQUAL, result.summary
    assert {check.kind for check in result.checks if check.found.compared} == set(KINDS)


def test_the_minima_are_met_however_short_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    result = verify.verify("tiny", policy().ops.kernels, [torch.bfloat16], seconds=0.01)
    assert result.exit_code == EQUAL, result.summary
    assert sum(check.found.compared for check in result.checks if check.kind == SAMPLED) >= 10_000
    assert sum(check.found.compared for check in result.checks if check.kind in CHUNKED) >= 1_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_was_not_compared_is_named(kind: str) -> None:
    control = Control("float32", 8, 8)
    assert verify.shortfalls(10**6, complete(), control) == []
    late = Check("late", "float32", kind, skipped="no time left")
    elsewhere = Check("elsewhere", "bfloat16", kind, Comparison(10**9))
    reasons = verify.shortfalls(10**6, [*complete(without=kind), late, elsewhere], control)
    assert reasons[0] == f"not compared in float32: {kind}"
    assert of(Comparison(1), reasons=tuple(reasons)).exit_code == INCONCLUSIVE


@pytest.mark.parametrize("kind", ["", "orders"])
def test_a_check_that_compared_nothing_is_named(kind: str) -> None:
    empty = Check("hollow", "float32", kind)
    assert empty.status == "nothing compared"
    assert verify.shortfalls(10**6, [*complete(), empty], Control("float32", 8, 8)) == [
        "not compared in float32: hollow"
    ]


def test_a_plan_without_a_kind_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    small_minima(monkeypatch)
    monkeypatch.setattr(verify, "update_plan", lambda *args: update_plan(*args)[:1])
    result = verify.verify("tiny", policy().ops.kernels, seconds=0.01)
    assert result.exit_code == INCONCLUSIVE
    assert "flush-denormal: gradients, gradients, threads 1, " in result.summary


def test_one_logit_counts_once() -> None:
    subject = Subject(policy(), FEW)
    first, second = (subject.random_sequences(1000 * (1 + size)) for size in (1, 7))
    assert not {tuple(tokens) for tokens in first} & {tuple(tokens) for tokens in second}
    less = [replace(check, found=Comparison(10)) if check.kind in CHUNKED else check for check in complete()]
    (reason,) = verify.shortfalls(10**6, less, Control("float32", 8, 8))
    assert reason == "50 of at least 1,000,000 logits compared in float32"


def test_gradients_of_two_checks_are_not_added_up() -> None:
    halves = [Check(f"half {i}", "float32", GRADIENTS, Comparison(600)) for i in range(2)]
    reasons = verify.shortfalls(1000, [*complete(without=GRADIENTS), *halves], Control("float32", 8, 8))
    assert reasons == ["600 of at least 1,000 gradient values compared in float32"]


def test_every_line_has_a_kind_that_is_asked_for_and_every_kind_a_line() -> None:
    kernels = policy().ops.kernels
    for small in (True, False):
        plan = [*checks.forward_plan(kernels, small), *update_plan(kernels, small)]
        assert {planned.kind for planned in plan} == {*KINDS, ""}


def test_mutants_name_the_line_that_catches_them() -> None:
    kernels = policy().ops.kernels
    lines = [planned.name for planned in [*checks.forward_plan(kernels, True), *update_plan(kernels, True)]]
    for mutant in mutants.mutants(kernels):
        assert any(line.startswith(mutant.check) for line in lines), mutant.check


@pytest.mark.parametrize("mutant", mutants.mutants(vexact_kernels.load()), ids=lambda mutant: mutant.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_mutant_is_caught_where_the_honest_policy_passes(mutant: mutants.Mutant, dtype: torch.dtype) -> None:
    assert mutant.run(Subject(policy(dtype), verify.MUTANT_SIZES)).differ == 0
    assert mutant.run(mutant.make(policy(dtype), verify.MUTANT_SIZES)).differ > 0


DISTURBED = [
    MismatchSection(preset="bf16-moe"),
    MismatchSection(site="kv", sigma=0.1, persistence="prefix"),
    MismatchSection(site="weights", sigma=0.02),
    MismatchSection(site="logits", k3=1e-2, shape="laplace", persistence="sequence"),
]


@pytest.mark.parametrize("section", DISTURBED, ids=verify.described)
def test_a_disturbed_engine_is_as_repeatable_as_an_exact_one(section: MismatchSection) -> None:
    exact = policy()
    subject = Subject(exact, FEW, view=verify.disturbance(section, exact))
    assert subject.policy is not exact
    plan = [*checks.forward_plan(exact.ops.kernels, True), *update_plan(exact.ops.kernels, True)]
    for planned in plan:
        if not planned.absent and planned.kind not in ("instruction sets", "gradients, instruction sets"):
            found = planned.run(subject)
            assert (found.differ, found.compared > 0) == (0, True), planned.name
    plain = Subject(exact, FEW)
    moved = compare_bits(checks.recorded(subject.rollouts)[:8], checks.recorded(plain.rollouts)[:8])
    assert moved.differ


def test_noise_of_a_forward_call_is_caught() -> None:
    """A mutant: numbers from a generator, as an engine's own noise is, and not from an address."""

    class Streamed(Noise):
        def row_keys(self, site: str, at: Addresses) -> Any:
            return torch.randint(1 << 62, (len(at.position),)).numpy().view("uint64")

    def view(policy: Policy) -> Policy:
        noise = Streamed(MismatchSection(site="logits", sigma=0.1), 1, 0.1)
        return replace(policy, ops=Noisy(policy.ops, noise, policy.config))

    assert checks.sampler_is_scorer(Subject(policy(), FEW, view=view), 1.0).differ


def test_what_is_no_disturbance_of_a_forward_is_refused() -> None:
    with pytest.raises(BadInput, match=r"mismatch\.site = record"):
        verify.verify("tiny", vexact_kernels.load(), mismatch=MismatchSection(site="record", sigma=0.1))


def test_ranks_that_add_up_their_own_lanes_first_are_caught_in_a_whole_step() -> None:
    assert updates.step_on_ranks(Subject(policy(), verify.MUTANT_SIZES), 2).differ == 0
    assert updates.step_on_ranks(mutants.Reducing(policy(), verify.MUTANT_SIZES), 2).differ > 0


def test_a_whole_verification_of_a_broken_sampler_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    small_minima(monkeypatch)

    def broken(policy: Policy, sizes: Sizes, view: Any = None) -> Subject:
        return mutants.sampler_only(policy, sizes, mutants.OneBit)

    monkeypatch.setattr(verify, "Subject", broken)
    result = verify.verify("tiny", policy().ops.kernels, seconds=0.01)
    assert result.exit_code == DIFFERS
    assert result.summary.startswith("verify: DIFFERS, ")
    assert "1 differ; first sampler = re-scoring, temperature 1 (float32) at [" in result.summary
    assert "(0x" in result.summary


def test_a_control_that_does_not_differ_makes_it_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    small_minima(monkeypatch)
    monkeypatch.setattr(verify, "control", lambda policy, rollouts, dtype: Control(dtype, 64, 0))
    result = verify.verify("tiny", policy().ops.kernels, seconds=0.01)
    assert result.exit_code == INCONCLUSIVE
    assert result.summary.startswith("verify: inconclusive, the control must differ")


def test_too_little_compared_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    small_minima(monkeypatch)
    monkeypatch.setattr(verify, "LOGITS", 10**9)
    result = verify.verify("tiny", policy().ops.kernels, seconds=0.01)
    assert result.exit_code == INCONCLUSIVE
    assert "of at least 1,000,000,000 logits compared in float32" in result.summary


def test_a_model_that_is_never_finite_is_inconclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_minima(monkeypatch)
    config = tiny_config(dtype="float16")
    weights = tiny_weights(config)
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 60000.0)
    weights["model.embed_tokens.weight"] *= 100
    save_folder(tmp_path / "loud", config, weights)
    result = verify.verify(tmp_path / "loud", policy().ops.kernels, seconds=0.01)
    assert result.exit_code == INCONCLUSIVE
    assert "not compared in float16: sampler = re-scoring, " in result.summary
    assert ", gradients, shuffled arrival, step and publish; " in result.summary
    assert "sampled log-probabilities" in result.summary


def test_the_control_differs_on_this_machine() -> None:
    rollouts = Subject(policy(), FEW).rollouts[::2]
    found = control.control(policy(), rollouts, "float32")
    assert found.differ > 0


def test_transformers_agrees_about_what_is_computed() -> None:
    """Within 1e-3 nats of another project's float32 model whose sums run in other orders: the weights are the same."""
    rollouts = Subject(policy(), FEW).rollouts[::2]
    model = control.huggingface(policy())
    theirs = control.chosen(control.logits_alone(model, rollouts), rollouts)
    batched = control.chosen(control.logits_batched(model, rollouts, 100), rollouts)
    ours = checks.recorded(rollouts)
    assert (theirs - ours).abs().max() < 1e-3
    assert (batched - ours).abs().max() < 1e-3


def test_what_the_caller_set_is_restored() -> None:
    subject = Subject(policy(), FEW)
    checks.threads(subject, 3)
    checks.flushed_logits(subject)
    assert torch.get_num_threads() == 1
    subnormal = torch.tensor([1e-40])
    assert (subnormal * 1.0).view(torch.int32).item() != 0


def test_subnormals_do_arise_where_they_are_checked() -> None:
    subject = Subject(policy(), FEW)
    faint = subject.gradients_of(subject.trained[:2], 1 << 30, subject.direction(subject.trained[:2], checks.FAINT))
    values = torch.cat([tensor.flatten() for tensor in faint.values()])
    assert ((values != 0) & (values.abs() < 2.0**-126)).sum() > 1000


def test_rollouts_with_other_tokens_differ_even_where_log_probabilities_agree() -> None:
    rollout = Subject(policy(), FEW).rollouts[0]
    other = replace(rollout, completion=(*rollout.completion[:-1], rollout.completion[-1] ^ 1))
    found = checks.same_rollouts([rollout], [other])
    assert (found.differ, found.where) == (1, "token ids")
    shorter = replace(rollout, completion=rollout.completion[:-1], logprobs=rollout.logprobs[:-1])
    assert checks.same_rollouts([rollout], [shorter]).where == "number of tokens"


def test_slow_implementations_are_for_small_models_only() -> None:
    kernels = vexact_kernels.load()
    small, large = ({other.name for other in checks.others(kernels, small=size)} for size in (True, False))
    assert {"cpu:baseline", "reference"} - {kernels.name} <= small
    assert not {"cpu:baseline", "reference"} & large
    assert kernels.name not in small


def test_a_difference_outweighs_what_is_inconclusive() -> None:
    assert of(Comparison(5)).exit_code == EQUAL
    assert of(Comparison(5), reasons=("why",)).exit_code == INCONCLUSIVE
    assert of(Comparison(5), DIFFERENT, reasons=("why",)).exit_code == DIFFERS
    assert of(Comparison(5), caught=(Caught("m", "c", "float32", 0),)).exit_code == DIFFERS
    assert of(Comparison(5), caught=(Caught("m", "c", "float32", 2),)).exit_code == EQUAL


def test_the_last_line_shows_the_first_difference() -> None:
    assert of(Comparison(4), DIFFERENT).summary == (
        "verify: DIFFERS, 7 values compared, 2 differ; first check 1 (float32) logits at [1]: "
        "1 (0x3f800000) and 2 (0x40000000)"
    )
    assert of(reasons=("a", "b")).summary == "verify: inconclusive, a; b"
    survivor = of(Comparison(1), caught=(Caught("no bits", "c", "float32", 0),))
    assert survivor.summary == "verify: DIFFERS, mutants that no check noticed: no bits"


def test_json_holds_every_line() -> None:
    data = json.loads(json.dumps(as_json(of(Comparison(4), DIFFERENT, caught=(Caught("m", "c", "float32", 1),)))))
    assert (data["status"], data["exit_code"], data["compared"], data["differ"]) == ("differs", 1, 7, 2)
    assert data["checks"][0]["first"] is None
    assert data["checks"][1]["first"]["index"] == [1]
    assert data["checks"][1]["first"]["right_bits"] == "0x40000000"
    assert data["controls"] == [{"dtype": "float32", "compared": 8, "differ": 8}]
    assert data["mutants"][0]["mutant"] == "m"


def test_junit_counts_failures_errors_and_skips() -> None:
    skipped = Check("late", "float32", "other", skipped="no time left")
    result = of(Comparison(4), DIFFERENT, reasons=("too little",))
    suite = ElementTree.fromstring(as_junit(replace(result, checks=[*result.checks, skipped])))
    assert {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "5",
        "failures": "1",
        "errors": "1",
        "skipped": "1",
    }
    assert len(suite) == 5
    assert len(suite.findall("testcase/failure")) == len(suite.findall("testcase/error")) == 1


def test_annotations_are_one_line_each() -> None:
    lines = as_annotations(of(Comparison(4), DIFFERENT))
    assert len(lines) == 2
    assert all(line.startswith("::error title=vexact verify::") and "\n" not in line for line in lines)
    assert as_annotations(of(Comparison(4)))[0].startswith("::notice")
    assert as_annotations(of(reasons=("50% of it",)))[0].endswith("inconclusive, 50%25 of it")


def test_the_command_prints_a_line_a_check_and_writes_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_minima(monkeypatch)
    to_json, to_xml = tmp_path / "v.json", tmp_path / "v.xml"
    argv = ["verify", "tiny", "--seconds", "0.01", "--github", "--json", str(to_json), "--junitxml", str(to_xml)]
    assert cli.main([*argv, "--threads", "1"]) == EQUAL
    lines = capsys.readouterr().out.splitlines()
    data = json.loads(to_json.read_text())
    assert lines[-1] == data["summary"]
    assert lines[-2].startswith("::notice")
    assert sum(line.endswith(" 0 differ") and line.startswith("float32") for line in lines) == sum(
        check["status"] == "equal" for check in data["checks"]
    )
    assert ElementTree.parse(to_xml).getroot().get("failures") == "0"


def test_the_command_exits_with_1_where_a_mutant_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    small_minima(monkeypatch)
    immortal = mutants.Mutant("honest", "none", checks.alone, Subject)
    monkeypatch.setattr(verify, "mutants", lambda kernels: [immortal])
    assert cli.main(["verify", "tiny", "--seconds", "0.01", "--mutants", "--threads", "1"]) == DIFFERS
