"""Converts plain values to structs, and explains errors: the key's full path, its value, what is expected and why.

Values must be plain, finite, and of bounded size and depth. `foreign_keys.yaml` says what TRL and verl call a key."""

import difflib
import functools
import math
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec
import yaml
from msgspec import Meta

from headway.broker.errors import ConfigError, UnknownKeysError
from headway.broker.user_code.kinds import did_you_mean

Struct = TypeVar("Struct", bound=msgspec.Struct)

VERL_SECTIONS = ("actor_rollout_ref", "async_training", "critic", "data", "reward", "reward_model", "trainer")
"""verl's sections of which Headway has none; `algorithm` is a section of both."""
GROUPS = ("fsdp_config", "megatron", "policy_loss")
"""Sections of verl whose sentence answers only those of their keys whose names have no answer of their own. The keys of
other sections mean something else than those of the same names elsewhere: `val_kwargs.top_p` is not `top_p`."""

OF_THEIR_OWN = ("sft", "stages", "optimizer", "algorithm.objective", "algorithm.critic")
"""Sections whose keys may have the name of another section's key in TRL or verl."""

MOST_LISTED = 20
"""Keys that one line of an error lists."""

KIND = re.compile(r"\w+|[\w.]+:\w+")

WORDS = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "a mapping",
    tuple: "a list",
}


class OurKey(NamedTuple):
    """Headway's answer to a key of TRL or verl."""

    key: str = ""
    """Headway's own key; empty: there is none."""
    remark: str = ""
    """A sentence on what differs, or on why there is no key."""


@functools.cache
def foreign_keys() -> dict[str, dict[str, OurKey]]:
    """Return the answers to the names of `verl` and of `trl`. Only an error needs them."""
    tables = yaml.safe_load(Path(__file__).with_name("foreign_keys.yaml").read_text(encoding="utf-8"))
    return {
        trainer: {name: OurKey(ours) if isinstance(ours, str) else OurKey(*ours) for name, ours in table.items()}
        for trainer, table in tables.items()
    }


def converted(raw: dict[str, Any], struct: type[Struct], source: str) -> Struct:
    """Return the struct of these values. Raises ConfigError, as `check_tree` and `to_struct` do."""
    check_tree(raw, struct, source)
    return to_struct(raw, struct, source)


def check_tree(raw: dict[str, Any], struct: type[msgspec.Struct], source: str) -> None:
    """Raise ConfigError for the first value that JSON and Headway's files could not hold, or else for all unknown keys,
    each with Headway's name for one of TRL or verl, or the nearest one."""
    for complaint in _complaints(raw, "", 0):
        raise ConfigError(f"{source}: {complaint}")
    answers: dict[str, list[str]] = {}
    for path, fields in _unknown(raw, struct, ""):
        answers.setdefault(_answer(path, fields, struct), []).append(path)
    lines = [f"{_listed(paths)}{answer}" for answer, paths in answers.items()]
    if (count := sum(map(len, answers.values()))) > 1:
        raise UnknownKeysError("\n".join((f"{source} has {count} unknown keys:", *lines)))
    for line in lines:
        raise ConfigError(f"{source}: unknown key {line}")
    if not isinstance(raw.get("algorithm", {}), dict):
        raise ConfigError(f"{source}: algorithm is {raw['algorithm']!r}; expected a section of keys.")


def to_struct(raw: dict[str, Any], struct: type[Struct], source: str) -> Struct:
    """Return the struct of values whose keys are known. Raises ConfigError for a missing key, and for a wrong value."""
    try:
        return msgspec.convert(raw, struct, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_explained(error, raw, struct, source)) from error


def _explained(error: msgspec.ValidationError, raw: Any, struct: type[msgspec.Struct], source: str) -> str:
    """Return msgspec's complaint as one paragraph."""
    text, _, where = str(error).partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", text):
        path = f"{path}.{missing[1]}".lstrip(".")
        return f"{source}: {path} is missing; expected {_expected(path, struct)}."
    value = _look_up(raw, path)
    is_unquoted = _plain(_annotation(path, struct)) is str and isinstance(value, int | float | bool)
    quote = " (quote it to make it a text: '\"...\"')" if is_unquoted else ""
    nearest = _nearest_choice(path, struct, value)
    expected = f"{_expected(path, struct)}{quote}{nearest}{_written(path, struct, value)}"
    return f"{source}: {path} is {value!r}; expected {expected}"


