"""The engine on a device that is not the host: nothing is forgotten on the way, and the bits are those of the CPU."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from checkpoints import build, l3, q2, q3
from helpers import assert_same_bits
from made import EVERYTHING, gradients_of, make_trainer, shifted, some_advantages
from pretend import DEVICE, OnDevice, OnPretended, Pretended
from vexact import cli, verify
from vexact.commands import computing
from vexact.loop import RunResult, train
from vexact.model.checkpoint import fingerprint, load_weights
from vexact.model.config import ModelConfig
from vexact.model.gradients import Gradients
from vexact.model.policy import Policy, Scored
from vexact.model.tiny import tiny_config, tiny_weights
from vexact.recipe import (
    KLSection,
    LossSection,
    ModelSection,
    OptimizerSection,
    Recipe,
    RunSection,
    SamplingSection,
)
from vexact.rollout.request import Request
from vexact.rollout.sampler import Sampler
from vexact.tasks import Item
from vexact.training.admission import TrainingError
from vexact.training.optimizer import AdamW
from vexact.training.trainer import Trainer, weights_of
from vexact.verification.checks import thread_count
from vexact.verification.report import as_json, as_junit, check_line
from vexact.verification.result import EQUAL, Verification
from vexact.verification.subject import Sizes
from vexact_kernels import Chunks, Kernels, load

UNITS = "tensorcore on a pretended GPU"
FEW = Sizes(requests=8, samples=2, tokens=12, few=4, sequences=2, length=140)
OF_A_CPU = {"threads 1", "threads 2", "threads 3", "flush-denormal: sampler",
            "gradients, threads 1", "gradients, threads 2", "gradients, threads 3"}  # fmt: skip
WITH_A_CPU = {"instruction sets", "flush-denormal: logits", "flush-denormal: gradients", "gradients, instruction sets"}


@pytest.fixture(autouse=True)
def device() -> Iterator[Pretended]:
    """Known to torch in every test. One thread: tiny models are faster for it."""
    with thread_count(1), Pretended() as device:
        yield device


@cache
def pretended(profile: str = "portable") -> Kernels:
    kernels: Kernels = OnPretended(load(), profile)
    return kernels


REQUESTS = [  # prompts around a page's edge, siblings, greedy and not
    Request(i, [(7 * i + j) % 256 for j in range(length)], n=3, temperature=t, max_tokens=8)
    for i, (length, t) in enumerate([(5, 1.0), (63, 0.0), (70, 0.6)])
]


@pytest.fixture(params=["tiny", "qwen3", "qwen2", "llama"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A model to load: Qwen3 has norms of q and k and is tied, Qwen2 has biases, Llama's positions are scaled."""
    if request.param == "tiny":
        return "tiny"
    return str(build(tmp_path / request.param, {"qwen3": q3, "qwen2": q2, "llama": l3}[request.param]()))


def test_sampling_scoring_and_gradients_have_the_cpus_bits(model: str) -> None:
    on_cpu, policy = Policy.load(model, load()), Policy.load(model, pretended())
    expected, found = (Sampler(each, chunk=16, tokens_per_step=50).run(REQUESTS) for each in (on_cpu, policy))
    for a, b in zip(found, expected, strict=True):
        assert (a.id, a.completion, a.finish, a.digest) == (b.id, b.completion, b.finish, b.digest)
        assert_same_bits(a.logprobs, b.logprobs)
    sequences = [rollout.scored for rollout in expected]
    ours, theirs = (each.logprobs(sequences, tokens_at_once=100) for each in (policy, on_cpu))
    for x, y in ((ours.logprob, theirs.logprob), (ours.entropy, theirs.entropy), (ours.finite, theirs.finite)):
        assert isinstance(x, OnDevice)
        assert_same_bits(x.cpu(), y)
    assert policy.logprobs([]).logprob.device == DEVICE
    assert_same_tensors(gradient_passes(policy, sequences), gradient_passes(on_cpu, sequences))


