"""The figures of runs that have ended, kept in the race's output."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from .figures import Figures

T = TypeVar("T")


class Kept:
    """Files of figures. Where they are not to be read, all runs are made anew and their files replaced."""

    def __init__(self, output: Path, *, is_read: bool) -> None:
        self._directory = output / "figures"
        self._is_read = is_read

    def figures(self, name: str, run: Callable[[], Figures]) -> Figures:
        """Return the figures of that name, which `run` finds unless they are kept. Raises what it raises."""
        return self._found(name, run, Figures)

    def number(self, name: str, measure: Callable[[], float]) -> float:
        """Return the number of that name, as `figures` does."""
        return self._found(name, measure, float)

    def _found(self, name: str, find: Callable[[], T], kind: type[T]) -> T:
        file = self._directory / f"{name}.json"
        if self._is_read and file.exists():
            return msgspec.json.decode(file.read_bytes(), type=kind)
        found = find()
        self._directory.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.encode(found))
        return found
