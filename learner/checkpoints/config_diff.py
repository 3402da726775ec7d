"""Compares settings: their keys with the old and the new value, each cut to a readable length.

They are plain data: mappings, lists, texts, numbers, truth values and None.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

ABSENT = object()
"""Stands for the value of a key that is not there."""
_MOST = 60


def changed_settings(key: str, old: Any, new: Any) -> Iterator[tuple[str, str, str]]:
    """Yields (path, old text, new text) of what differs within a key's value; with an empty `key`, within settings."""
    for path, was, is_ in _differences(key, old, new):
        before, now = _text(was), _text(is_)
        start = max(_same(before, now) - 20, 0)
        yield path, _cut(before, start), _cut(now, start)


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields (path, old value, new value) of what differs within a value."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            below = f"{path}.{key}" if path else key
            yield from _differences(below, old.get(key, ABSENT), new.get(key, ABSENT))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (was, is_) in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{path}[{index}]", was, is_)
    elif old != new:
        yield path, old, new


def _text(value: Any) -> str:
    return "not set" if value is ABSENT else msgspec.json.encode(value).decode()


def _same(one: str, other: str) -> int:
    """Returns how many characters two texts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _cut(text: str, start: int) -> str:
    """Returns a text of at most 60 characters; a longer one from `start` on, a little before it differs."""
    if len(text) <= _MOST:
        return text
    rest = f"...{text[start:]}" if start else text
    return rest if len(rest) <= _MOST else f"{rest[: _MOST - 3]}..."
