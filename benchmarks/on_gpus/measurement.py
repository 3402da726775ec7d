"""A command that is run on GPUs, and the machine on which all are run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WHOLE = 4
"""Quarters of a GPU."""
SMOLLM2 = "smollm2"
"""The measurement that makes the model; nothing is measured."""
SPARE_S = 15
"""Seconds that a command which ends its own processes has for that before its limit."""


@dataclass(frozen=True)
class Measurement:
    """One command of Python."""

    name: str
    command: tuple[str, ...]
    """The words after `python`."""
    seconds: int
    """It is ended after so many."""
    likely: int = 0
    """It took so many where it was run; 0: that is not known."""
    least: int = 0
    """It is worth its start where so many are left, as its log has whatever it found by then; 0: `likely`."""
    gpus: int = 1
    """0: it runs beside all others."""
    quarters: int = WHOLE
    """So many of each of its GPUs; others may have the rest."""
    sees: int = 0
    """It sees so many GPUs, where these are more than it uses."""
    after: tuple[str, ...] = ()
    """Measurements that must have ended well."""
    following: tuple[str, ...] = ()
    """Measurements that must have ended, well or not, if they are made at all."""
    in_turn: str = ""
    """Those with the same word here are not made at the same time."""
    python: Path | None = None
    """The interpreter; None: this one."""

    @property
    def likely_s(self) -> int:
        """The seconds that it is likely to take, or else its limit."""
        return self.likely or self.seconds

    @property
    def least_s(self) -> int:
        """It does not start where fewer seconds are left."""
        return self.least or self.likely_s


@dataclass(frozen=True)
class Machine:
    """Its GPUs, and the places of all that is read and written."""

    gpus: tuple[str, ...]
    """Their names, as CUDA_VISIBLE_DEVICES has them."""
    output: Path
    smollm2: Path
    trl: Path
    verl: Path
    gguf: Path | None = None
    """SmolLM2 is made of this file first."""
    learner: Path | None = None
    """The interpreter of the learner alone; None: this one."""

    @property
    def model_made(self) -> tuple[str, ...]:
        """The measurement that must have ended well before SmolLM2 is there."""
        return (SMOLLM2,) if self.gguf else ()


def module(name: str, *arguments: object) -> tuple[str, ...]:
    """Return the words of `python -m benchmarks.NAME`."""
    return ("-m", f"benchmarks.{name}", *map(str, arguments))


def closed(wanted: Sequence[Measurement], known: Sequence[Measurement]) -> list[Measurement]:
    """Return those that are wanted, in their order, each behind all that must have ended well before it."""
    by_name, found = {one.name: one for one in known}, dict[str, Measurement]()

    def add(one: Measurement) -> None:
        for before in one.after:
            add(by_name[before])
        found.setdefault(one.name, one)

    for one in wanted:
        add(one)
    return list(found.values())