def values_in(raw: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value), such as that of `rewards[0].path`, of all that is neither a mapping nor a list."""
    if isinstance(raw, dict):
        for key, below in raw.items():
            yield from values_in(below, f"{path}.{key}".lstrip("."))
    elif isinstance(raw, list | tuple):
        for index, below in enumerate(raw):
            yield from values_in(below, f"{path}[{index}]")
    else:
        yield path, raw


def _nearest_choice(path: str, struct: type[msgspec.Struct], value: object) -> str:
    """Return the end of a sentence, with the nearest of the values that the key takes, where it takes only some."""
    kind = _plain(_annotation(path, struct))
    choices = [str(one) for one in get_args(kind)] if get_origin(kind) is Literal else []
    return did_you_mean(str(value), choices) or "."


def _unknown(raw: Any, annotation: Any, path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (path of an unknown key, valid keys beside it), depth first."""
    kind = _plain(annotation)
    if get_origin(kind) is tuple and isinstance(raw, list | tuple):
        for index, item in enumerate(raw):
            yield from _unknown(item, get_args(kind)[0], f"{path}[{index}]")
    if not _is_struct(kind) or not isinstance(raw, dict):
        return
    fields = _fields(kind)
    for key, value in raw.items():
        below = f"{path}.{key}".lstrip(".")
        if key in fields:
            yield from _unknown(value, fields[key], below)
        else:
            yield from ((each, list(fields)) for each in (_leaves(value, below) if _is_verls(below) else [below]))


def _leaves(raw: Any, path: str) -> Iterator[str]:
    """Yield the paths of all values of a section; its own if it has none."""
    if not isinstance(raw, dict) or not raw:
        yield path
    else:
        for key, value in raw.items():
            yield from _leaves(value, f"{path}.{key}")


def _is_verls(path: str) -> bool:
    """Whether the path is a key of verl's own sections. Its command lines write `+` before keys that they add."""
    return path.lstrip("+").partition(".")[0] in VERL_SECTIONS


def _listed(paths: list[str]) -> str:
    more = len(paths) - MOST_LISTED
    return ", ".join(paths[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def _answer(path: str, fields: list[str], struct: type[msgspec.Struct]) -> str:
    """Return what to say of an unknown key: the key that was meant, how it differs, or the valid keys beside it."""
    ours = _ours(path)
    nearest = _nearest(path, ours, fields, struct)
    if nearest:
        return f"; did you mean {nearest}?" + (f" {ours.remark}" if ours.remark and nearest == ours.key else "")
    return f". {ours.remark}" if ours.remark and not ours.key else f". Valid here: {', '.join(fields)}."


def _ours(path: str) -> OurKey:
    """Return the answer to a name of TRL or verl: of a path in verl's sections the longest part that has an answer, of
    equally long ones the first, but a group last; of others the last name."""
    names = path.lstrip("+").split(".")
    if not _is_verls(path):
        return {**foreign_keys()["verl"], **foreign_keys()["trl"]}.get(names[-1], OurKey())
    starts = ((start, start + length) for length in range(len(names), 0, -1) for start in range(len(names)))
    parts = (".".join(names[start:end]) for start, end in starts if end <= len(names))
    known = [part for part in parts if part in foreign_keys()["verl"]]
    return foreign_keys()["verl"][min(known, key=lambda part: part in GROUPS)] if known else OurKey()


def _nearest(path: str, ours: OurKey, fields: list[str], struct: type[msgspec.Struct]) -> str:
    """Return the nearest key: the one that TRL or verl call so, beside it if there is one, else a very similar sibling
    or an option of the objective, else one of just that name elsewhere, else a similar sibling, else a similar key
    elsewhere, else ''. A key that is known to have no counterpart is near no other. One in a section of verl's name is
    the key of `algorithm` that has this path, else the one that verl calls so, else what is nearest to the section."""
    parent, _, leaf = path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    paths = list(_all_paths(struct, ""))
    is_there = ours.key.partition(".options.")[0] in paths
    if parent and _is_verls(path):
        names = path.lstrip("+")
        if (own := f"algorithm.{names}") in paths:
            return own
        if ours != OurKey():
            return ours.key if is_there else ""
        return _nearest(names.partition(".")[0], ours, fields, struct)
    if (name := ours.key.rpartition(".")[2]) in fields and name != "kind":  # which nearly every section has
        return prefix + name
    is_our_own = parent.startswith(OF_THEIR_OWN) and not ours.key.startswith(prefix)
    is_below_ours = path.startswith((f"{ours.key}.", f"{ours.key}["))
    if not is_our_own and is_there and not is_below_ours:
        return ours.key
    if close := difflib.get_close_matches(leaf, fields, n=1, cutoff=0.85):
        return prefix + close[0]
    if parent == "algorithm.objective":
        return f"{prefix}options.{leaf}"
    everywhere = {path.rpartition(".")[2]: path for path in paths}
    if leaf in everywhere:
        return everywhere[leaf]
    if ours.remark and not ours.key:
        return ""
    if close := difflib.get_close_matches(leaf, fields, n=1, cutoff=0.6):
        return prefix + close[0]
    close = difflib.get_close_matches(leaf, everywhere, n=1, cutoff=0.75)
    return everywhere[close[0]] if close else ""


def _all_paths(annotation: Any, path: str) -> Iterator[str]:
    kind = _plain(annotation)
    if path:
        yield path
    if _is_struct(kind):
        for name, below in _fields(kind).items():
            yield from _all_paths(below, f"{path}.{name}".lstrip("."))


def _expected(path: str, struct: type[msgspec.Struct]) -> str:
    """Return type, bounds and meaning of the key at `path`."""
    annotation = _annotation(path, struct)
    metas = list(_metas(annotation))
    words = _type_words(_plain(annotation))
    words += " and".join(f" {sign} {bound:g}" for meta in metas for sign, bound in _bounds(meta))
    if any(meta.min_length for meta in metas):
        words += ", not empty"
    if _allows_null(annotation):
        words += ", or null"
    meaning = next((meta.description for meta in metas if meta.description), "")
    return f"{words} ({meaning})" if meaning else words


def _written(path: str, struct: type[msgspec.Struct], value: Any) -> str:
    """Return how to write a kind that stands where its section, or a list of such sections, is expected; "" for what is
    no kind."""
    kind = _plain(_annotation(path, struct))
    is_list = get_origin(kind) is tuple
    item = get_args(kind)[0] if is_list else kind
    has_kind = _is_struct(item) and next(iter(_fields(item))) == "kind"
    if not has_kind or not isinstance(value, str) or not KIND.fullmatch(value):
        return ""
    return f" Write [{{kind: {value}}}]." if is_list else f" Write {{kind: {value}}}."


def _bounds(meta: Meta) -> Iterator[tuple[str, float]]:
    for sign, bound in ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt)):
        if bound is not None:
            yield sign, bound


