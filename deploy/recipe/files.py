"""Recipes as files: where they are, and how YAML and `a.b=c` are read. OmegaConf reads 5e-4 as a number."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from broker.errors import ConfigError

from .references import check_references
from .stage_keys import by_index

SHIPPED = Path(__file__).parents[1] / "recipes"
LARGEST_FILE = 256 << 10
"""Most bytes of a recipe file; the longest recipe that ships has 4,000."""


def shipped_recipes() -> list[str]:
    """Return the names of the recipes that come with Headway."""
    return sorted(path.name for path in SHIPPED.glob("*.yaml"))


def find_recipe(name: str) -> Path:
    """Return the file of that path, or else the shipped recipe of that name (with or without .yaml)."""
    if os.path.isfile(name):
        return Path(name)
    if Path(name).name == name:
        for candidate in (SHIPPED / name, SHIPPED / f"{name}.yaml"):
            if os.path.isfile(candidate):
                return candidate
    what = "is a directory" if os.path.isdir(name) else "is no plain file" if os.path.exists(name) else ""
    raise ConfigError(
        (f"{name[:200]!r} {what}." if what else f"There is no recipe {name[:200]!r}.")
        + " Give the path of a YAML file of your own, or one of those that ship:"
        f" {', '.join(shipped_recipes())}."
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the file's mapping with references resolved. Raises ConfigError."""
    text = _read_text(path)
    loaded = _parse(text, str(path))
    if isinstance(loaded, ListConfig) or not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path} must be a mapping of sections such as `run:` and `learner:`, not a list or a word.")
    return _resolve(loaded, str(path))


def _read_text(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > LARGEST_FILE:
            raise ConfigError(f"{path} has {size:,} bytes; a recipe has at most {LARGEST_FILE:,}.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error


def _parse(text: str, source: str) -> Any:
    try:
        return OmegaConf.load(io.StringIO(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {_syntax_error(error)}.") from error
    except (OmegaConfBaseException, ValueError, TypeError, OSError) as error:
        raise ConfigError(f"{source} cannot be read: {_first_line(error)}.") from error
    except RecursionError:
        raise ConfigError(f"{source} has too many brackets within each other to be read.") from None


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str], source: str) -> dict[str, Any]:
    """Apply `a.b=c` and `rewards[0].weight=2` to the file's mapping, in order."""
    config = OmegaConf.create(raw)
    for override in overrides:
        key, equals, _ = override.partition("=")
        wrong = (
            "has no '='" if not equals or not key.strip() else "names no key" if "" in key.strip().split(".") else ""
        )
        if wrong:
            raise ConfigError(
                f"The override {override[:200]!r} {wrong}; write it as key=value, such as staleness.max_lag=4."
            )
        _apply(config, key.strip(), _value_of(override))
    return _resolve(config, source)


def to_yaml(raw: dict[str, Any]) -> str:
    """Return YAML that `read_yaml` reads back to the same values."""
    return OmegaConf.to_yaml(OmegaConf.create(raw))


def _value_of(override: str) -> Any:
    text = override.partition("=")[2]
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index, call-overload]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"The value of the override {override[:200]!r} is not valid YAML; quote it, such as 'a=\"...\"'."
        ) from error


def _apply(config: DictConfig, key: str, value: Any) -> None:
    try:
        OmegaConf.update(config, by_index(config, key), value, merge=True)
    except (
        OmegaConfBaseException,
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        AssertionError,
        RecursionError,
    ) as error:
        raise ConfigError(f"The override of {key[:200]!r} does not fit the recipe: {_first_line(error)}.") from error


def _resolve(config: DictConfig, source: str) -> dict[str, Any]:
    try:
        check_references(OmegaConf.to_container(config, resolve=False), source)
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {_first_line(error)}.") from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _syntax_error(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark, problem = error.problem_mark, _first_sentence(str(error.problem))
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    return _first_line(error)


def _first_sentence(text: str) -> str:
    """Return a library's first sentence: the next ones say how to change the library's own limits."""
    return text.partition(". See ")[0].rstrip(".")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
