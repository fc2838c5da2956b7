"""A recipe: everything that a training run depends on, as frozen dataclasses read from a YAML file.

Each value has a type and a range that live beside its default. A key that is not known is refused by name, from a file
and from the command line alike.
"""

from vexact.recipe.evaluation import EvalSection, WarmStartSection
from vexact.recipe.keys import leaves, read_yaml
from vexact.recipe.loss import KLSection, LossSection
from vexact.recipe.mismatch import MismatchSection
from vexact.recipe.model import ModelSection
from vexact.recipe.optimizer import OptimizerSection
from vexact.recipe.reader import load_recipe
from vexact.recipe.recipe import Recipe
from vexact.recipe.remedy import RemedySection
from vexact.recipe.run import CheckpointSection, RunSection
from vexact.recipe.sampling import SamplingSection
from vexact.recipe.schedule import SyncSection
from vexact.recipe.task import RewardSection, TaskSection
from vexact.recipe.values import RecipeError

__all__ = [
    "CheckpointSection",
    "EvalSection",
    "KLSection",
    "LossSection",
    "MismatchSection",
    "ModelSection",
    "OptimizerSection",
    "Recipe",
    "RecipeError",
    "RemedySection",
    "RewardSection",
    "RunSection",
    "SamplingSection",
    "SyncSection",
    "TaskSection",
    "WarmStartSection",
    "leaves",
    "load_recipe",
    "read_yaml",
]
