"""One run of the study: its settings and its outcome. Imports no torch."""

from pathlib import Path
from typing import Any

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all runs of a study share."""

    steps: int
    learning_rate: float
    groups_per_step: int = 32
    group_size: int = 8
    held_out: int = 512
    """The number of prompts of the last evaluation, sampled once each."""
    held_out_often: int = 256
    """The number of prompts of earlier evaluations, sampled once each."""
    evaluate_every: int = 10
    """The number of steps between two evaluations."""
    warm_up_steps: int = 0
    """The largest number of steps of each phase, without a gate; 0 takes the recipe's."""


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
"""Settings of a study that only shows that everything runs."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose step k trains samples of the weights of step max(0, k - lag)."""

    name: str
    """The name of the composition."""
    algorithm: dict[str, Any]
    """The composition's keys, which tell apart runs of other keys under the same name."""
    lag: int
    seed: int
    settings: Settings

    @property
    def title(self) -> str:
        """Return the trial's name for readers."""
        return f"{self.name} lag {self.lag} seed {self.seed}"

    @property
    def start(self) -> str:
        """Return the name of the warmed-up model: one a seed, whatever is trained after it."""
        steps = self.settings.warm_up_steps
        return f"seed-{self.seed}" + (f"-{steps}-steps" if steps else "")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A line of runs.jsonl."""

    trial: Trial
    final: float
    """The pass rate on held-out prompts after the last step."""
    held_out: list[tuple[int, float]]
    """Pairs (steps trained, pass rate)."""
    curves: dict[str, list[float | None]]
    """Values by step: lag, reward (of the old weights), grad_norm and the loss's reports; None is not finite."""


def read_outcomes(path: Path) -> list[Outcome]:
    """Read every whole line; a study that was killed may leave half of one."""
    outcomes = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            outcomes.append(msgspec.json.decode(line, type=Outcome))
        except msgspec.DecodeError:
            continue
    return outcomes


def append_outcome(path: Path, outcome: Outcome) -> None:
    """Append an outcome in a line of its own, whatever the file ends with."""
    with path.open("ab+") as file:
        is_broken = file.seek(0, 2) > 0 and file.seek(-1, 2) >= 0 and file.read(1) != b"\n"
        file.write(b"\n" * is_broken + msgspec.json.encode(outcome) + b"\n")