def gradient_passes(policy: Policy, sequences: Sequence[Scored]) -> dict[str, Tensor]:
    gradients = Gradients(policy.config, policy.ops.kernels)
    for _, result in policy.gradient_passes(sequences, gradients, tokens_at_once=100):
        torch.autograd.backward([result.logprob, result.entropy], [torch.ones_like(result.logprob)] * 2)
    return gradients.totals()


def assert_same_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert isinstance(tensor, OnDevice), name
        assert_same_bits(tensor.cpu(), expected[name], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_steps_of_the_trainer_have_the_cpus_bits(family: str, dtype: torch.dtype) -> None:
    trainer, expected = (make_trainer(family, dtype, kernels=kernels) for kernels in (pretended(), load()))
    for _ in range(2):
        ours, theirs = stepped(trainer), stepped(expected)
        assert ours == theirs
        assert ours["mismatch_tokens"] == 0
    for of in (gradients_of, weights_of_trainer, masters, first_moments, second_moments):
        assert_same_tensors(of(trainer), of(expected))
    assert trainer.fingerprint() == expected.fingerprint()


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_objective_has_the_cpus_bits(name: str) -> None:
    trainers = [make_trainer(loss=EVERYTHING[name], kernels=kernels) for kernels in (pretended(), load())]
    for _ in range(2):
        ours, theirs = (
            asdict(trainer.step(shifted(Sampler(trainer.policy).run(REQUESTS)), some_advantages(9)))
            for trainer in trainers
        )
        assert ours == theirs
    for of in (gradients_of, masters):
        assert_same_tensors(of(trainers[0]), of(trainers[1]))
    away = make_trainer(
        loss=LossSection(kl=KLSection(0.1, "k1", "reward"), anchor="recomputation"), kernels=pretended()
    )
    assert (
        away.advantages(Sampler(away.policy).run(REQUESTS), [float(i % 2) for i in range(9)]).values.device.type
        == "cpu"
    )


def stepped(trainer: Trainer) -> dict[str, object]:
    rollouts = Sampler(trainer.policy).run(REQUESTS)
    return asdict(trainer.step(rollouts, some_advantages(len(rollouts))))


def weights_of_trainer(trainer: Trainer) -> dict[str, Tensor]:
    return weights_of(trainer.policy)


def masters(trainer: Trainer) -> Mapping[str, Tensor]:
    return trainer.optimizer.masters


def first_moments(trainer: Trainer) -> dict[str, Tensor]:
    return trainer.optimizer.first


def second_moments(trainer: Trainer) -> dict[str, Tensor]:
    return trainer.optimizer.second


class Letters:
    """Reward: the share of lower-case letters."""

    stop = "\n"

    def item(self, index: int) -> Item:
        return Item(index, f"{index}:", "")

    def reward(self, item: Item, completion: str) -> float:
        return sum("a" <= letter <= "z" for letter in completion) / max(1, len(completion))


def run(folder: Path, kernels: Kernels) -> RunResult:
    recipe = Recipe(
        steps=2,
        model=ModelSection("tiny", "bfloat16"),
        sampling=SamplingSection(prompts=2, samples=3, max_tokens=4),
        optimizer=OptimizerSection(lr=1e-3),
        run=RunSection(folder=str(folder)),
    )
    return train(recipe, kernels=kernels, console=Console(file=io.StringIO()), task=Letters())


def test_a_run_has_the_cpus_metrics_and_leaves_the_same_checkpoint(tmp_path: Path) -> None:
    found, expected = run(tmp_path / "device", pretended()), run(tmp_path / "cpu", load())
    for ours, theirs in zip(found.lines, expected.lines, strict=True):
        assert {k: v for k, v in ours.items() if "second" not in k} == {
            k: v for k, v in theirs.items() if "second" not in k
        }
    for name in ("model.safetensors", "config.json"):
        files = (result.folder / "checkpoint" / name for result in (found, expected))
        assert len({file.read_bytes() for file in files}) == 1
    saved = found.folder / "checkpoint"
    weights = load_weights(saved, ModelConfig.from_folder(saved), say=lambda line: None)
    assert fingerprint(weights) == found.lines[-1]["fingerprint"]
    assert '"device": "meta"' in (found.folder / "env.json").read_text()


def verified(monkeypatch: pytest.MonkeyPatch, kernels: Kernels, with_mutants: bool) -> Verification:
    monkeypatch.setattr(verify, "SMALL", 1)  # so that the CPU's best set stands for all: others are slow in here
    monkeypatch.setattr(verify, "SAMPLED_LARGE", 150)
    monkeypatch.setattr(verify, "LOGITS", 100_000)
    monkeypatch.setattr(verify, "sizes_for", lambda config, affordable: FEW)
    return verify.verify("tiny", kernels, [torch.bfloat16], 300, with_mutants)


def test_verify_compares_with_the_cpu_and_says_what_only_a_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    result = verified(monkeypatch, pretended(), with_mutants=True)
    assert result.exit_code == EQUAL, result.summary
    assert {check.kind for check in result.checks if check.absent} == OF_A_CPU
    assert {check.status for check in result.checks if not check.absent} == {"equal"}
    assert result.mutants and not result.survivors
    assert not {caught.check for caught in result.mutants} & OF_A_CPU
    best = load().name.removeprefix("cpu:")
    assert {check.name for check in result.checks if "as on a CPU" in check.name} == {
        f"as on a CPU, {best}",
        f"gradients, as on a CPU, {best}",
        "subnormal logits, as on a CPU",
        "subnormal gradients, as on a CPU",
    }


def test_a_profile_of_its_own_is_not_compared_with_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    result = verified(monkeypatch, pretended(UNITS), with_mutants=False)
    assert result.exit_code == EQUAL, result.summary
    absent = [check for check in result.checks if check.absent]
    assert {check.kind for check in absent} == OF_A_CPU | WITH_A_CPU
    assert all(check.status == "does not apply" and check.found.compared == 0 for check in absent)
    assert all("does not apply: " in check_line(check) for check in absent)
    assert f'skipped="{len(absent)}"' in as_junit(result)
    assert as_json(result)["profile"] == UNITS
    assert result.skipped == 0  # more time would not make them run


def test_the_commands_print_the_cpus_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(kernels: Kernels, *argv: str) -> str:
        monkeypatch.setattr(computing, "kernels_of", lambda device, profile, threads: kernels)
        assert cli.main(argv) == 0
        return capsys.readouterr().out

    file = tmp_path / "rollouts.json"
    for argv in (
        ("generate", "tiny", "--prompt", "one", "--prompt", "two", "--n", "2", "--max-tokens", "5", "--json"),
        ("generate", "tiny", "--prompt", "one", "--max-tokens", "5"),
        ("score", "tiny", "--text", "abc"),
        ("score", "tiny", "--text", "abc", "--json"),
        ("score", "tiny", "--file", str(file)),
    ):
        found = printed(pretended(), *argv)
        assert found == printed(load(), *argv)
        if not file.exists():
            file.write_text(found)


def test_the_digest_names_the_profile_and_not_the_device() -> None:
    digests = [Policy.load("tiny", kernels).digest for kernels in (load(), pretended(), pretended(UNITS))]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    "sampled, trained", [(UNITS, "portable"), ("portable", UNITS), (UNITS, UNITS + " of another type")]
)
def test_a_rollout_of_another_profile_is_refused(sampled: str, trained: str) -> None:
    rollouts = Sampler(Policy.load("tiny", pretended(sampled))).run(REQUESTS[:1])
    trainer = make_trainer(kernels=pretended(trained))
    before = trainer.fingerprint()
    with pytest.raises(TrainingError, match=rf"rollout \(0, 0\): arithmetic digest {rollouts[0].digest} is not"):
        trainer.step(rollouts, some_advantages(3))
    assert (trainer.fingerprint(), trainer.policy.version) == (before, 0)


