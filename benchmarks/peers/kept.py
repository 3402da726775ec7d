"""The figures of runs that have ended, kept in the race's output."""

import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from broker.errors import ConfigError

from .figures import Figures
from .of_headway import NAME as HEADWAY
from .race import Race

T = TypeVar("T")
REMEDY = "give another --output, or the same task and settings"


class Kept:
    """Files of figures. Where they are not to be read, all runs are made anew and their files replaced. Several
    processes may share them: what one finds, the others wait for. Beside each stands of which race it is."""

    def __init__(self, output: Path, race: Race, *, is_read: bool) -> None:
        self._directory = output / "figures"
        self._race = race
        self._is_read = is_read

    def check(self, names: Sequence[str]) -> None:
        """Raise ConfigError if the output has the model of another task, or figures of these names from another race,
        one of other steps for example, that would be read as this one's."""
        task = self._directory / "task"
        if task.exists() and (of := task.read_text()) != self._race.recipe:
            raise ConfigError(f"--output {self._place} is of the recipe {of}, not of {self._race.recipe}: {REMEDY}.")
        self._directory.mkdir(parents=True, exist_ok=True)
        task.write_text(self._race.recipe)
        for name in names if self._is_read else ():
            if not self._file(name).exists():
                continue
            if not self._definition(name).exists():
                raise ConfigError(
                    f"--go-on: of the kept figures of {name} in {self._place} nothing says which race: {REMEDY}."
                )
            self._compare(name, msgspec.json.decode(self._definition(name).read_bytes(), type=dict[str, Any]))

    def _compare(self, name: str, kept: dict[str, Any]) -> None:
        ours = self._race.settings()
        keys = (kept.keys() | ours) - (set() if name.startswith(HEADWAY) else {"own"})
        differing = sorted(key for key in keys if kept.get(key) != ours.get(key))
        if differing:
            words = ", ".join(f"{key} is {kept.get(key)}, not {ours.get(key)}" for key in differing[:5])
            raise ConfigError(f"--go-on: in the kept figures of {name} in {self._place} {words}: {REMEDY}.")

    @property
    def _place(self) -> Path:
        return self._directory.parent

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
        for file, content in ((self._definition(name), self._race.settings()), (self._file(name), found)):
            part = self._directory / f".{name}.part"
            part.write_bytes(msgspec.json.encode(content))
            part.rename(file)

    def _definition(self, name: str) -> Path:
        return self._directory / f"{name}.race"

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.json"
