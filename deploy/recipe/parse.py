"""Recipes as files: where they are, what `base` puts beneath them, and how YAML and `a.b=c` are read.

OmegaConf reads 5e-4 as a number. The size of a recipe is measured before its references are replaced: `${a}${a}`
repeats a value that may repeat another one, so a kilobyte could become gigabytes.
"""

import functools
import io
import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from headway.broker.errors import ConfigError

log = logging.getLogger(__name__)

ENGINES = (("engine",), ("scorers", "engine"))
"""The sections that name an engine by `kind` and have `options` for it."""
BASE = "base"
"""The key with which a recipe names the recipes beneath it."""
SHIPPED = Path(__file__).parents[1] / "recipes"
LARGEST_FILE = 256 << 10
"""Most bytes of a recipe file; the longest recipe that ships has 4,000."""
MOST_CHARACTERS = 1 << 20
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


def shipped_recipes() -> list[str]:
    """Return the names of the recipes that come with Headway, such as `dpo.yaml` and `gpu/dpo.yaml`."""
    return sorted(str(path.relative_to(SHIPPED)) for path in SHIPPED.rglob("*.yaml"))


def find_recipe(name: str) -> Path:
    """Return the file of that path, or else the shipped recipe of that name (with or without .yaml)."""
    if os.path.isfile(name):
        return Path(name)
    for shipped in (name, f"{name}.yaml"):
        if shipped in shipped_recipes():
            return SHIPPED / shipped
    if os.path.isfile(f"{name}.yaml"):
        raise ConfigError(f"There is no recipe {name[:200]!r}; did you mean {f'{name}.yaml'!r}?")
    what = "is a directory" if os.path.isdir(name) else "is no plain file" if os.path.exists(name) else ""
    if not what and "=" in name:
        what = "stands where the recipe is to be named; overrides follow it"
    raise ConfigError(
        (f"{name[:200]!r} {what}." if what else f"There is no recipe {name[:200]!r}.")
        + " Give the path of a YAML file of your own, or one of those that ship:"
        f" {', '.join(shipped_recipes())}."
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the file's mapping with references resolved. Raises ConfigError."""
    return _resolve(_read_mapping(path), str(path))


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a recipe's mapping over those of its `base`, with references resolved, and that with overrides applied.

    `base` is a recipe or a list of them, each over the one before; a list in a recipe replaces its base's, as `{}`
    does, and an engine of another kind leaves its base's options out. The override `base=NAME` takes the place of the
    file's own. Raises ConfigError.
    """
    chosen = [one for one in overrides if one.partition("=")[0].strip() == BASE]
    file = _with_its_bases(path, [_value_of(one) for one in chosen[-1:]])
    merged = _resolve(_merged(file, _plain(_merged(file))), str(path))
    return merged, with_own_options(merged, [one for one in overrides if one not in chosen], path.name)


@dataclass(frozen=True)
class _File:
    """A recipe's own mapping, and its bases from the lowest one on."""

    path: Path
    own: DictConfig
    bases: tuple["_File", ...]


def _with_its_bases(path: Path, instead: Sequence[Any] = (), above: tuple[Path, ...] = ()) -> _File:
    """Read the file and its bases, which may have bases. `instead`: a base of the caller's. `above`: the files that
    this one is beneath."""
    if path.resolve() in above:
        raise ConfigError(f"{path} is its own base, by way of {', '.join(one.name for one in above)}.")
    own = _read_mapping(path)
    said = own.pop(BASE, None)
    names = _base_names(instead[0] if instead else said, path)
    bases = (_with_its_bases(_find_base(one, path), above=(*above, path.resolve())) for one in names)
    return _File(path, own, tuple(bases))


def _merged(file: _File, whole: Any = None) -> DictConfig:
    """Return the file's mapping over its bases', whose own bases lie beneath them. `whole`: the recipe so merged, to
    which references lead; without it the options of all engines stay, also those of another kind."""
    path, parts = file.path, [_merged(base, whole) for base in file.bases]
    for part in parts:
        if isinstance(run := part.get("run"), DictConfig):
            run.pop("name", None)  # a run is named after its own recipe
    try:
        merged = OmegaConf.create()
        for part in (*parts, file.own):
            below, above = _plain(merged), _plain(part)
            own = below if whole is None else _without_others(below, above, whole, path.name)
            merged = cast(DictConfig, OmegaConf.merge(_without_emptied(own, above), part))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} has a list where its base has a mapping, or the reverse: {_first_line(error)}."
        ) from error
    return merged


