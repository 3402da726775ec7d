"""The trail of each learner: what it trained, durable before the checkpoint that contains it; and lineages of them."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from broker.schema import VersionSpan, WeightVersion


class Trained(msgspec.Struct, frozen=True, array_like=True):
    """One trajectory in a step."""

    tid: str
    spans: tuple[VersionSpan, ...]
    over_bound: int
    """Tokens in the loss whose lag exceeds the bound."""
    wrong: str
    """Empty, or how its content differs from what was generated."""
    identity: str = ""
    """Of the run whose lease it was."""
    is_pill: bool = False
    """It was sent by a hostile worker, or goes on after a segment that was."""


class StepRecord(msgspec.Struct, frozen=True):
    """One step of one learner."""

    version: WeightVersion
    """The weights before it."""
    digest: str
    """Of these weights."""
    trained: tuple[Trained, ...]
    """Nothing, while they are published and not yet trained."""


class Beginning(msgspec.Struct, frozen=True):
    """The checkpoint that a learner began with: who saved it, and its step. Nobody: from the first weights."""

    author: str = ""
    step: int = 0


class Trail:
    """One learner's; a line is durable when `append` returns."""

    def __init__(self, directory: Path, author: str, beginning: Beginning) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.author = author
        self._path = _path(directory, author)
        self._path.touch(exist_ok=False)
        self._write(beginning)

    def append(self, record: StepRecord) -> None:
        self._write(record)

    def _write(self, record: msgspec.Struct) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())


class Lineage(msgspec.Struct, frozen=True):
    """The steps that the weights of one checkpoint have trained, oldest first."""

    steps: tuple[StepRecord, ...]
    learners: tuple[str, ...]
    """Who trained them, newest first."""
    missing: tuple[int, ...]
    """Steps that no log knows: a fault of the benchmark, as a log is durable before the checkpoint."""

    @classmethod
    def of(cls, last: Beginning, directory: Path) -> Self:
        """Of whoever would begin now: back through the checkpoints that its predecessors began with."""
        steps, learners, missing = list[StepRecord](), list[str](), list[int]()
        learner, end = last.author, last.step
        while learner:
            beginning, records = read_log(directory, learner)
            for step in reversed(range(beginning.step, end)):
                if step in records:
                    steps.append(records[step])
                else:
                    missing.append(step)
            learners.append(learner)
            learner, end = beginning.author, beginning.step
        return cls(tuple(reversed(steps)), tuple(learners), tuple(missing))


def read_log(directory: Path, learner: str) -> tuple[Beginning, dict[int, StepRecord]]:
    """By step, the last of each. A line that a crash cut short is no record: nothing durable follows from it."""
    first, *rest = _path(directory, learner).read_bytes().splitlines(keepends=True)
    records = (msgspec.json.decode(line, type=StepRecord) for line in rest if line.endswith(b"\n"))
    return msgspec.json.decode(first, type=Beginning), {record.version.step: record for record in records}


def all_records(directory: Path) -> Iterator[StepRecord]:
    """Of every learner, on whatever branch."""
    for path in directory.glob("*.jsonl"):
        yield from read_log(directory, path.stem)[1].values()


def _path(directory: Path, learner: str) -> Path:
    return directory / f"{learner}.jsonl"
