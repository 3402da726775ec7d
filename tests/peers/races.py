"""Races for tests, and steps of which figures are made."""

from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Step
from benchmarks.peers.race import Race


def race_in(output: Path, *overrides: str, **changes: Any) -> Race:
    return Race(**{"recipe": "arithmetic.yaml", "overrides": overrides, "output": str(output), **changes})


def steps_of(*ends_s: float, samples: int = 4) -> list[Step]:
    return [Step(end_s=end, samples=samples, tokens=10, reward=0.5, learner_idle_s=0.25) for end in ends_s]
