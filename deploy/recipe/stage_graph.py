"""Finds the stage whose model each stage of a recipe starts from, and the models that a recipe names as `stage:NAME`.

model ──► sft ──► rl            starts_from: the nearest stage before that leaves a policy, or the one it names
           └────► reward_model  path: stage:reward_model in rewards, a critic, or the options of a later stage
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from headway.broker.errors import ConfigError
from headway.learner.config import StageConfig
from headway.learner.stages.registry import leaves_policy

from .convert import values_in
from .recipe import Recipe

MODEL = "model"
"""As `starts_from`: the recipe's own model."""
REFERENCE = "stage:"
"""The beginning of a path that means the model of a stage."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,99}")
_OPTIONS = re.compile(r"stages\[\d+\]\.options\..*", re.DOTALL)

Plan = Sequence[StageConfig]


def number_of(plan: Plan, stage: str) -> int:
    """Return the index of a stage by its name, its number, or its kind, in which `-` may stand for `_`.

    Raises ConfigError for a stage that the plan lacks.
    """
    names, kind = [one.name for one in plan], stage.replace("-", "_")
    if names.count(stage) == 1:
        return names.index(stage)
    if stage.isdecimal() and int(stage) < len(names):
        return int(stage)
    if stage not in names and [one.kind for one in plan].count(kind) == 1:
        return [one.kind for one in plan].index(kind)
    told = "several stages have this name" if stage in names else "no stage has this name"
    raise ConfigError(f"{stage[:200]!r}: {told}; the recipe's stages and their numbers are {_listed(plan)}.")


def start_of(plan: Plan, number: int) -> int | None:
    """Return the index of the stage whose model stage `number` starts from; None: the recipe's own model."""
    named = plan[number].starts_from
    if named:
        return None if named == MODEL else number_of(plan, named)
    return next((before for before in reversed(range(number)) if leaves_policy(plan[before])), None)


def chain_of(plan: Plan, number: int) -> list[int]:
    """Return the indices of the stages that made the model which stage `number` leaves, in order; it is the last."""
    chain = [number]
    while (before := start_of(plan, chain[0])) is not None:
        chain.insert(0, before)
    return chain


def references(values: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, stage) of each path `stage:NAME` in plain values, such as `rewards[0].path`."""
    for path, value in values_in(values, key):
        if isinstance(value, str) and value.startswith(REFERENCE) and _names_a_model(path):
            yield path, value.removeprefix(REFERENCE)


def with_paths(values: Any, path_of: Callable[[str], str | None], key: str = "") -> Any:
    """Return plain values in which each `stage:NAME` is the path of that stage, where `path_of` knows one."""
    if isinstance(values, dict):
        return {name: with_paths(value, path_of, f"{key}.{name}".lstrip(".")) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [with_paths(value, path_of, f"{key}[{index}]") for index, value in enumerate(values)]
    found = next(references(values, key), None)
    return values if found is None else path_of(found[1]) or values


def references_of(recipe: Recipe, number: int) -> list[tuple[str, str]]:
    """Return (key, stage) of each path `stage:NAME` that stage `number` takes: those of its options, and, if it is the
    learner's, those outside the stages."""
    outside = _outside(msgspec.to_builtins(recipe)) if recipe.plan[number].has_workers else ()
    return [*references(recipe.plan[number].options, f"stages[{number}].options"), *outside]


def impossible_names(plan: Plan) -> Iterator[str]:
    """Yield what is wrong with the stages' names. Stages of one kind may share the name of their kind, as they did
    before stages had names; then they are told apart by number."""
    for number, stage in enumerate(plan):
        if stage.name == stage.default_name and all(one.name == one.default_name for one in _namesakes(plan, number)):
            continue
        if not _NAME.fullmatch(stage.name) or stage.name == MODEL:
            yield (
                f"stages[{number}].name is {stage.name[:100]!r}; expected letters, digits, '_' or '-', with a letter or"
                f" '_' first, and not `{MODEL}`, which is the recipe's own."
            )
        elif _namesakes(plan, number):
            yield f"stages[{number}].name is {stage.name!r}, and so is another stage's. Name each stage once."


