"""What the final checkpoint's lineage proves."""

from collections import Counter
from pathlib import Path

import msgspec

from broker.schema import WeightVersion
from learner.prompts.cursor import group_at

from .trail import Lineage, StepRecord, Trained, all_records
from .trial import GROUP_SIZE, MAX_LAG


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """All numbers but the first two must be 0."""

    steps: int
    trained_tokens: int
    lost: int
    """Samples that were fed and neither trained nor dropped by a stated rule."""
    trained_twice: int
    """Samples beyond the first of their place in a group, whatever their round."""
    over_lag_bound: int
    """Trajectories with a token over the bound, in the loss or not: the rule is to generate them anew."""
    corrupt: int
    """Trajectories that are not what was generated for them."""
    off_lineage: int
    """Trajectories with tokens of weights that the lineage never had."""


def audit(lineage: Lineage, logs: Path, groups: int) -> Audit:
    """Of a finite data set of so many groups."""
    assert not lineage.missing, f"steps that were trained and never logged: {lineage.missing}"
    trained = [(record, one) for record in lineage.steps for one in record.trained]
    places = Counter(_place(one.tid) for _, one in trained)
    fed = {(group_at((0, position)), str(sample)) for position in range(groups) for sample in range(GROUP_SIZE)}
    digests = {record.version: record.digest for record in all_records(logs)}
    own = {record.version.step: record.digest for record in lineage.steps}
    return Audit(
        steps=len(lineage.steps),
        trained_tokens=sum(one.spans[-1].end for _, one in trained),
        lost=len(fed - places.keys()),
        trained_twice=sum(places.values()) - len(places),
        over_lag_bound=sum(_is_over_bound(record, one) for record, one in trained),
        corrupt=sum(bool(one.wrong) for _, one in trained),
        off_lineage=sum(_is_off_lineage(one, digests, own) for _, one in trained),
    )


def _place(tid: str) -> tuple[str, str]:
    group, _, sample = tid.split(":")
    return group, sample


def _is_over_bound(record: StepRecord, one: Trained) -> bool:
    return one.over_bound > 0 or any(record.version.step - span.version.step > MAX_LAG for span in one.spans)


def _is_off_lineage(one: Trained, digests: dict[WeightVersion, str], own: dict[int, str]) -> bool:
    """Weights that nobody has trained from are known to nobody, and pass."""
    versions = (span.version for span in one.spans)
    return any(version in digests and digests[version] != own.get(version.step) for version in versions)