def _type_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if _is_struct(kind):
        return f"a section with {', '.join(_fields(kind))}"
    return WORDS.get(get_origin(kind) or kind, str(kind))


def _annotation(path: str, struct: type[msgspec.Struct]) -> Any:
    """Return the annotation of the field at a path such as `sft.phases[0].max_steps`."""
    annotation: Any = struct
    for step in _steps(path):
        kind = _plain(annotation)
        if isinstance(step, int):
            annotation = get_args(kind)[0]
        elif _is_struct(kind):
            annotation = _fields(kind)[step]
        else:
            return annotation
    return annotation


def _look_up(raw: Any, path: str) -> Any:
    for step in _steps(path):
        raw = raw[step]
    return raw


def _steps(path: str) -> list[str | int]:
    return [
        int(index) if index else name for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path) if name or index
    ]


def _plain(annotation: Any) -> Any:
    """Return the annotation without Annotated and without `| None`."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if _is_union(annotation):
        return _plain(next(kind for kind in get_args(annotation) if kind is not NoneType))
    return annotation


def _metas(annotation: Any) -> Iterator[Meta]:
    """Yield all Metas of one value, outermost first."""
    if get_origin(annotation) is Annotated:
        yield from (item for item in get_args(annotation) if isinstance(item, Meta))
        yield from _metas(get_args(annotation)[0])
    elif _is_union(annotation):
        yield from (meta for kind in get_args(annotation) for meta in _metas(kind))


def _allows_null(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        return _allows_null(get_args(annotation)[0])
    return _is_union(annotation) and NoneType in get_args(annotation)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (UnionType, typing.Union)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _fields(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return typing.get_type_hints(struct, include_extras=True)


DEEPEST = 40
"""Levels of sections within sections; recipes use five."""
LARGEST_INTEGER = 2**63 - 1


def _complaints(value: Any, path: str, depth: int) -> Iterator[str]:
    if depth > DEEPEST:
        yield f"{path[:80]}... lies {DEEPEST} levels deep: a recipe has no more than a few."
    elif isinstance(value, dict):
        for key, below in value.items():
            yield from _complaints_of_key(key, path)
            yield from _complaints(below, f"{path}.{key}".lstrip("."), depth + 1)
    elif isinstance(value, list | tuple):
        for index, below in enumerate(value):
            yield from _complaints(below, f"{path}[{index}]", depth + 1)
    elif (wrong := _wrong(value)) is not None:
        yield f"{path} {wrong}"


def _complaints_of_key(key: object, path: str) -> Iterator[str]:
    if not isinstance(key, str) or _wrong(key) is not None:
        yield f"{path or 'the recipe'} has the key {key!r}; expected a name."


def _wrong(value: object) -> str | None:
    match value:
        case bool() | None:
            return None
        case int() if abs(value) > LARGEST_INTEGER:
            return f"is an integer of {value.bit_length()} bits; expected one of at most 64 (write text in quotes)."
        case float() if not math.isfinite(value):
            return f"is {value}; expected a finite number."
        case str() if "\0" in value or value.encode(errors="ignore").decode() != value:
            return f"is {value[:80]!r}; expected text in UTF-8, without NUL."
        case int() | float() | str():
            return None
    return f"is {str(value)[:80]!r}, a {type(value).__name__}; expected a text, a number, true, false or null."
