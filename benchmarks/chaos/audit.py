"""The audit of the final checkpoint's lineage."""

from collections import Counter, defaultdict
from pathlib import Path

import msgspec

from headway.broker.schema import WeightVersion
from headway.learner.data.prompts.cursor import group_at

from .tasks import OF_ANOTHER_RUN
from .trail import Lineage, StepRecord, Trained, all_records
from .trial import GROUP_SIZE, MAX_LAG

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
        trained_tokens=sum(one.spans[-1].end for _, one in trained),
        lost=len(fed - places.keys()),
        trained_twice=sum(places.values()) - len(places),
        over_lag_bound=sum(_is_over_bound(record, one) for record, one in trained),
        corrupt=sum(one.wrong not in ("", OF_ANOTHER_RUN) and not one.is_pill for _, one in trained),
        off_lineage=sum(_is_off_lineage(record, one, digests, own) for record, one in trained),
        off_identity=sum(one.identity != identity or one.wrong == OF_ANOTHER_RUN for _, one in trained),
        poisoned=sum(one.is_pill for _, one in trained),
    )


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