def test_a_rollout_of_the_device_is_trained_on_the_cpu_and_the_other_way_round() -> None:
    for sampled, trained in ((pretended(), load()), (load(), pretended())):
        rollouts = Sampler(Policy.load("tiny", sampled)).run(REQUESTS)
        assert make_trainer(kernels=trained).step(rollouts, some_advantages(9)).mismatch_tokens == 0


def test_a_sampler_does_not_adopt_a_policy_of_another_device() -> None:
    sampler = Sampler(Policy.load("tiny", pretended()))
    with pytest.raises(ValueError, match="on the same device"):
        sampler.adopt(Policy.load("tiny", load()))


def test_masters_of_another_device_are_refused() -> None:
    with pytest.raises(ValueError, match="master of w must be float32 and contiguous, on meta"):
        AdamW({"w": torch.zeros(3)}, OptimizerSection(), pretended())


def deep(layers: int) -> Trainer:
    config = tiny_config(num_hidden_layers=layers)
    return Trainer.of(config, tiny_weights(config), pretended(), torch.bfloat16)


def test_a_decoding_step_is_read_three_times_however_many_layers(device: Pretended) -> None:
    """Ids, log-probabilities, and whether they are finite."""
    for layers in (1, 5):
        sampler = Sampler(deep(layers).policy)
        for request in REQUESTS:
            sampler.add(request)
        while not sampler.scheduler.running or any(len(s.tokens) - s.computed > 1 for s in sampler.scheduler.running):
            sampler.step()
        before = device.reads
        sampler.step()
        assert device.reads - before == 3


