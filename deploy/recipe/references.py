"""Measures how large a recipe becomes with its references replaced, before they are replaced.

A kilobyte can become gigabytes: `${a}${a}` repeats a value that may repeat another one. (OmegaConf counts YAML's
aliases itself.)
"""

import re
from typing import Any

from headway.broker.errors import ConfigError

MOST_CHARACTERS = 1 << 20
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


def check_references(raw: Any, source: str) -> None:
    """Raise ConfigError if `${a.b}` references, replaced, make the recipe too large, contain themselves, or are more
    than the path of another value or `${oc.env:NAME}`."""
    if _Expansion(raw, source).characters((), raw, ()) > MOST_CHARACTERS:
        raise ConfigError(f"{source} has more than {MOST_CHARACTERS:,} characters once its references are replaced.")


class _Expansion:
    """Sizes of values with all references in them replaced."""

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