def impossible_starts(plan: Plan) -> Iterator[str]:
    """Yield each `starts_from` that is no earlier stage with a policy."""
    for number, stage in enumerate(plan):
        if stage.starts_from in ("", MODEL):
            continue
        where = f"stages[{number}].starts_from"
        if complaint := _not_before(plan, stage.starts_from, number):
            yield f"{where}: {complaint} `{MODEL}` is the recipe's own model."
        elif not leaves_policy(plan[number_of(plan, stage.starts_from)]) and leaves_policy(stage):
            yield (
                f"{where} is {stage.starts_from!r}, which leaves a scorer, and stage {stage.name} trains a policy. Name"
                f" another stage, or `{MODEL}`: the recipe's own model."
            )


def impossible_references(recipe: Recipe) -> Iterator[str]:
    """Yield each path `stage:NAME` whose stage does not exist, or is not over when the path is read."""
    plan = recipe.plan
    ends = next((number for number, stage in enumerate(plan) if stage.has_workers), len(plan))
    for key, name in _outside(msgspec.to_builtins(recipe)):
        if complaint := _not_before(plan, name, ends):
            yield f"{key}: {complaint}"
    for number, stage in enumerate(plan):
        for key, name in references(stage.options, f"stages[{number}].options"):
            if complaint := _not_before(plan, name, number):
                yield f"{key}: {complaint}"


def _not_before(plan: Plan, name: str, number: int) -> str:
    """Return why the model of stage `name` cannot be had before stage `number`; empty if it can."""
    try:
        found = number_of(plan, name)
    except ConfigError as error:
        return str(error)
    if found < number:
        return ""
    before = _listed(plan[:number]) or "none"
    return f"stage {name!r} does not come before; the stages before, and their numbers, are {before}."


def _outside(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    return references({key: value for key, value in values.items() if key not in ("stages", "sft")})


def _names_a_model(key: str) -> bool:
    """Whether a text at this key may be a model's directory. A stage's options may name one under any key."""
    leaf = re.split(r"[.\[]", key)[-1]
    return leaf == "path" or leaf.endswith("_path") or (bool(_OPTIONS.fullmatch(key)) and leaf != "kind")


def _namesakes(plan: Plan, number: int) -> list[StageConfig]:
    return [one for index, one in enumerate(plan) if index != number and one.name == plan[number].name]


def _listed(plan: Plan) -> str:
    return ", ".join(f"{stage.name} ({number})" for number, stage in enumerate(plan))


def impossible_stages(recipe: Recipe) -> Iterator[str]:
    """Yield what is wrong with the stages, their order, and the models and prompts that they need."""
    if recipe.stages and recipe.sft.phases:
        yield "both sft.phases and stages say what the warm-up is. Move the phases to stages: [{kind: sft, phases}]."
    for index, stage in enumerate(recipe.stages):
        if stage.phases and stage.kind != "sft":
            yield f"stages[{index}].phases are of kind=sft, and this stage is {stage.kind}. Remove them."
        if stage.phases and stage.options:
            yield f"stages[{index}] has phases and options. Give it one of both: options name records, phases examples."
        if stage.has_workers and index < len(recipe.stages) - 1:
            yield (
                f"stages[{index}] is {stage.kind}, which ends the run, and stages[{index + 1}] follows it. Move it to"
                " the end, and train on in a run of its own, from model.path=CHECKPOINT."
            )
    yield from impossible_names(recipe.plan)
    yield from impossible_starts(recipe.plan)
    yield from impossible_references(recipe)
    yield from _missing_prompts(recipe)
    if all(stage.is_left_out for stage in recipe.plan):
        yield "no stage is left to run. Add one to stages, such as {kind: rl}, or give sft its phases."


def _missing_prompts(recipe: Recipe) -> Iterator[str]:
    is_gated = any(phase.until_pass_rate for phase in recipe.warm_up)
    who = "workers generate from" if recipe.has_learner else "until_pass_rate measures" if is_gated else ""
    if who and not recipe.has_prompts:
        yield f"there are no prompts, which {who}. Add prompts: {{kind: jsonl, path: FILE}}, or another kind."
    if (who or recipe.has_prompts) and not recipe.rewards and not recipe.agent.kind:
        yield "there are no rewards, which score responses to prompts. Add rewards: [{kind: math_verify}], or another."