def test_a_training_step_is_read_as_often_however_many_layers(device: Pretended) -> None:
    reads = []
    for layers in (1, 5):
        trainer = deep(layers)
        rollouts = Sampler(trainer.policy).run(REQUESTS)
        before = device.reads
        trainer.step(rollouts, some_advantages(9))
        reads.append(device.reads - before)
    assert reads[0] == reads[1] < 20


def on_device(*shape: int) -> Tensor:
    return torch.zeros(shape).to(DEVICE)


NOT_ALLOWED: dict[str, Callable[[], object]] = {
    "a host tensor in an op": lambda: on_device(3) + torch.ones(3),
    "a host tensor among others": lambda: torch.cat([on_device(3), torch.ones(3)]),
    "host indices": lambda: on_device(3)[torch.tensor([1])],
    "a host tensor in a kernel": lambda: pretended().exp(torch.ones(3)),
    "a host weight in a kernel": lambda: pretended().matmul(on_device(2, 3), load().pack(torch.ones(4, 3))),
    "a schedule on the device": lambda: pretended().attention(
        on_device(1, 1, 16),
        on_device(1, 1, 16),
        on_device(1, 1, 16),
        Chunks(*(on_device(2).long() for _ in range(4))),
        on_device(1, 1, 16, 64),
        on_device(1, 1, 64, 16),
        1.0,
    ),
    "memory that torch calls a number of the device": lambda: on_device(2) + torch.tensor([1.0, 2.0], device=DEVICE),
}


@pytest.mark.parametrize("what", NOT_ALLOWED)
def test_the_pretended_device_refuses(what: str) -> None:
    with pytest.raises(RuntimeError):
        NOT_ALLOWED[what]()


READ: dict[str, Callable[[], object]] = {
    "a value": lambda: on_device(1).item(),
    "a truth": lambda: bool(on_device(1)[0] > 0),
    "a list": lambda: on_device(3).tolist(),
    "a copy": lambda: torch.ones(3).copy_(on_device(3)),
    "places": lambda: on_device(3).nonzero(),
    "what a mask selects": lambda: on_device(3)[on_device(3) > 0],
}


@pytest.mark.parametrize("what", READ)
def test_the_pretended_device_counts_as_read(what: str, device: Pretended) -> None:
    READ[what]()
    assert device.reads == 1


def test_the_pretended_device_counts_nothing_else_as_read(device: Pretended) -> None:
    x = on_device(3, 4)
    x[1:] = torch.ones(2, 4).to(DEVICE) * 2.0 - x.sum()
    x[torch.tensor([0, 2]).to(DEVICE)] += 1.0
    assert torch.empty_like(x).device == torch.zeros(2, device=DEVICE).device == DEVICE
    assert device.reads == 0
    assert x.cpu().tolist() == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
