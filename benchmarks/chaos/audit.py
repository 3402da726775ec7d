"""The audit of the final checkpoint's lineage.

The trail of each learner is durable before the checkpoint that contains its samples.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from headway.broker.schema import VersionSpan, WeightVersion
from headway.learner.data.prompts.cursor import group_at

from .episodes import EpisodeTurn
from .tasks import OF_ANOTHER_RUN
from .trial import GROUP_SIZE, MAX_LAG


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
    turns: tuple[EpisodeTurn, ...] = ()
    """The trained turns, where an agent has played it."""


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


MUST_BE_ZERO = ("lost", "trained_twice", "over_lag_bound", "corrupt", "off_lineage", "off_identity", "poisoned")


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """All numbers but the first two are those of MUST_BE_ZERO."""

    steps: int
    trained_tokens: int
    lost: int
    """Samples that were fed and neither trained nor dropped by a stated rule."""
    trained_twice: int
    """Samples beyond the first of their place in a group, whatever their round."""
    over_lag_bound: int
    """Trajectories with a token over the bound, in the loss or not: the rule is to generate them anew."""
    corrupt: int
    """Trajectories that differ from their generated tokens."""
    off_lineage: int
    """Trajectories with tokens of weights that the lineage never had."""
    off_identity: int
    """Trajectories whose lease, or whose weights, were another run's of the same name."""
    poisoned: int
    """Trajectories that were pills."""


def audit(lineage: Lineage, logs: Path, groups: int, identity: str = "") -> Audit:
    """Audit a finite data set of so many groups, trained by the run of this identity."""
    assert not lineage.missing, f"steps that were trained and never logged: {lineage.missing}"
    trained = [(record, one) for record in lineage.steps for one in record.trained]
    places = Counter(_place(one.tid) for _, one in trained)
    fed = {(group_at((0, position)), str(sample)) for position in range(groups) for sample in range(GROUP_SIZE)}
    digests = defaultdict[WeightVersion, set[str]](set)
    for record in all_records(logs):
        digests[record.version].add(record.digest)
    own = {record.version.step: record.digest for record in lineage.steps}
    return Audit(
        steps=len(lineage.steps),
        trained_tokens=sum(_sampled(one) for _, one in trained),
        lost=len(fed - places.keys()),
        trained_twice=sum(places.values()) - len(places),
        over_lag_bound=sum(_is_over_bound(record, one) for record, one in trained),
        corrupt=sum(one.wrong not in ("", OF_ANOTHER_RUN) and not one.is_pill for _, one in trained),
        off_lineage=sum(_is_off_lineage(record, one, digests, own) for record, one in trained),
        off_identity=sum(one.identity != identity or one.wrong == OF_ANOTHER_RUN for _, one in trained),
        poisoned=sum(one.is_pill for _, one in trained),
    )


def _sampled(one: Trained) -> int:
    return sum(len(turn.said) for turn in one.turns) if one.turns else one.spans[-1].end


def _place(tid: str) -> tuple[str, str]:
    group, _, sample = tid.split(":")
    return group, sample


def _is_over_bound(record: StepRecord, one: Trained) -> bool:
    return one.over_bound > 0 or any(record.version.step - span.version.step > MAX_LAG for span in one.spans)


def _is_off_lineage(
    record: StepRecord, one: Trained, digests: dict[WeightVersion, set[str]], own: dict[int, str]
) -> bool:
    """Whether a sample is newer than its step, or of weights off the lineage. Weights without a trail pass."""
    versions = {span.version for span in one.spans}
    if any(version.step > record.version.step for version in versions):
        return True
    return any(version in digests and own.get(version.step) not in digests[version] for version in versions)
