"""Loads recipes, with what they may omit because of what they name, and writes them for files and for workers.

load_recipe   parse.py: find_recipe ─► read_recipe ─► convert.py: check_tree
              here:     _with_defaults ─► convert.py: to_struct ─► validate.py: check_values
"""

import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from headway.broker.connection.address import without_secrets
from headway.broker.errors import ConfigError
from headway.learner.algorithm_config import AlgorithmConfig, preset_defaults
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import gpus_of

from .convert import check_tree, converted, to_struct
from .parse import find_recipe, newer_spelling, read_recipe, section_of, to_yaml, with_own_options
from .recipe import LauncherConfig, Recipe
from .validate import beyond_limits, check_values

Sections = TypeVar("Sections", bound=msgspec.Struct)

log = logging.getLogger(__name__)

RESOLVED = {
    *("prompts", "rewards", "model", "broker", "staleness", "sampling", "engine", "workers", "evaluation"),
    *("algorithm", "optimizer", "learner", "sft", "checkpoint", "weights", "metrics"),
}
"""The sections, besides `run`, of a resolved configuration of any version. A recipe that people write names fewer."""
SOURCE = "override"
"""What errors in overrides of some sections name as their source."""
HELD_OUT_COUNTS = ("held_out_rows", "held_out_records")


def load_recipe(path: str | Path, overrides: Sequence[str] = (), hint: Callable[[str], object] | None = None) -> Recipe:
    """Read a recipe by path or shipped name, with `a.b=c` overrides. Raises ConfigError, which names the key. `hint` is
    told how a recipe that says its warm-up in `sft` says it in `stages`."""
    found = find_recipe(str(path))
    file, raw = read_recipe(found, overrides)
    recipe = _resolved(raw, found.name, found.stem, held_out_seed=None if raw.keys() >= RESOLVED else 0)
    if hint is not None and (stages := newer_spelling(file)):
        hint(f"{path}: `sft` is an older spelling of the first stage. Write the same as:\n\n{to_yaml(stages)}")
    return recipe


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Return the same recipe with `a.b=c` overrides, as `with_own_options` applies them. Raises ConfigError."""
    if not overrides:
        return recipe
    name = recipe.run.name
    return _resolved(with_own_options(_plain(recipe), overrides, name), name, name)


def overridden(sections: Sections, overrides: Sequence[str]) -> Sections:
    """Return the same sections with `a.b=c` overrides, as `with_own_options` applies them. Raises ConfigError for a key
    or a value that none of them takes."""
    chosen = converted(with_own_options(_plain(sections), overrides, SOURCE), type(sections), SOURCE)
    for complaint in beyond_limits(chosen):
        raise ConfigError(f"{SOURCE}: {complaint}")
    return chosen


def _plain(sections: msgspec.Struct) -> dict[str, Any]:
    """Return the sections as plain values, with lists, which overrides can change, not tuples."""
    plain: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(sections))
    return plain


def _resolved(raw: dict[str, Any], source: str, stem: str, held_out_seed: int | None = 0) -> Recipe:
    check_tree(raw, Recipe, source)
    raw = _with_defaults(raw, source, stem, held_out_seed)
    recipe = to_struct(raw, Recipe, source)
    if recipe.model.path:  # so that one override replaces a shipped recipe's random model
        recipe = replace(recipe, model=replace(recipe.model, random=None))
    if raw.get("weights", {}).get("archive") == "http":
        _hint_at_no_archive()
    check_values(recipe, source)
    return recipe


def _with_defaults(raw: dict[str, Any], source: str, stem: str, held_out_seed: int | None) -> dict[str, Any]:
    """Return the recipe over the keys that it may omit: what follows from its preset and its placement, and the run's
    name, which is that of its file. Where that name has a run already, starting another is refused."""
    algorithm = raw.get("algorithm", {})
    preset = algorithm.get("preset", AlgorithmConfig().preset)
    try:
        of_preset = {**preset_defaults(str(preset)), "preset": preset}
    except ConfigError as error:
        raise ConfigError(f"{source}: algorithm.preset: {error}") from error
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")[:100] or "run"
    below = {"run": {"name": name}, "algorithm": of_preset, **_colocated_defaults(raw)}
    return with_held_out_seed(_merge(below, raw), held_out_seed)


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


@functools.cache
def _hint_at_no_archive() -> None:
    """Log the hint once a process, since a recipe is read more than once."""
    log.warning("weights.archive=http is called none now: workers pull from the learner alone.")


def _colocated_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a colocated recipe may omit; {} for any other recipe, or for a malformed one."""
    if section_of(raw, ("run",)).get("placement") != "colocated":
        return {}
    learner, engine = section_of(raw, ("learner",)), section_of(raw, ("engine",))
    weights: dict[str, Any] = {"swaps_at_once": 1.0}
    workers: dict[str, Any] = {}
    if learner.get("device") == "cuda":
        weights |= {"transport": "ipc", "staging": "host"}  # on GPUs there would have to be room for two more versions
        processes = learner.get("processes", 1)
        if isinstance(processes, int):
            workers["count"] = max(1, processes // _gpus_each(engine))
    return {"weights": weights, "workers": workers}


def _gpus_each(engine: Mapping[str, Any]) -> int:
    """Return the GPUs of an engine as it is written. Another check reports malformed ones."""
    options = engine.get("options")
    try:
        return gpus_of(EngineConfig(kind=engine.get("kind", ""), options=options if isinstance(options, dict) else {}))
    except ConfigError:
        return 1


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge key by key, where `above` wins. Lists are replaced as a whole."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merge(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged
