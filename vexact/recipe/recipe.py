"""The whole recipe."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import yaml

from vexact.recipe.evaluation import EvalSection, WarmStartSection
from vexact.recipe.keys import leaves
from vexact.recipe.loss import LossSection
from vexact.recipe.mismatch import MismatchSection
from vexact.recipe.model import ModelSection
from vexact.recipe.optimizer import OptimizerSection
from vexact.recipe.run import CheckpointSection, RunSection
from vexact.recipe.sampling import SamplingSection
from vexact.recipe.schedule import SyncSection
from vexact.recipe.task import TaskSection
from vexact.recipe.values import RecipeError, choice, number

# What supervised steps have no use for, so that no value there is passed over in silence.
WITHOUT_SFT = (
    "loss", "warm_start", "sync", "delay", "mismatch", "sampling.samples", "sampling.temperature", "sampling.rounds",
    "sampling.seed", "run.diagnose",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A training run. `seed` addresses data and draws; nothing else is random.

    objective: `rl` samples and reinforces; `sft` learns from the task's own solutions, `sampling.prompts` of them a
    step, by cross-entropy, and samples in evaluations only. device, profile: what it is computed with; `portable` gives
    the same bits on every device. sync, delay: how old the sampler's weights are. Raises RecipeError for a value that
    the objective has no use for.
    """

    name: str = "train"
    seed: int = number(0, at_least=0, below=2.0**63)
    objective: str = choice("rl", "sft")
    steps: int = number(5, at_least=0)
    device: str = choice("cpu", "cuda")
    profile: str = choice("portable", "tensorcore")  # tensorcore: the matrix units of a GPU
    model: ModelSection = field(default_factory=ModelSection)
    task: TaskSection = field(default_factory=TaskSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    loss: LossSection = field(default_factory=LossSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    warm_start: WarmStartSection = field(default_factory=WarmStartSection)
    eval: EvalSection = field(default_factory=EvalSection)
    sync: SyncSection = field(default_factory=SyncSection)
    delay: int = number(0, at_least=0)  # steps between sampling and training: rollouts wait as they do in a queue
    mismatch: MismatchSection = field(default_factory=MismatchSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    run: RunSection = field(default_factory=RunSection)

    def __post_init__(self) -> None:
        if self.objective == "sft":
            defaults, useless = dict(leaves(asdict(Recipe()))), tuple(f"{name}." for name in WITHOUT_SFT)
            for key, value in leaves(asdict(self)):
                if f"{key}.".startswith(useless) and value != defaults.get(key):
                    raise RecipeError(f"{key} = {value!r} has no meaning with objective = sft: leave it out")

    def to_yaml(self) -> str:
        """The whole recipe, defaults included; `load_recipe` reads it back."""
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)
