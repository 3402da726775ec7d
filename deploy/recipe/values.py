"""Checks that a recipe's values can be stored, sent and read again: plain, finite, of bounded size and depth."""

import math
from collections.abc import Iterator
from typing import Any

from headway.broker.errors import ConfigError

DEEPEST = 40
"""Levels of sections within sections; recipes use five."""
LARGEST_INTEGER = 2**63 - 1


def check_plain(raw: dict[str, Any], source: str) -> None:
    """Raise ConfigError, with its path, for the first value that JSON and Headway's files could not hold."""
    for complaint in _complaints(raw, "", 0):
        raise ConfigError(f"{source}: {complaint}")


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
        case str() if "\0" in value or not _is_text(value):
            return f"is {value[:80]!r}; expected text in UTF-8, without NUL."
        case int() | float() | str():
            return None
    return f"is {str(value)[:80]!r}, a {type(value).__name__}; expected a text, a number, true, false or null."


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
