"""The output of stages without workers in a run's directory: whether it is complete, of which recipe, and its record.

    runs/NAME/sft/               supervised training as the first stage
              stages/2-NAME/     any other stage, by its number and name

sft.json or stage.json says that a directory is complete. It is written last.
NAME.metrics.jsonl beside a directory holds one StageEvent a step.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.broker.errors import ConfigError
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.stage_graph import chain_of, number_of, references, references_of, with_paths
from headway.learner.config import SftConfig, StageConfig
from headway.learner.disk import append_line, cut_torn_line, replace_file
from headway.learner.models.chat_template import read_chat_template

from .events import StageEvent

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


def starting_at(recipe: Recipe, number: int) -> Recipe:
    """Return the recipe for the role of stage `number`: its model is the one that the stage starts from, and paths
    `stage:NAME` are the directories that these stages have left. It has an adapter if this stage trains one."""
    left = [directory_of(recipe, one) for one in chain_of(recipe.plan, number)[:-1]]
    made = [directory for directory in left if is_complete(directory)]
    adapter = recipe.adapter_in(recipe.plan[number])
    recipe = _with_directories(recipe)
    recipe = msgspec.structs.replace(recipe, model=msgspec.structs.replace(recipe.model, adapter=adapter))
    return _with_model(recipe, made[-1]) if made else recipe


def after_stages(recipe: Recipe) -> Recipe:
    """Return the recipe that the learner runs. Without a learner its model is the one that the last stage left."""
    learners = [number for number, stage in enumerate(recipe.plan) if stage.has_workers]
    if learners:
        return starting_at(recipe, learners[0])
    made = [one.directory for one in planned(recipe) if one.is_complete]
    return _with_model(recipe, made[-1]) if made else recipe


def check_made(recipe: Recipe, numbers: Sequence[int]) -> None:
    """Raise ConfigError unless each stage that these stages start from, or name, has left its model or is among them.

    A stage that is left out leaves what it starts from.
    """
    plan = recipe.plan
    for number in numbers:
        starts = [one for one in chain_of(plan, number)[:-1] if not plan[one].is_left_out][-1:]
        for needed in (*starts, *(number_of(plan, name) for _, name in references_of(recipe, number))):
            if needed not in numbers and not is_complete(directory_of(recipe, needed)):
                raise ConfigError(
                    f"Stage {plan[number].name} needs what stage {plan[needed].name} leaves, and"
                    f" {directory_of(recipe, needed)} holds no model yet. Run that stage first: headway train"
                    f" {needed} RECIPE."
                )


def _with_model(recipe: Recipe, directory: Path) -> Recipe:
    return msgspec.structs.replace(
        recipe, model=msgspec.structs.replace(recipe.model, path=str(directory), random=None)
    )


def _with_directories(recipe: Recipe) -> Recipe:
    """Return the recipe with whole paths in place of `stage:NAME`, where that stage has left its model."""

    def path_of(name: str) -> str | None:
        directory = directory_of(recipe, number_of(recipe.plan, name))
        return str(directory.resolve()) if is_complete(directory) else None

    values = msgspec.to_builtins(recipe)
    if next(references(values), None) is None:
        return recipe
    return msgspec.convert(with_paths(values, path_of), Recipe)


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
    chain = chain_of(recipe.plan, number)
    first = recipe.plan[chain[0]]
    trains: dict[str, Any]
    is_older_form = chain == [0] and first.kind == "sft" and not first.options
    trains = {"sft": SftConfig(phases=first.phases)} if is_older_form else {"stages": [_made(recipe, n) for n in chain]}
    adapters = [recipe.adapter_in(recipe.plan[one]) for one in chain]
    if any(adapters):
        trains["adapters"] = [adapter and msgspec.structs.replace(adapter, stages=()) for adapter in adapters]
    parts = {"model": _model(recipe), **trains, "prompts": recipe.prompts, "seed": recipe.run.seed}
    read = msgspec.json.decode(msgspec.json.encode(parts))
    for adapter in filter(None, read.get("adapters", ())):
        if adapter["quantize_base"] == "none":
            del adapter["quantize_base"]  # stages of older versions do not say it
    return read


def _model(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's model, with the text of its chat template in place of the file."""
    model: dict[str, Any] = msgspec.to_builtins(recipe.model)
    file = model.pop("chat_template")
    model.pop("adapter")  # each stage says whether it trains it
    return {**model, "chat_template": read_chat_template(file)} if file else model


def _made(recipe: Recipe, number: int) -> dict[str, Any]:
    """Return what a stage does with the model that it starts from; neither its name nor its place decides that."""
    stage = recipe.plan[number]
    named = dict.fromkeys(name for _, name in references(stage.options, f"stages[{number}].options"))
    origins = {"origins": {name: origin(recipe, number_of(recipe.plan, name)) for name in named}} if named else {}
    return {"kind": stage.kind, "phases": stage.phases, "options": stage.options, **origins}


def _place(number: int, stage: StageConfig) -> Path:
    if _is_first_sft(number, stage):
        return Path(SFT)
    return Path(STAGES, f"{number + 1}-{stage.name}")


def _is_first_sft(number: int, stage: StageConfig) -> bool:
    """Whether the stage is the only one that runs had before there were stages: its output keeps the old place and
    form."""
    return number == 0 and stage.kind == "sft"


ENDING = ".metrics.jsonl"


def record_of(directory: Path) -> Path:
    """Return where a stage that leaves its model in `directory` keeps its record."""
    return directory.with_name(f"{directory.name}{ENDING}")


def records_in(run: Path) -> dict[str, Path]:
    """Return the records of the run's stages, by the names of the directories that the stages leave, in order."""
    numbered = sorted((run / STAGES).glob(f"[0-9]*{ENDING}"), key=lambda path: int(path.name.partition("-")[0]))
    found = [record_of(run / SFT), *numbered]
    return {path.name.removesuffix(ENDING): path for path in found if path.is_file()}


def tracker_identity(directory: Path, made_from: str) -> str:
    """Return 16 hexadecimal digits for trackers, the same for each process of one stage. A stage of another recipe in
    its place gets others; `made_from` tells them apart. Raises HeadwayError."""
    path = directory.with_name(f".{directory.name}.identity")
    known = path.read_text().split() if path.is_file() else []
    if len(known) != 2 or known[0] != made_from:
        known = [made_from, secrets.token_hex(8)]
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, f"{' '.join(known)}\n".encode())
    return known[1]


class StageRecord:
    """Appends the steps of a stage. Steps that a killed stage trains again take the place of the earlier ones."""

    def __init__(self, path: Path, steps: int) -> None:
        """`steps`: the number of steps that the opened stage starts from. Raises HeadwayError."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if msgspec.json.decode(line, type=StageEvent).steps <= steps]
        if kept != lines:
            replace_file(path, b"".join(kept))

    def write(self, line: StageEvent) -> None:
        """Append a step, whole or not at all. Raises HeadwayError."""
        append_line(self._path, msgspec.json.encode(line))
