"""The output of stages without workers in a run's directory: whether it is complete, and of which recipe.

    runs/NAME/sft/               supervised training as the first stage
              stages/2-NAME/     any other stage, by its number and name

sft.json or stage.json says that a directory is complete. It is written last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from broker.errors import ConfigError
from deploy.recipe.recipe import Recipe
from learner.config import SftConfig, StageConfig

from .whole_files import replace_file

SFT, STAGES = "sft", "stages"
OUTCOME, OWN_OUTCOME = "sft.json", "stage.json"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A stage that trains without workers, and the directory of its model."""

    number: int
    """Its index among the recipe's stages."""
    stage: StageConfig
    directory: Path

    @property
    def is_complete(self) -> bool:
        return is_complete(self.directory)


def planned(recipe: Recipe) -> list[Planned]:
    """Return the stages that train without workers, in order."""
    return [
        Planned(number=number, stage=stage, directory=directory_of(recipe, number))
        for number, stage in enumerate(recipe.plan)
        if not (stage.has_workers or stage.is_left_out)
    ]


def directory_of(recipe: Recipe, number: int) -> Path:
    """Return where stage `number` leaves its model."""
    return recipe.run_directory / _place(number, recipe.plan[number])


def starting_after(recipe: Recipe, stages: Sequence[Planned]) -> Recipe:
    """Return the recipe for the role after these stages: its model is the one that the last complete stage left, if
    any."""
    left = [one.directory for one in stages if one.is_complete]
    if not left:
        return recipe
    return msgspec.structs.replace(recipe, model=msgspec.structs.replace(recipe.model, path=str(left[-1]), random=None))


def number_of(recipe: Recipe, stage: str) -> int:
    """Return the index of a stage by its name or its number. Raises ConfigError for one that the recipe lacks."""
    names = [one.name for one in recipe.plan]
    if names.count(stage) == 1:
        return names.index(stage)
    if stage.isdecimal() and int(stage) < len(names):
        return int(stage)
    told = "several stages have this name" if stage in names else "no stage has this name"
    known = ", ".join(f"{name} ({number})" for number, name in enumerate(names))
    raise ConfigError(f"{stage!r}: {told}; the recipe's stages and their numbers are {known}.")


def check_done_before(recipe: Recipe, number: int) -> None:
    """Raise ConfigError unless each stage before stage `number` has left its model."""
    for one in planned(recipe):
        if one.number < number and not one.is_complete:
            raise ConfigError(
                f"Stage {recipe.plan[number].name} starts from what stage {one.stage.name} leaves, and"
                f" {one.directory} holds no model yet. Run that stage first: headway train {one.number} RECIPE."
            )


def is_complete(directory: Path) -> bool:
    """Whether `mark_complete` has been called."""
    return any((directory / name).exists() for name in (OUTCOME, OWN_OUTCOME))


def is_of(directory: Path, recipe: Recipe) -> bool:
    """Whether the directory is complete and a stage of `recipe` would make the same model again."""
    for name in (OUTCOME, OWN_OUTCOME):
        try:
            made_from = msgspec.json.decode((directory / name).read_bytes()).get("made_from")
        except (OSError, msgspec.DecodeError, AttributeError):
            continue
        return any(made_from == origin(recipe, one.number) for one in planned(recipe)) or made_from == origin(recipe, 0)
    return False


def mark_complete(directory: Path, recipe: Recipe, outcome: Any, number: int = 0) -> None:
    """Write the outcome, whole or not at all, after the model is on disk. Raises HeadwayError."""
    content = {**msgspec.to_builtins(outcome), "made_from": origin(recipe, number)}
    name = OUTCOME if _is_first_sft(number, recipe.plan[number]) else OWN_OUTCOME
    replace_file(directory / name, msgspec.json.format(msgspec.json.encode(content)) + b"\n")


def origin(recipe: Recipe, number: int) -> Any:
    """Return what decides the model that this stage leaves, as JSON, so that it compares with what was read."""
    stages = recipe.plan[: number + 1]
    is_older_form = _is_first_sft(number, stages[-1]) and not stages[0].options
    trains = {"sft": SftConfig(phases=stages[0].phases)} if is_older_form else {"stages": stages}
    parts = {"model": recipe.model, **trains, "prompts": recipe.prompts, "seed": recipe.run.seed}
    return msgspec.json.decode(msgspec.json.encode(parts))


def _place(number: int, stage: StageConfig) -> Path:
    if _is_first_sft(number, stage):
        return Path(SFT)
    return Path(STAGES, f"{number + 1}-{stage.name}")


def _is_first_sft(number: int, stage: StageConfig) -> bool:
    """Whether the stage is the only one that runs had before there were stages: its output keeps the old place and
    form."""
    return number == 0 and stage.kind == "sft"
