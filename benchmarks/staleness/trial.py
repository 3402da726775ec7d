"""One run of the study: what it is told, what it leaves behind. Imports no torch."""

from pathlib import Path
from typing import Any

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What all runs of a study share."""

    steps: int
    learning_rate: float
    groups_per_step: int = 32
    group_size: int = 8
    held_out: int = 512
    """Prompts of the last evaluation, sampled once each."""
    held_out_often: int = 256
    """And of those before it."""
    evaluate_every: int = 10
    """Steps."""
    warm_up_steps: int = 0
    """Of each phase at most, without a gate; 0: as the recipe has it."""


QUICK = Settings(
    steps=3,
    learning_rate=5e-4,
    groups_per_step=4,
    group_size=4,
    held_out=16,
    held_out_often=8,
    evaluate_every=2,
    warm_up_steps=2,
)
"""Does it run?"""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Step k trains what the weights of step max(0, k - lag) sampled."""

    name: str
    """Of the composition."""
    algorithm: dict[str, Any]
    """Its keys, so that a run of other keys under the same name is not taken for this one."""
    lag: int
    seed: int
    settings: Settings

    @property
    def start(self) -> str:
        """Names the warmed-up model: one a seed, whatever is trained after it."""
        steps = self.settings.warm_up_steps
        return f"seed-{self.seed}" + (f"-{steps}-steps" if steps else "")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A line of runs.jsonl."""

    trial: Trial
    final: float
    """Pass rate on held-out prompts after the last step."""
    held_out: list[tuple[int, float]]
    """(steps trained, pass rate)"""
    curves: dict[str, list[float | None]]
    """By step: lag, reward (of the old weights), grad_norm and what the loss reports. None: not finite."""
    seconds: dict[str, float]
    """Where the time went."""


def read_outcomes(path: Path) -> list[Outcome]:
    """Every whole line; a study that was killed may leave half of one."""
    outcomes = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            outcomes.append(msgspec.json.decode(line, type=Outcome))
        except msgspec.DecodeError:
            continue
    return outcomes


def append_outcome(path: Path, outcome: Outcome) -> None:
    """Begins a line of its own, whatever the file ends with."""
    with path.open("ab+") as file:
        is_broken = file.seek(0, 2) > 0 and file.seek(-1, 2) >= 0 and file.read(1) != b"\n"
        file.write(b"\n" * is_broken + msgspec.json.encode(outcome) + b"\n")
