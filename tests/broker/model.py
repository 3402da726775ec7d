"""The contract of the protocol in Python: the batches that a learner may get, and the acts that no script may do.

It knows nothing of queues and keys. A *lineage* is the batches on which some weights were trained, step by step. It
identifies the weights, so a token of an abandoned branch shows however its version is numbered.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace

from headway.broker.schema import Group, RunRules, TrajectoryId, VersionSpan, WeightVersion

from .scenario import group_id

Batch = tuple[TrajectoryId, ...]
Lineage = tuple[Batch, ...]


def token_at(tid: TrajectoryId, position: int, version: WeightVersion) -> int:
    """Return the token that these weights sample there; tokens of other samples and versions differ."""
    place = int(tid.group.rpartition("-")[2])
    return 1 + position + 10 * (version.step + 40 * (tid.sample + 4 * (tid.round % 50 + 50 * place)))


def groups_of(lineage: Iterable[Batch]) -> list[str]:
    """Return the groups in the order of training, once for each step that trained them."""
    return [group for batch in lineage for group in dict.fromkeys(tid.group for tid in batch)]


@dataclass
class Cursor:
    """The groups that are left to feed and those that are done, in a dataset of `total` prompts that is read once."""

    total: int
    watermark: int = 0
    done: set[str] = field(default_factory=set)
    next: int = 0

    @property
    def is_exhausted(self) -> bool:
        return self.next >= self.total

    def take(self, count: int) -> list[int]:
        """Return the next places to feed."""
        places: list[int] = []
        while len(places) < count and not self.is_exhausted:
            if group_id(self.next) not in self.done:
                places.append(self.next)
            self.next += 1
        return places

    def mark(self, groups: Iterable[str]) -> None:
        """Mark groups as trained, or as dropped by a stated rule."""
        self.done |= set(groups)
        while group_id(self.watermark) in self.done:
            self.watermark += 1
        self.next = max(self.next, self.watermark)

    def again(self) -> "Cursor":
        """Return a cursor at the same place, with nothing fed after it."""
        return replace(self, done=set(self.done), next=self.watermark)


@dataclass(frozen=True)
class Checkpoint:
    """The state that survives a learner."""

    incarnation: int
    step: int
    lineage: Lineage
    cursor: Cursor


def is_of_copy(token: str) -> bool:
    """Whether the token is of a lease beside another worker's, which takes nothing from that worker."""
    return token.startswith("copy")


@dataclass
class Samples:
    """The workers that may hand in each sample, from the replies that they got. It is rolled back with the server."""

    holders: dict[TrajectoryId, str] = field(default_factory=dict)
    accepted: dict[TrajectoryId, str] = field(default_factory=dict)
    appended: dict[TrajectoryId, int] = field(default_factory=dict)

    def copy(self) -> "Samples":
        return Samples(dict(self.holders), dict(self.accepted), dict(self.appended))

    def keep(self, rounds: dict[str, int], stored: Set[TrajectoryId]) -> None:
        """Keep only facts about these groups in their rounds, and about these payloads."""
        for facts in (self.holders, self.accepted, self.appended):
            for tid in [tid for tid in facts if rounds.get(tid.group) != tid.round]:
                del facts[tid]
        self.accepted = {tid: token for tid, token in self.accepted.items() if tid in stored}

    def lease(self, tid: TrajectoryId, token: str) -> None:
        assert tid not in self.accepted, f"{tid} is leased, but was accepted from {self.accepted[tid]}"
        if not is_of_copy(token):
            self.holders[tid] = token

    def release(self, tid: TrajectoryId, token: str) -> None:
        if self.holders.get(tid) == token:
            del self.holders[tid]

    def submit(self, tid: TrajectoryId, token: str, outcome: str) -> None:
        if outcome == "accepted":
            assert tid not in self.accepted, f"{tid} is accepted twice"
            self.accepted[tid] = token
            self.holders.pop(tid, None)
            self.appended.pop(tid, None)
        if outcome == "duplicate":
            assert self.accepted.get(tid) == token, f"{tid} is a duplicate of what {token} never handed in"


@dataclass
class Model:
    """The history of a run, which judges whether the next event is allowed."""

    rules: RunRules
    group_size: int
    weights: dict[WeightVersion, Lineage] = field(default_factory=dict)
    """The lineage of all announced weights."""
    delivered: dict[int, Batch] = field(default_factory=dict)
    """The batch of each step, which every repetition gets again."""
    samples: Samples = field(default_factory=Samples)
    has_forgotten: bool = False
    """Whether the server was rolled back, and no learner has told it since which batches it had taken."""
    is_exact: bool = True
    """Whether steps that are trained again get the same batches.

    Without a log they are trained with the batches that damage and rollbacks have left, and no worker has the weights
    that were announced after them.
    """
    is_calm: bool = True
    """Whether nothing was damaged, rolled back or rewound, and the rules are those of the beginning."""
    damaged: set[str] = field(default_factory=set)
    """Groups with bytes on the server that differ from the stored ones."""

    def announce(self, version: WeightVersion, lineage: Lineage) -> None:
        assert self.weights.setdefault(version, lineage) == lineage, f"{version} names two different weights"

    def judge_batch(self, step: int, lineage: Lineage, groups: Sequence[Group]) -> None:
        """Assert that these groups may train `step`, after `lineage`."""
        names = [group.prompt.group for group in groups]
        twice = set(names) & set(groups_of(lineage[:step]))
        assert not twice, f"step {step}: {twice} would be trained twice"
        assert len(set(names)) == len(names), f"step {step}: {names}"
        assert len(groups) <= self.rules.groups_per_step
        for group in groups:
            self._judge_group(step, lineage, group)

    def judge_repetition(self, step: int, batch: Batch) -> None:
        """Assert that the same step gets the same batch from every learner, unless some of it was damaged."""
        before = self.delivered.setdefault(step, batch)
        if before == batch or not self.is_exact:
            return
        assert self.damaged & set(groups_of([before])), (
            f"step {step} was given {[*map(str, before)]}, now {[*map(str, batch)]}"
        )
        self.delivered[step] = batch

    def _judge_group(self, step: int, lineage: Lineage, group: Group) -> None:
        samples = [trajectory.tid.sample for trajectory in group.trajectories]
        least = self.group_size
        if self.rules.on_straggler == "trim":
            least = min(least, self.rules.min_group_size)
        assert least <= len(samples) <= self.group_size, f"{group.prompt.group} is trained with {len(samples)} samples"
        assert samples == sorted(set(samples))
        spans = [span for trajectory in group.trajectories for span in trajectory.spans]
        for span in spans:
            self._judge_version(step, lineage, span.version)
        newest = max(span.version.step for span in spans)
        assert step - newest <= self.rules.max_lag, f"{group.prompt.group}: nothing in it may be trained at {step}"
        for trajectory in group.trajectories:
            assert trajectory.response_tokens.tolist() == expected_tokens(trajectory.tid, trajectory.spans)

    def _judge_version(self, step: int, lineage: Lineage, version: WeightVersion) -> None:
        lag = step - version.step
        bound = step if self.rules.on_over_bound == "mask" else self.rules.max_lag
        assert 0 <= lag <= bound, f"a token of {version} at step {step}: the bound is {bound}"
        known = self.weights[version]
        assert not self.is_exact or known == lineage[: version.step], (
            f"a token of {version} at step {step}: its weights are of another branch"
        )


def expected_tokens(tid: TrajectoryId, spans: Iterable[VersionSpan]) -> list[int]:
    return [token_at(tid, position, span.version) for span in spans for position in range(span.start, span.end)]