def _without_emptied(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping `below` without the keys that `above` says to be `{}`: merged, that would change nothing."""
    kept = {key: value for key, value in below.items() if above.get(key) != {}}
    both = (key for key, value in kept.items() if isinstance(value, dict) and isinstance(above.get(key), dict))
    return {**kept, **{key: _without_emptied(kept[key], above[key]) for key in both}}


def _plain(config: DictConfig) -> Any:
    return OmegaConf.to_container(config, resolve=False)


def _base_names(said: Any, path: Path) -> list[str]:
    names = [] if said is None else [said] if isinstance(said, str) else said
    if not isinstance(names, list | ListConfig) or not all(isinstance(one, str) for one in names):
        raise ConfigError(f"{path}: {BASE} must be the name of a recipe or a list of names, not {str(said)[:80]!r}.")
    return list(names)


def _find_base(name: str, path: Path) -> Path:
    """Return a base beside the recipe that names it, or else as any recipe is found."""
    beside = path.parent / name
    return beside if beside.is_file() else find_recipe(name)


def _read_mapping(path: Path) -> DictConfig:
    loaded = _parse(_read_text(path), str(path))
    if isinstance(loaded, ListConfig) or not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path} must be a mapping of sections such as `run:` and `learner:`, not a list or a word.")
    return loaded


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
    """Apply `a.b=c` and `rewards[0].weight=2` to the file's mapping, in order. The value takes the place of the key's
    own, be it a word, a list or a mapping."""
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


def with_own_options(raw: dict[str, Any], overrides: Sequence[str], source: str) -> dict[str, Any]:
    """Apply the overrides as `apply_overrides` does. An engine of another kind, of workers or of scorers, then starts
    with no options but theirs: those in `raw` are not its own, and a warning names them."""
    wanted = apply_overrides(raw, overrides, source)
    own = _without_others(raw, wanted, wanted, source)
    return wanted if own is raw else apply_overrides(own, overrides, source)


def _without_others(below: Any, above: Any, whole: Any, source: str) -> Any:
    """Return the mapping `below` without the options of each engine whose kind is another one in `above`. A kind that
    is a reference counts as the one to which it leads in the `whole` recipe."""
    for path in ENGINES:
        engine, chosen = section_of(below, path), section_of(above, path)
        kind, options = engine.get("kind"), engine.get("options")
        if not kind or not options or not isinstance(options, dict) or chosen.get("kind", kind) == kind:
            continue
        kind, other = (_led_to(one, path, whole) for one in (kind, chosen["kind"]))
        if kind != other:
            key = ".".join(path)
            _say_unused(
                source, f"{key}.kind={other}", str(kind), ", ".join(f"{key}.options.{name}" for name in options)
            )
            below = deepcopy(below)
            section_of(below, path)["options"] = {}
    return below


def _led_to(kind: Any, path: Sequence[str], whole: Any) -> Any:
    """Return the kind to which `kind` leads in this section of the whole recipe, if it is a reference; itself if it
    leads nowhere."""
    beside = "kind of a file"  # the section's own kind may be another file's, and references may lead to it
    if "${" in str(kind):
        raw = deepcopy(whole)
        section_of(raw, path)[beside] = kind
        with suppress(ConfigError, OmegaConfBaseException):
            return section_of(_resolve(OmegaConf.create(raw), ""), path).get(beside, kind)
    return kind


def section_of(raw: Any, path: Sequence[str]) -> dict[str, Any]:
    """Return the section at this path; an empty one where the file has something else there."""
    for key in path:
        raw = raw.get(key) if isinstance(raw, dict) else None
    return raw if isinstance(raw, dict) else {}


@functools.cache
def _say_unused(source: str, chosen: str, kind: str, options: str) -> None:
    """Log it once a process, since a recipe is read more than once."""
    log.warning("%s: %s takes the place of %s, whose options are not used: %s.", source, chosen, kind, options)


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
        OmegaConf.update(config, by_index(config, key), value, merge=False)
    except IndexError as error:
        before_index = re.split(r"\[|\.-?\d", key[:200])[0]
        raise ConfigError(
            f"The override of {key[:200]!r} does not fit the recipe: the list has no item of this number. Items count"
            " from 0; to add one, write it into the recipe, or give the whole list:"
            f" '{before_index}=[{{...}}, {{...}}]'."
        ) from error
    except (
        OmegaConfBaseException,
        ValueError,
        TypeError,
        KeyError,
        AssertionError,
        RecursionError,
    ) as error:
        raise ConfigError(f"The override of {key[:200]!r} does not fit the recipe: {_first_line(error)}.") from error


def _resolve(config: DictConfig, source: str) -> dict[str, Any]:
    try:
        if _References(raw := _plain(config), source).characters((), raw, ()) > MOST_CHARACTERS:
            raise ConfigError(
                f"{source} has more than {MOST_CHARACTERS:,} characters once its references are replaced."
            )
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {_first_line(error)}.") from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _syntax_error(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        # a library's next sentences say how to change its own limits
        mark, problem = error.problem_mark, str(error.problem).partition(". See ")[0].rstrip(".")
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


class _References:
    """Sizes of values with all `${a.b}` references in them replaced. Raises ConfigError for a value that contains
    itself, and for a reference that is neither the path of another value nor `${oc.env:NAME}`."""

    def __init__(self, raw: Any, source: str) -> None:
        self._raw, self._source = raw, source
        self._known: dict[tuple[str, ...], int] = {}

    def characters(self, path: tuple[str, ...], value: Any, within: tuple[tuple[str, ...], ...]) -> int:
        if path in within:
            raise ConfigError(f"{self._source}: {'.'.join(path)} refers to itself.")
        if path not in self._known:
            self._known[path] = self._measure(path, value, (*within, path))
        return self._known[path]

    def _measure(self, path: tuple[str, ...], value: Any, within: tuple[tuple[str, ...], ...]) -> int:
        if isinstance(value, dict):
            return sum(self.characters((*path, str(key)), below, within) for key, below in value.items())
        if isinstance(value, list):
            return sum(self.characters((*path, str(index)), below, within) for index, below in enumerate(value))
        if not isinstance(value, str):
            return 1
        return len(value) + sum(self._named(path, name, within) for name in self._references(path, value))

    def _references(self, path: tuple[str, ...], value: str) -> list[str]:
        named = _REFERENCE.findall(value)
        rest = _REFERENCE.sub("", value).replace("\\${", "")
        if "${" in rest or any(":" in name and not name.startswith("oc.env:") for name in named):
            raise ConfigError(
                f"{self._source}: {'.'.join(path)} is {value[:80]!r}; a reference is the path of another value,"
                " ${a.b}, or ${oc.env:NAME}."
            )
        return [name for name in named if ":" not in name]

    def _named(self, path: tuple[str, ...], name: str, within: tuple[tuple[str, ...], ...]) -> int:
        """Return the size of a named value; 0 for a missing one, which the look-up reports."""
        dots = len(name) - len(name.lstrip("."))
        start = path[: len(path) - dots] if dots else ()
        target = (*start, *(part for part in re.split(r"[.\[\]]+", name) if part))
        value = self._raw
        for part in target:
            if isinstance(value, dict):
                value = value.get(part)
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                return 0
        return self.characters(target, value, within)


_BY_NAME = re.compile(r"(?:stages\.(?P<name>[A-Za-z_][\w-]*)|(?P<older>sft))(?P<rest>[.\[].*)?", re.DOTALL)


def by_index(config: DictConfig, key: str) -> str:
    """Return the key with `stages.NAME`, or `sft`, as `stages[INDEX]`.

    A stage without a name has that of its kind, without the module of one of the user's own. A recipe without stages
    keeps the key, and a recipe whose stages have no `sft` keeps that. Raises ConfigError for a name that no stage or
    several stages have.
    """
    stages = config.get("stages")
    if not (found := _BY_NAME.fullmatch(key)) or not isinstance(stages, ListConfig) or not stages:
        return key
    name = found["name"] or found["older"]
    names = [_name_of(one) for one in stages]
    if found["older"] and name not in names:
        return key
    if names.count(name) != 1:
        told = f"{names.count(name)} stages have this name" if name in names else "no stage has this name"
        raise ConfigError(f"The override of {key[:200]!r}: {told}; the stages are {', '.join(names)}. Write stages[0].")
    return f"stages[{names.index(name)}]{found['rest'] or ''}"


def _name_of(stage: Any) -> str:
    """Return the name of a stage as the file says it; empty where the file says no stage."""
    if not isinstance(stage, DictConfig):
        return ""
    return str(stage.get("name") or stage.get("kind")).rpartition(":")[2]


def newer_spelling(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Return the stages of a recipe that says its warm-up in `sft`, as the file should say them; None for others."""
    warm_up = raw.get("sft")
    if not isinstance(warm_up, dict) or not warm_up.get("phases"):
        return None
    return {"stages": [{"kind": "sft", **warm_up}, {"kind": "rl"}]}
