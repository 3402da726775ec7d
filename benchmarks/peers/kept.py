"""The figures of runs that have ended, kept in the race's output."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from .figures import Figures

T = TypeVar("T")


class Kept:
    """Files of figures. Where they are not to be read, all runs are made anew and their files replaced. Several
    processes may share them: what one finds, the others wait for."""

    def __init__(self, output: Path, *, is_read: bool) -> None:
        self._directory = output / "figures"
        self._is_read = is_read

    def figures(self, name: str, run: Callable[[], Figures], judge: Callable[[Figures], Figures] | None) -> Figures:
        """Return the figures of that name, which `run` finds unless they are kept. `judge` adds a pass rate that they
        lack, unless it is None. Raises what both raise; what `run` found is kept then."""
        found = self._found(name, run, Figures)
        if judge is not None and found.pass_rate is None:
            found = judge(found)
            self._write(name, found)
        return found

    def number(self, name: str, measure: Callable[[], float]) -> float:
        """Return the number of that name, which `measure` finds unless it is kept. Raises what it raises."""
        return self._found(name, measure, float)

    def _found(self, name: str, find: Callable[[], T], kind: type[T]) -> T:
        file = self._file(name)
        with self._alone(name):
            if self._is_read and file.exists():
                return msgspec.json.decode(file.read_bytes(), type=kind)
            found = find()
            self._write(name, found)
            return found

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, name: str, found: object) -> None:
        part = self._directory / f".{name}.part"
        part.write_bytes(msgspec.json.encode(found))
        part.rename(self._file(name))

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.json"
