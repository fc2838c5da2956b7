"""`vexact compare` and `vexact calibrate`: verdicts, exit codes, and what they leave for other programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from vexact import cli

Run = Callable[..., tuple[int, str, str]]
SAMPLE = str(Path(__file__).parents[1] / "data" / "vllm_cpu_bf16_smollm2_sample.jsonl.gz")
BF16 = f"{SAMPLE}:hf_bf16"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*argv: str) -> tuple[int, str, str]:
        code = cli.main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def equal(tmp_path: Path) -> tuple[str, str]:
    """Two files of the same four tokens, in other orders of rollouts."""
    rows = [{"id": i, "completion_ids": [i, 7], "logprobs": [-0.5, -1.5 - i]} for i in range(2)]
    for name, listed in (("a", rows), ("b", rows[::-1])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, listed)))
    return str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")


@pytest.mark.parametrize("flags, code, word", [
    ((), 1, "outside"),
    (("--max-abs", "0.5", "--max-k3", "3e-3"), 0, "within"),
    (("--max-k3", "1e-3"), 1, "outside"),
    (("--max-abs", "0.1"), 1, "outside"),
    (("--max-k3", "3e-3", "--min-tokens", "3840"), 0, "within"),
    (("--max-k3", "3e-3", "--min-tokens", "3841"), 3, "inconclusive"),
    (("--max-k3", "1e-3", "--min-tokens", "3841"), 3, "inconclusive"),  # a mean of too few proves nothing
    (("--max-abs", "0.1", "--min-tokens", "3841"), 1, "outside"),  # one token does
    (("--min-tokens", "3841"), 1, "outside"),
])  # fmt: skip
def test_a_real_mismatch_is_judged(run: Run, flags: tuple[str, ...], code: int, word: str) -> None:
    found, out, err = run("compare", SAMPLE, BF16, *flags)
    assert (found, err) == (code, "")
    assert out.splitlines()[-1].startswith(f"compare: {word}, 3,840 tokens of 24 rollouts compared, 3,836 differ")


def test_equal_bits_are_within_and_one_bit_is_not(run: Run, equal: tuple[str, str]) -> None:
    assert run("compare", *equal)[0] == 0
    assert run("compare", *equal, "--min-tokens", "5")[0] == 3
    text = Path(equal[1]).read_text()
    Path(equal[1]).write_text(text.replace("-0.5", "-0.50000006", 1))
    code, out, _ = run("compare", *equal)
    assert code == 1 and "tokens that differ in a bit: 1 > 0" in out


def test_what_one_file_lacks_makes_it_inconclusive(run: Run, equal: tuple[str, str]) -> None:
    Path(equal[1]).write_text(Path(equal[1]).read_text().splitlines()[0])
    code, out, _ = run("compare", *equal)
    assert code == 3 and "inconclusive: 1 rollouts only in " in out and "a.jsonl (logprobs): 0" in out
    other = {"id": "x", "completion_ids": [1], "logprobs": [-1.0]}
    Path(equal[1]).write_text(json.dumps(other))
    code, out, _ = run("compare", *equal)
    assert code == 3 and "inconclusive: 0 tokens compared, at least 1 needed" in out


def test_the_second_file_must_say_which_of_its_sides_is_meant(run: Run, tmp_path: Path) -> None:
    """A trainer's batch holds the sampler's column too: compared with where it came from it is equal by itself."""
    files = tmp_path / "sampled.jsonl", tmp_path / "batch.jsonl"
    files[0].write_text(json.dumps({"id": 0, "completion_ids": [1], "logprobs": [-0.5]}))
    batch = {"id": 0, "completion_ids": [1], "rollout_log_probs": [-0.5], "old_log_probs": [-0.75]}
    files[1].write_text(json.dumps(batch))
    columns = "columns: rollout_log_probs, old_log_probs"
    for command in ("compare", "calibrate"):
        code, out, err = run(command, *map(str, files))
        said = f"{files[1]}: which column holds the log-probabilities to compare? Give FILE:COLUMN; {columns}"
        assert (code, out) == (2, "") and said in err
    assert run("compare", str(files[0]), f"{files[1]}:old_log_probs")[0] == 1
    assert run("compare", str(files[0]), f"{files[1]}:rollout_log_probs")[0] == 0
    del batch["rollout_log_probs"]
    files[1].write_text(json.dumps(batch))
    assert run("compare", *map(str, files))[0] == 1  # a trainer's column alone is taken


@pytest.mark.parametrize("sampler, trainer, said", [
    (1.5, 0.7, ("1.5", "0.7")),
    (0, 0.7, ("1", "0.7")),  # greedy sampling's log-probabilities are those at 1
    (0.0, 1, None),
    (0.7, 0.7, None),
    (None, 0.7, None),
])  # fmt: skip
def test_rollouts_that_say_two_temperatures_make_it_inconclusive(
    run: Run, tmp_path: Path, sampler: float | None, trainer: float, said: tuple[str, str] | None
) -> None:
    """A distance between laws at two temperatures says nothing of two engines."""
    files = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for file, own in zip(files, (sampler, trainer), strict=True):
        rows = [{"id": f"r{i}", "completion_ids": [i], "logprobs": [-0.5], "temperature": 1.0} for i in range(3)]
        rows[1]["temperature"] = own
        file.write_text("\n".join(map(json.dumps, rows)))
    code, out, err = run("compare", *map(str, files), "--max-k3", "1e-3")
    assert (code, err) == (0 if said is None else 3, "")
    for text in (out, run("calibrate", *map(str, files))[1]):
        assert ("two temperatures" in text) == (said is not None)
        if said is not None:
            where = f"r1 at {said[0]} in {files[0]} (logprobs) and at {said[1]} in {files[1]} (logprobs)"
            assert f"1 rollouts are at two temperatures: {where}\n" in text


def test_temperatures_of_what_is_not_compared_are_not_judged(run: Run, tmp_path: Path) -> None:
    files = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for file, own in zip(files, (1.0, 0.7), strict=True):
        rows = [{"id": i, "completion_ids": [i], "logprobs": [-0.5], "mask": [1], "temperature": 1.0} for i in range(3)]
        rows[1] |= {"temperature": own, "mask": [0]}
        rows[2] |= {"temperature": own, "logprobs": None}
        file.write_text("\n".join(map(json.dumps, rows)))
    found, out, _ = run("compare", *map(str, files), "--max-unscored", "1")
    assert found == 0 and "temperatures" not in out


@pytest.fixture
def scored_in_part(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Two columns of four rollouts, of which so many were not scored and so many hold no token that counts."""

    def write(unscored: int, empty: int = 0) -> tuple[str, str]:
        rows = [{"id": i, "completion_ids": [i, 7], "logprobs": [-0.5, -1.5], "trainer_logprobs": [-0.5, -1.5],
                 "mask": [1, 1]} for i in range(4)]  # fmt: skip
        for i in range(unscored):
            rows[i]["trainer_logprobs"] = None
        for row in rows[4 - empty :]:
            row["mask"] = [0, 0]
        path = tmp_path / "part.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return str(path), f"{path}:trainer_logprobs"

    return write


