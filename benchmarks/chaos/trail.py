"""The trail of each learner, durable before the checkpoint that contains its samples, and lineages of trails."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from headway.broker.schema import VersionSpan, WeightVersion


class Trained(msgspec.Struct, frozen=True, array_like=True):
    """One trajectory in a step."""

    tid: str
    spans: tuple[VersionSpan, ...]
    over_bound: int
    """The number of tokens in the loss whose lag exceeds the bound."""
    wrong: str
    """The difference between its content and the generated one; empty if there is none."""
    identity: str = ""
    """The identity of the run that leased it."""
    is_pill: bool = False
    """Whether a hostile worker sent it, or a segment before its end."""


class StepRecord(msgspec.Struct, frozen=True):
    """One step of one learner."""

    version: WeightVersion
    """The weights before it."""
    digest: str
    """The digest of these weights."""
    trained: tuple[Trained, ...]
    """The trained samples; empty while the weights are published and not yet trained."""


class Beginning(msgspec.Struct, frozen=True):
    """The checkpoint with which a learner began: its author and its step. An empty author means the first weights."""

    author: str = ""
    step: int = 0


class Trail:
    """One learner's trail; a line is durable when `append` returns."""

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
    """The learners that trained them, newest first."""
    missing: tuple[int, ...]
    """Steps that no log knows: a fault of the benchmark, because a log is durable before the checkpoint."""

    @classmethod
    def of(cls, last: Beginning, directory: Path) -> Self:
        """Return the lineage of a learner that would begin now, back through its predecessors' first checkpoints."""
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
    """Return the last record of each step, without a line that a crash cut short: nothing durable follows from it."""
    first, *rest = _path(directory, learner).read_bytes().splitlines(keepends=True)
    records = (msgspec.json.decode(line, type=StepRecord) for line in rest if line.endswith(b"\n"))
    return msgspec.json.decode(first, type=Beginning), {record.version.step: record for record in records}


def all_records(directory: Path) -> Iterator[StepRecord]:
    """Yield the records of every learner, on whichever branch."""
    for path in directory.glob("*.jsonl"):
        yield from read_log(directory, path.stem)[1].values()


def _path(directory: Path, learner: str) -> Path:
    return directory / f"{learner}.jsonl"
