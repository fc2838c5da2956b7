"""The command line: what it prints, its exit codes, and one line for every fault of the input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vexact import cli
from vexact.commands.model import as_bits, from_bits

Run = Callable[..., tuple[int, str, str]]
RECIPE = str(Path(__file__).parents[1] / "recipes" / "tiny_chain_sum.yaml")


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*argv: str) -> tuple[int, str, str]:
        code = cli.main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def generated(run: Run, *argv: str) -> dict[str, Any]:
    code, out, _ = run("generate", "tiny", "--json", "--max-tokens", "6", *argv)
    assert code == 0
    return dict(json.loads(out))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "verify, generate, score, train, eval, study, report, compare, calibrate, fetch, info"),
        (["nonsense"], "verify, generate, score, train, eval, study, report, compare, calibrate, fetch, info"),
        (["verify"], "MODEL"),
        (["verify", "tiny", "--seconds", "soon"], "--seconds"),
        (["verify", "tiny", "--seconds", "0"], "seconds is 0"),
        (["verify", "tiny", "--dtype", "int8"], "int8"),
        (["verify", "tiny", "--sekonds", "3"], "--sekonds"),
        (["verify", "nowhere"], "nowhere/config.json: no such file"),
        (["verify", "tiny", "--threads", "-1"], "--threads is -1"),
        (["generate", "tiny"], "--prompt or --prompt-ids"),
        (["generate", "tiny", "--prompt", ""], "--prompt number 1 is empty"),
        (["generate", "tiny", "--prompt", "a", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "tiny", "--prompt", "a", "--n", "0"], "n is 0"),
        (["generate", "tiny", "--prompt", "a", "--chat"], "chat template"),
        (["generate", "tiny", "--prompt", "a", "--max-tokens", "5000"], "2048 positions"),
        (["generate", "tiny", "--prompt", "a" * 2100], "2101 tokens exceed the model's 2048 positions"),
        (["generate", "tiny", "--prompt-ids", "320"], "token id 320 is outside the vocabulary of 320"),
        (["score", "tiny"], "--text, --ids and --file"),
        (["score", "tiny", "--text", "a", "--ids", "1", "2"], "--text and --ids"),
        (["score", "tiny", "--ids", "1"], "at least 2"),
        (["score", "tiny", "--ids", "1", "-5"], "-5"),
        (["score", "tiny", "--file", "nowhere.json"], "nowhere.json"),
        (["verify", "tiny", "--json", "/nowhere/v.json"], "--json: /nowhere is not a folder"),
        (["info", "--threads", "100000"], "--threads is 100000"),
        (["generate", "tiny", "--prompt", "a", "--stop-ids", "99999"], "--stop-ids"),
        (["train", "nowhere.yaml"], "nowhere.yaml"),
        (["fetch", "gpt5"], "gpt5"),
        (["eval", "tiny"], "--task or --recipe"),
        (["eval", "nowhere", "--task", "modsum"], "nowhere/config.json: no such file"),
        (["eval", "tiny", "--task", "modsums"], "unknown task modsums; did you mean"),
        (["eval", "tiny", "--task", "modsum", "--n", "0"], "eval.n = 0 is below 1"),
        (["eval", "tiny", "--task", "modsum", "--k", "2"], "--k 2: pass@k needs 1 to n"),
        (["eval", "tiny", "--task", "modsum", "--items", "0"], "eval.items is 0"),
        (["eval", "tiny", "--task", "modsum", "--task.options.modulos", "3"], "did you mean modulus?"),
        (["eval", "tiny", "--task", "modsum", "--task.held_out", "0"], "task.held_out is 0"),
        (["eval", "tiny", "--recipe", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["info", "--wrong"], "--wrong"),
        (["info", "--device", "cuda"], "device 'cuda' needs a GPU"),
        (["verify", "tiny", "--device", "cuda"], "device 'cuda' needs a GPU"),
        (["generate", "tiny", "--prompt", "a", "--device", "tpu"], "--device"),
        (["generate", "tiny", "--prompt", "a", "--profile", "tensorcore"], "profile 'tensorcore' is of GPUs only"),
        (["score", "tiny", "--ids", "1", "2", "--profile", "fast"], "--profile"),
        (["train", RECIPE, "--device", "cuda"], "device 'cuda' needs a GPU"),
        (["train", RECIPE, "--device", "tpu"], "--device: device = 'tpu' is not one of cpu, cuda"),
        (["train", RECIPE, "--profile", "tensorcore"], "profile 'tensorcore' is of GPUs only"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run: Run, argv: list[str], words: str) -> None:
    code, out, err = run(*argv)
    assert code == 2
    assert out == ""
    assert err.startswith("vexact: ")
    assert err.count("\n") == 1
    assert words in err


def test_an_unknown_instruction_set_is_refused_by_the_name_of_the_variable(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VEXACT_ISA", "mmx")
    code, _, err = run("info")
    assert code == 2
    assert "VEXACT_ISA" in err
    assert "mmx" in err


def test_an_instruction_set_is_of_the_cpu_only(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VEXACT_ISA", "baseline")
    code, _, err = run("info", "--device", "cuda")
    assert code == 2
    assert err == "vexact: VEXACT_ISA: device 'cuda' has no instruction set 'baseline': leave it out\n"


def test_the_environment_forces_the_instruction_set(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VEXACT_ISA", "baseline")
    _, out, _ = run("info", "--json")
    assert json.loads(out)["kernels"] == "cpu:baseline"


def test_info_says_the_same_digests_on_every_instruction_set(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = json.loads(run("info", "--json")[1])
    assert (facts["device"], facts["profile"]) == ("cpu", "portable")
    assert "none" in facts["gpu"] or torch.cuda.is_available()
    assert facts["instruction_sets"][-1] == "baseline"
    assert len(set(facts["digests"].values())) == 3
    monkeypatch.setenv("VEXACT_ISA", "baseline")
    assert json.loads(run("info", "--json")[1])["digests"] == facts["digests"]


def test_info_is_readable_without_json(run: Run) -> None:
    code, out, _ = run("info")
    assert code == 0
    assert "instruction_sets" in out


def test_generate_gives_ids_text_and_bits_that_fit_together(run: Run) -> None:
    document = generated(run, "--prompt", "one", "--prompt", "two", "--n", "2")
    assert [(r["request"], r["sample"]) for r in document["rollouts"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rollout in document["rollouts"]:
        assert len(rollout["completion_ids"]) == len(rollout["logprobs"]) == len(rollout["logprob_bits"])
        assert from_bits(rollout["logprob_bits"]).tolist() == rollout["logprobs"]
        assert rollout["finish"] in ("stop", "length")
        assert (rollout["version"], rollout["digest"]) == (0, document["digest"])


def test_generate_takes_ids_as_they_are(run: Run) -> None:
    assert generated(run, "--prompt-ids", "5", "6", "7")["rollouts"][0]["prompt_ids"] == [5, 6, 7]


def test_the_seed_alone_decides_what_is_drawn(run: Run) -> None:
    first, again = (generated(run, "--prompt", "x", "--seed", "3") for _ in range(2))
    assert first == again
    assert generated(run, "--prompt", "x", "--seed", "4")["rollouts"] != first["rollouts"]


def test_a_stop_id_ends_the_completion_and_belongs_to_it(run: Run) -> None:
    free = generated(run, "--prompt", "x", "--temperature", "0")["rollouts"][0]["completion_ids"]
    stopped = generated(run, "--prompt", "x", "--temperature", "0", "--stop-ids", str(free[1]))["rollouts"][0]
    assert stopped["completion_ids"] == free[: free.index(free[1]) + 1]
    assert stopped["finish"] == "stop"


def test_no_tokens_may_be_asked_for(run: Run) -> None:
    code, out, _ = run("generate", "tiny", "--prompt", "x", "--max-tokens", "0", "--json")
    assert code == 0
    assert json.loads(out)["rollouts"][0]["completion_ids"] == []


def test_plain_text_says_why_each_completion_ended(run: Run) -> None:
    code, out, _ = run("generate", "tiny", "--prompt", "x", "--max-tokens", "3", "--n", "2")
    assert code == 0
    assert out.count("3 tokens]") == 2 or "stop" in out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_was_generated_is_scored_with_the_same_bits(run: Run, tmp_path: Path, dtype: str) -> None:
    document = generated(run, "--prompt", "hello", "--n", "2", "--temperature", "0.6", "--dtype", dtype)
    path = tmp_path / "rollouts.json"
    path.write_text(json.dumps(document))
    code, out, _ = run("score", "tiny", "--file", str(path))
    assert code == 0
    tokens = sum(len(rollout["completion_ids"]) for rollout in document["rollouts"])
    assert out == f"score: {tokens} values compared, 0 differ, bits agree\n"


def test_one_changed_bit_in_the_file_is_found(run: Run, tmp_path: Path) -> None:
    document = generated(run, "--prompt", "hello")
    digits = document["rollouts"][0]["logprob_bits"]
    digits[1] = f"{int(digits[1], 16) ^ 1:08x}"
    path = tmp_path / "rollouts.json"
    path.write_text(json.dumps(document))
    code, out, _ = run("score", "tiny", "--file", str(path), "--json")
    assert code == 1
    assert json.loads(out)["differ"] == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "rollouts"),
        ('{"dtype": "float32", "rollouts": [{}]}', "prompt_ids"),
        ('{"dtype": "int8", "rollouts": []}', "int8"),
        (
            '{"dtype": "float32", "rollouts": [{"prompt_ids": [1], "completion_ids": [2, 3], "temperature": 1,'
            ' "logprob_bits": ["bf800000"]}]}',
            "2 completion_ids and 1 logprob_bits",
        ),
        (
            '{"dtype": "float32", "rollouts": [{"prompt_ids": [], "completion_ids": [], "temperature": 1,'
            ' "logprob_bits": []}]}',
            "rollout 0: prompt_ids: 0 tokens",
        ),
    ],
)
def test_a_broken_file_of_rollouts_is_named(run: Run, tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "rollouts.json"
    path.write_text(content)
    code, _, err = run("score", "tiny", "--file", str(path))
    assert code == 2
    assert str(path) in err
    assert words in err
    assert err.count("\n") == 1


def test_score_of_text_covers_every_token_after_the_first(run: Run) -> None:
    document = json.loads(run("score", "tiny", "--text", "abc", "--json")[1])
    assert document["ids"] == [256, 97, 98, 99]
    assert len(document["logprobs"]) == 3
    plain = run("score", "tiny", "--text", "abc")[1]
    assert plain.count("\n") == 4


def test_bits_survive_writing_and_reading() -> None:
    x = torch.tensor([0.0, -0.0, -1.5, 1e-45, float("inf"), float("nan")])
    assert torch.equal(from_bits(as_bits(x)).view(torch.int32), x.view(torch.int32))


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; from vexact.cli import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "verify" in done.stdout


def test_eval_gives_what_the_run_that_made_the_model_measured(run: Run, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    words = ["--run.folder", folder, "--steps", "2", "--warm_start.steps", "4", "--eval.items", "30", "--eval.n", "3"]
    recipe = str(Path(RECIPE).with_name("tiny_modsum.yaml"))
    assert run("train", recipe, *words, "--threads", "1", "--warm_start.until", "0")[0] == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    argv = ["eval", f"{folder}/checkpoint", "--recipe", f"{folder}/config.yaml", "--json", "--threads", "1"]
    code, out, _ = run(*argv)
    found = json.loads(out)
    assert code == 0
    assert (found["mean"], found["pass_at"]["2"]) == (last["eval_success"], last["eval_pass_at_2"])
    assert found["mean"] == sum(found["successes"]) / 90
    assert found["tokens"] / 90 == last["eval_length_mean"]
    assert len(found["successes"]) == found["items"] == 30
    assert json.loads(run(*argv, "--k", "1", "3", "--items", "5")[1])["pass_at"].keys() == {"1", "3"}


def test_eval_asks_a_task_without_a_recipe(run: Run) -> None:
    argv = ["eval", "tiny-modsum", "--task", "modsum", "--task.options.max_terms", "5", "--items", "20", "--n", "2"]
    code, out, _ = run(*argv, "--max-tokens", "5", "--temperature", "0.5")
    assert code == 0
    assert out.startswith("modsum: 20 held-out questions, 2 completions each, temperature 0.5\nmean@2  0.")
    assert "pass@2" in out