@pytest.mark.parametrize("unscored, flags, code", [
    (0, (), 0),
    (1, (), 3),
    (3, ("--max-k3", "1e-3"), 3),
    (3, ("--max-unscored", "2"), 3),
    (3, ("--max-unscored", "3"), 0),
    (2, ("--max-k3", "1e-3", "--max-unscored", "9"), 0),
    (4, ("--max-unscored", "4"), 3),  # no token is left
])  # fmt: skip
def test_what_one_side_did_not_score_makes_it_inconclusive_unless_it_is_allowed(
    run: Run, scored_in_part: Callable[..., tuple[str, str]], unscored: int, flags: tuple[str, ...], code: int
) -> None:
    found, out, err = run("compare", *scored_in_part(unscored), *flags)
    assert (found, err) == (code, "")
    said = f"{unscored} rollouts have no log-probabilities on one side"
    assert out.count(said) == (unscored > 0)
    allowed = int(flags[-1]) if "--max-unscored" in flags else 0
    assert (f"inconclusive: {said}, at most {allowed} allowed\n" in out) == (unscored > allowed)
    assert (f"left out: {said}\n" in out) == (0 < unscored <= allowed)


def test_a_token_that_differs_is_outside_whatever_was_not_scored(
    run: Run, scored_in_part: Callable[..., tuple[str, str]]
) -> None:
    path, column = scored_in_part(2)
    Path(path).write_text(Path(path).read_text().replace('"trainer_logprobs": [-0.5', '"trainer_logprobs": [-0.25'))
    assert run("compare", path, column)[0] == 1


def test_rollouts_without_a_token_to_compare_are_told_and_decide_nothing(
    run: Run, scored_in_part: Callable[..., tuple[str, str]]
) -> None:
    code, out, _ = run("compare", *scored_in_part(0, empty=3))
    assert code == 0 and "left out: 3 rollouts have no token to compare\n" in out
    code, out, _ = run("compare", *scored_in_part(0))
    assert code == 0 and "left out" not in out
    code, out, _ = run("compare", *scored_in_part(0, empty=4))
    assert code == 3 and "inconclusive: 0 tokens compared" in out


