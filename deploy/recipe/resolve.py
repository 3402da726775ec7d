"""Reads recipes from YAML and overrides into typed, closed structs, and writes them for files and for workers."""

import functools
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from headway.broker.connection.address import without_secrets
from headway.broker.errors import ConfigError
from headway.learner.algorithm_config import AlgorithmConfig, preset_defaults

from .limits import beyond_limits
from .parse import find_recipe, newer_spelling, read_recipe, to_yaml, with_own_options
from .placement import colocated_defaults
from .recipe import LauncherConfig, Recipe
from .schema_errors import check_plain, check_shape, explain
from .validate import check_values

log = logging.getLogger(__name__)

RESOLVED = {
    *("run", "prompts", "rewards", "model", "broker", "staleness", "sampling", "engine", "workers", "evaluation"),
    *("algorithm", "optimizer", "learner", "sft", "checkpoint", "weights", "metrics"),
}
"""The sections of a resolved configuration of any version. A recipe that people write names fewer."""
HELD_OUT_COUNTS = ("held_out_rows", "held_out_records")


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by path or shipped name, with `a.b=c` overrides. Raises ConfigError, which names the key."""
    found = find_recipe(str(path))
    raw = read_recipe(found, overrides)
    _name_the_run(raw, found.stem)
    return _to_recipe(raw, found.name, held_out_seed=None if raw.keys() >= RESOLVED else 0)


def hint_of(path: str | Path) -> str:
    """Return how a recipe of the user's own that says its warm-up in `sft` says it in `stages`; empty for others.

    Raises ConfigError for a recipe that cannot be read.
    """
    stages = newer_spelling(read_recipe(find_recipe(str(path))))
    if stages is None:
        return ""
    return f"{path}: `sft` is an older spelling of the first stage. Write the same as:\n\n{to_yaml(stages)}"


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Return the same recipe with `a.b=c` overrides, as `with_own_options` applies them. Raises ConfigError."""
    if not overrides:
        return recipe
    name = recipe.run.name
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(recipe))  # with lists, which overrides can change, not tuples
    return _to_recipe(with_own_options(raw, overrides, name), name)


def dump_recipe(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML. `load_recipe` of it gives an equal Recipe, except for a password in
    broker.url."""
    return to_yaml(msgspec.to_builtins(_without_secrets(recipe)))


def recipe_to_bytes(recipe: Recipe) -> bytes:
    """Return what the learner stores in the broker, so that a worker needs only a URL and the run's name.

    It lacks `launcher`: only the command that starts processes decides how they are started.
    """
    return msgspec.json.encode(replace(_without_secrets(recipe), launcher=LauncherConfig()))


def recipe_from_bytes(stored: bytes) -> Recipe:
    """Return the recipe of bytes that `recipe_to_bytes` returned. Raises ConfigError."""
    try:
        return msgspec.json.decode(stored, type=Recipe)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The broker holds a configuration that this version of Headway cannot read ({error})."
            " Run the same version on every machine."
        ) from error


def with_held_out_seed(raw: dict[str, Any], seed: int | None) -> dict[str, Any]:
    """Return the recipe in which whatever holds rows of a file out says by which seed they are drawn: `seed`, where it
    does not say it. A configuration that was resolved before there was a seed means the last rows (None)."""
    stages = raw.get("stages")
    return {
        **raw,
        **({"prompts": _seeded(raw["prompts"], seed)} if "prompts" in raw else {}),
        **({"stages": [_seeded(stage, seed) for stage in stages]} if isinstance(stages, list | tuple) else {}),
    }


def _seeded(section: Any, seed: int | None) -> Any:
    options = section.get("options") if isinstance(section, dict) else None
    is_own = isinstance(section, dict) and ":" in str(section.get("kind"))
    if is_own or not isinstance(options, dict) or not any(map(options.get, HELD_OUT_COUNTS)):
        return section
    return {**section, "options": {"held_out_seed": seed, **options}}


def _without_secrets(recipe: Recipe) -> Recipe:
    return replace(recipe, broker=replace(recipe.broker, url=without_secrets(recipe.broker.url)))


def _name_the_run(raw: dict[str, Any], stem: str) -> None:
    """Name a run without a name after its recipe's file. Where that name has a run already, starting another is
    refused."""
    run = raw.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")[:100] or "run")


def _to_recipe(raw: dict[str, Any], source: str, held_out_seed: int | None = 0) -> Recipe:
    check_plain(raw, source)
    check_shape(raw, Recipe, source)
    raw = with_held_out_seed(raw, held_out_seed)
    raw = _merge(colocated_defaults(raw), raw)
    raw = {**raw, "algorithm": _with_preset(raw.get("algorithm", {}), source)}
    check_shape(raw, Recipe, source)
    try:
        recipe = msgspec.convert(raw, Recipe, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(error, raw, Recipe, source)) from error
    if raw.get("weights", {}).get("archive") == "http":
        _hint_at_no_archive()
    recipe = _choose_model(recipe)
    check_values(recipe, source)
    return recipe


@functools.cache
def _hint_at_no_archive() -> None:
    """Log the hint once a process, since a recipe is read more than once."""
    log.warning("weights.archive=http is called none now: workers pull from the learner alone.")


def _choose_model(recipe: Recipe) -> Recipe:
    """Choose a model's path over random weights, so that one override replaces a shipped recipe's model."""
    if not recipe.model.path:
        return recipe
    return msgspec.structs.replace(recipe, model=msgspec.structs.replace(recipe.model, random=None))


def _with_preset(algorithm: dict[str, Any], source: str) -> dict[str, Any]:
    """Put the preset's keys beneath the user's own."""
    preset = algorithm.get("preset", AlgorithmConfig().preset)
    try:
        return _merge(preset_defaults(str(preset)), {**algorithm, "preset": preset})
    except ConfigError as error:
        raise ConfigError(f"{source}: algorithm.preset: {error}") from error


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge key by key, where `above` wins. Lists are replaced as a whole."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merge(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


Sections = TypeVar("Sections", bound=msgspec.Struct)
SOURCE = "override"


def overridden(sections: Sections, overrides: Sequence[str]) -> Sections:
    """Return the same sections with `a.b=c` overrides, as `with_own_options` applies them. Raises ConfigError for a key
    or a value that none of them takes."""
    given = msgspec.msgpack.decode(msgspec.msgpack.encode(sections))  # with lists, which overrides can change
    raw = with_own_options(given, overrides, SOURCE)
    check_plain(raw, SOURCE)
    check_shape(raw, type(sections), SOURCE)
    try:
        chosen = msgspec.convert(raw, type(sections), strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(error, raw, type(sections), SOURCE)) from error
    for complaint in beyond_limits(chosen):
        raise ConfigError(f"{SOURCE}: {complaint}")
    return chosen
