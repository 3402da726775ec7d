"""The scorers that a recipe needs: one for each reward model, and one for the teacher."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headway.broker.client.scoring import MAX_ANSWER_BYTES
from headway.broker.errors import ConfigError
from headway.rollout_workers.rewards import reward_names
from headway.rollout_workers.scorers.runtimes import abilities_of, gpus_of

from .recipe import Recipe
from .stage_graph import REFERENCE

REWARD_MODEL, TEACHER = "reward_model", "teacher"
POOL = "scorer-"
"""The start of a scorer's pool's name."""
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class Scorer:
    """A model whose processes score responses."""

    name: str
    """The name of its reward in metrics, or `teacher`."""
    kind: Literal["reward_model", "teacher"]
    path: str
    key: str
    """The key of the path in the recipe."""
    deadline_s: float
    """For how long one process may have a response."""


def scorers_of(recipe: Recipe) -> list[Scorer]:
    """Return the recipe's scorers, each with a name of its own."""
    found = [
        Scorer(name, "reward_model", reward.path, f"rewards[{index}].path", reward.deadline_s)
        for index, (name, reward) in enumerate(zip(reward_names(recipe.rewards), recipe.rewards, strict=True))
        if reward.kind == REWARD_MODEL
    ]
    teacher = recipe.teacher
    return found + (
        [Scorer(TEACHER, "teacher", teacher.path, "teacher.path", teacher.deadline_s)] if teacher.path else []
    )


def scorer_named(recipe: Recipe, name: str) -> Scorer:
    """Return the scorer of this name, or the only one where the name is empty. Raises ConfigError."""
    found = scorers_of(recipe)
    names = ", ".join(scorer.name for scorer in found) or "none"
    if not name and len(found) == 1:
        return found[0]
    for scorer in found:
        if scorer.name == name:
            return scorer
    if name:
        raise ConfigError(f"The run has no scorer {name!r}; it has {names}.")
    raise ConfigError(f"Which scorer? Give --scorer NAME. The run has {names}.")


def impossible_scorers(recipe: Recipe) -> Iterator[str]:
    """Yield what is wrong with the recipe's reward models and its teacher."""
    for index, reward in enumerate(recipe.rewards):
        if reward.kind == REWARD_MODEL and not reward.path:
            yield f"rewards[{index}].path is missing: it names the directory of the reward model."
        if reward.kind != REWARD_MODEL and reward.path:
            yield f"rewards[{index}].path is for kind=reward_model; {reward.kind} reads no model."
    if recipe.algorithm.distillation.coefficient > 0 and not recipe.teacher.path:
        yield (
            "algorithm.distillation.coefficient above 0 needs a teacher: set teacher.path to the directory of a model"
            " with the policy's vocabulary, a hub id, or stage:NAME."
        )
    top_k, length = recipe.algorithm.distillation.candidates, recipe.sampling.max_new_tokens
    if 4 * length * (1 + 2 * top_k) > MAX_ANSWER_BYTES:
        most = (MAX_ANSWER_BYTES // (4 * length) - 1) // 2
        yield (
            f"algorithm.distillation.top_k={top_k} with sampling.max_new_tokens={length}: a teacher's answer could take"
            f" {4 * length * (1 + 2 * top_k):,} bytes, and the server holds {MAX_ANSWER_BYTES:,} of one; set top_k to"
            f" at most {max(0, most)}, or sample shorter responses."
        )
    names = [scorer.name for scorer in scorers_of(recipe)]
    if len(set(names)) < len(names):
        yield f"two scorers have one name ({', '.join(names)})."
    yield from _impossible_engine(recipe)


def _impossible_engine(recipe: Recipe) -> Iterator[str]:
    scorers, temperature = recipe.scorers, recipe.sampling.temperature
    engine = scorers.engine
    if recipe.teacher.path and temperature != 1 and not abilities_of(engine).any_temperature:
        yield (
            f"scorers.engine.kind={engine.kind} gives a teacher's logprobs at temperature 1 alone, and"
            f" sampling.temperature is {temperature:g}. Set sampling.temperature=1, or"
            " scorers.engine.kind=transformers."
        )
    each = gpus_of(engine)
    few = [str(device) for device in scorers.devices if len(str(device).split(",")) < each]
    if few and scorers.device != "cpu":
        yield (
            f"scorers.devices gives {few[0]!r} to one process, whose engine takes {each} GPUs. Name {each} of them"
            " together, such as '0,1'."
        )


def check_models_for_pods(recipe: Recipe) -> None:
    """Raise ConfigError for a scorer whose model only a learner's pod has."""
    for scorer in scorers_of(recipe) if recipe.scorers.count else ():
        if scorer.path.startswith(REFERENCE):
            raise ConfigError(
                f"{scorer.key} is {scorer.path}, which an earlier stage leaves on the volume of the learner's pod, and"
                " the pods of scorers do not see that. Run the stage before, and give a hub id, or a directory that the"
                " scorers' pods mount; or set scorers.count=0, and start `headway scorers` where the model is."
            )


def check_scorers(recipe: Recipe) -> None:
    """Raise ConfigError, before anything is started, for a scorer's directory that is not on this machine, where
    `headway run` starts the scorers, or holds no model."""
    for scorer in scorers_of(recipe):
        is_elsewhere = scorer.path.startswith(REFERENCE) or not recipe.scorers.count
        if is_elsewhere or (_HUB_ID.fullmatch(scorer.path) and not Path(scorer.path).exists()):
            continue
        if not (Path(scorer.path).expanduser() / "config.json").is_file():
            raise ConfigError(
                f"{scorer.key}: {scorer.path} is no directory with a model: it has no config.json. Give the directory"
                " of a trained model, a hub id, or stage:NAME."
            )
