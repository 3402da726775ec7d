"""A command that is run on GPUs, and the machine on which all are run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WHOLE = 4
"""Quarters of a GPU."""
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
    gpus: int = 1
    quarters: int = WHOLE
    """So many of each of its GPUs; others may have the rest."""
    after: tuple[str, ...] = ()
    """Measurements that must have ended well."""
    following: tuple[str, ...] = ()
    """Measurements that must have ended, well or not, if they are made at all."""
    in_turn: str = ""
    """Those with the same word here are not made at the same time."""


@dataclass(frozen=True)
class Machine:
    """Its GPUs, and the places of all that is read and written."""

    gpus: tuple[str, ...]
    """Their names, as CUDA_VISIBLE_DEVICES has them."""
    output: Path
    smollm2: Path
    trl: Path
    verl: Path


def module(name: str, *arguments: object) -> tuple[str, ...]:
    """Return the words of `python -m benchmarks.NAME`."""
    return ("-m", f"benchmarks.{name}", *map(str, arguments))


def closed(wanted: Sequence[Measurement], known: Sequence[Measurement]) -> list[Measurement]:
    """Return those that are wanted with all that must have ended well before them, in the order of `known`."""
    by_name, names = {one.name: one for one in known}, [one.name for one in wanted]
    for name in names:
        names += [before for before in by_name[name].after if before not in names]
    return [one for one in known if one.name in names]
