"""Races for tests, and steps of which figures are made."""

from pathlib import Path
from typing import Any

import msgspec

from benchmarks.peers.figures import Step
from benchmarks.peers.race import Race
from headway.broker.schema.status import WorkerInfo
from tests.deploy.runs import worker


def race_in(output: Path, *overrides: str, **changes: Any) -> Race:
    return Race(**{"recipe": "arithmetic.yaml", "overrides": overrides, "output": str(output), **changes})


def steps_of(*ends_s: float, samples: int = 4) -> list[Step]:
    return [Step(end_s=end, samples=samples, tokens=10, reward=0.5, learner_idle_s=0.25) for end in ends_s]


def told(name: str, busy_s: float) -> WorkerInfo:
    return msgspec.structs.replace(worker(name, None), busy_s=busy_s, swaps=10, swap_s=0.5)