def test_results_are_left_for_other_programs(run: Run, tmp_path: Path) -> None:
    files = tmp_path / "found.json", tmp_path / "found.xml"
    flags = ("--max-abs", "0.1", "--max-k3", "1", "--github", "--json", str(files[0]), "--junitxml", str(files[1]))
    code, out, _ = run("compare", SAMPLE, BF16, *flags)
    found = json.loads(files[0].read_text())
    assert (code, found["exit_code"], found["status"]) == (1, 1, "outside")
    assert [(each["name"], each["failed"]) for each in found["checks"]] == [("max |Δ|", True), ("K3", False)]
    assert found["measures"]["tokens"] == 3840 and found["summary"] == out.splitlines()[-1]
    suite = ElementTree.parse(files[1]).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "0")
    assert [len(case) for case in suite] == [1, 0]
    errors = [line for line in out.splitlines() if line.startswith("::error title=vexact compare::")]
    assert len(errors) == 2 and "max |Δ|: 0.36" in errors[0]
    code, out, _ = run(
        "compare", SAMPLE, BF16, "--max-k3", "1", "--min-tokens", "9999", "--github", "--junitxml", str(files[1])
    )
    assert code == 3 and "::warning title=vexact compare::3840 tokens compared, at least 9999 needed" in out
    assert ElementTree.parse(files[1]).getroot().get("errors") == "1"


@pytest.mark.parametrize("argv, words", [
    (("compare", SAMPLE), "B"),
    (("compare", SAMPLE, "nowhere.jsonl"), "nowhere.jsonl: no such file or folder"),
    (("compare", SAMPLE, f"{SAMPLE}:hf_fp64"), "rollout 1: hf_fp64 is not there; columns: logprobs, hf_bf16, hf_fp32"),
    (("compare", SAMPLE, BF16, "--max-abs", "-1"), "--max-abs is -1.0"),
    (("compare", SAMPLE, BF16, "--max-k3", "nan"), "--max-k3 is nan"),
    (("compare", SAMPLE, BF16, "--min-tokens", "0"), "--min-tokens is 0"),
    (("compare", SAMPLE, BF16, "--max-unscored", "-1"), "--max-unscored is -1"),
    (("compare", SAMPLE, BF16, "--json", "/nowhere/x.json"), "--json: /nowhere is not a folder"),
    (("calibrate", SAMPLE), "which column holds the log-probabilities beside logprobs"),
    (("calibrate", SAMPLE, BF16, "-o", "/nowhere/x.yaml"), "--output: /nowhere is not a folder"),
])  # fmt: skip
def test_bad_input_is_one_line_and_two(run: Run, argv: tuple[str, ...], words: str) -> None:
    code, out, err = run(*argv)
    assert code == 2 and out == ""
    assert err.startswith("vexact: ") and err.count("\n") == 1 and words in err


def test_calibrate_prints_the_distribution_and_leaves_the_block(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "block.yaml"
    code, out, _ = run("calibrate", SAMPLE, BF16, "-o", str(path))
    assert code == 0 and out.endswith(path.read_text())
    block = yaml.safe_load(path.read_text())["mismatch"]
    assert block == {"site": "logits", "side": "sampler", "shape": "gaussian", "law": "log-odds",
                     "persistence": "prefix", "k3": 0.002052}  # fmt: skip
    for words in (
        "|Δ| mean 0.04426, p95 0.1324, p99 0.2073, max 0.3605",
        "of it 15 % in 39 tokens",
        ">= .900",
        ">= 128",
    ):
        assert words in out


def test_calibrate_gives_json_that_any_reader_takes(run: Run) -> None:
    code, out, _ = run("calibrate", SAMPLE, BF16, "--json")
    found = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert code == 0
    assert found["distribution"]["by_probability"][-1]["high"] is None
    assert found["fit"]["mismatch"]["k3"] == 0.002052 and found["fit"]["best"]["law"] == "gaussian"


def test_calibrate_without_a_compared_token_is_bad_input(run: Run, equal: tuple[str, str]) -> None:
    other = {"id": "x", "completion_ids": [1], "logprobs": [-1.0]}
    Path(equal[1]).write_text(json.dumps(other))
    code, _, err = run("calibrate", *equal)
    assert code == 2 and "no token was compared" in err
