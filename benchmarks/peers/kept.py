"""The figures of runs that have ended, kept in the race's output."""

import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from headway.broker.errors import ConfigError
from headway.deploy.run.atomic_files import replace_file
from headway.deploy.run.stage_output import is_complete, is_of

from .figures import Figures
from .of_headway import NAME as HEADWAY
from .race import Race

BEFORE = "before"
"""The name of the warmed-up model's pass rate."""
REMEDY = "give another --output, or the same task and settings"


class _Entry(msgspec.Struct, frozen=True):
    """A file of figures, or of one number."""

    race: dict[str, Any] | None = None
    """The settings of their race; None: another program wrote the file, or an older version of this one."""
    figures: Figures | float | None = None
    """A run's figures, or the pass rate of the warmed-up model."""


class Kept:
    """Files of figures. Where they are not to be read, all runs are made anew and their files replaced. Several
    processes may share them: what one finds, the others wait for. One file has a run's figures and of which race they
    are, so that neither stands beside those of another run, whenever a process is killed. The file of the warmed-up
    model's pass rate has what decides that one."""

    def __init__(self, output: Path, race: Race, *, is_read: bool) -> None:
        self._directory = output / "figures"
        self._race = race
        self._is_read = is_read

    def check(self, names: Sequence[str]) -> None:
        """Raise ConfigError if the output has the model of another task or warm-up, or figures of these names
        from another race, one of other steps for example, that would be read as this one's. The warmed-up model's pass
        rate has the name BEFORE."""
        task = self._directory / "task"
        if task.exists() and (of := task.read_text()) != self._race.recipe:
            raise ConfigError(f"--output {self._place} is of the recipe {of}, not of {self._race.recipe}: {REMEDY}.")
        if is_complete(self._race.model) and not is_of(self._race.model, self._race.load()):
            raise ConfigError(f"--output {self._place} has a model that other settings have warmed up: {REMEDY}.")
        self._directory.mkdir(parents=True, exist_ok=True)
        task.write_text(self._race.recipe)
        for name in names if self._is_read else ():
            if self._file(name).exists():
                self._read(name)

    def _read(self, name: str) -> Figures | float:
        """Return the kept figures. Raises ConfigError if they are not known to be of this race."""
        entry = msgspec.json.decode(self._file(name).read_bytes(), type=_Entry | float)
        if isinstance(entry, float) or entry.race is None or entry.figures is None:
            raise ConfigError(
                f"--go-on: of the kept figures of {name} in {self._place} nothing says which race: {REMEDY}."
            )
        self._compare(name, entry.race)
        return entry.figures

    def _compare(self, name: str, kept: dict[str, Any]) -> None:
        ours = self._settings(name)
        keys = (kept.keys() | ours) - (set() if name.startswith(HEADWAY) else {"own"})
        differing = sorted(key for key in keys if kept.get(key) != ours.get(key))
        if differing:
            words = ", ".join(f"{key} is {kept.get(key)}, not {ours.get(key)}" for key in differing[:5])
            raise ConfigError(f"--go-on: in the kept figures of {name} in {self._place} {words}: {REMEDY}.")

    def _settings(self, name: str) -> dict[str, Any]:
        return self._race.before() if name == BEFORE else self._race.settings()

    @property
    def _place(self) -> Path:
        return self._directory.parent

    def figures(self, name: str, run: Callable[[], Figures], judge: Callable[[Figures], Figures] | None) -> Figures:
        """Return the figures of that name, which `run` finds unless they are kept. `judge` adds a pass rate that they
        lack, unless it is None. Raises what both raise; what `run` found is kept then. Raises ConfigError if another
        race's have come into their place since `check`."""
        with self._alone(name):
            if self._is_read and self._file(name).exists():
                kept = self._read(name)
                assert isinstance(kept, Figures)
                found = kept
            else:
                found = run()
                self._keep(name, found)
            if judge is not None and found.pass_rate is None:
                found = judge(found)
                self._keep(name, found)
            return found

    def before(self, measure: Callable[[], float]) -> float:
        """Return the pass rate of the warmed-up model, which `measure` finds unless it is kept. Raises what it raises,
        and ConfigError if another model's, or one of another evaluation, has come into its place since `check`."""
        with self._alone(BEFORE):
            if self._is_read and self._file(BEFORE).exists():
                kept = self._read(BEFORE)
                assert isinstance(kept, float)
                return kept
            found = measure()
            self._keep(BEFORE, found)
            return found

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _keep(self, name: str, found: Figures | float) -> None:
        replace_file(self._file(name), msgspec.json.encode(_Entry(self._settings(name), found)))

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.json"
