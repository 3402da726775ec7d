"""The places of the samples and tokens of each weight version, from a look at a run and from its last steps."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from headway.broker.schema.metrics import StepMetrics
from headway.broker.schema.status import RunStatus, VersionGroups, WorkerInfo
from headway.deploy.observe.status import version_text
from headway.deploy.run.events import HeartbeatEvent
from headway.deploy.run.figures import trained_by_step_of_weights, trained_tokens_by_step_of_weights

_NO_GROUPS = VersionGroups(step=0, generating=0, ready=0, dropped=0)


class HeldVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The places of the samples of one weight version."""

    version: str
    is_announced: bool
    workers: int
    """Workers whose engines hold it."""
    generating: int
    """Samples that these workers hold leases of."""
    groups_generating: int
    """Groups whose oldest token it sampled, and that lack samples."""
    groups_ready: int
    """Groups whose oldest token it sampled, and that the learner has not taken."""
    groups_dropped: int
    tokens_ready: int
    """Tokens that it sampled, of groups that the learner has not taken."""
    trained: int
    """Trajectories that the steps trained and whose oldest token it sampled."""
    trained_tokens: int
    """Tokens that it sampled and the steps trained."""


def held_versions(look: RunStatus | HeartbeatEvent, steps: Sequence[StepMetrics]) -> list[HeldVersion]:
    """Return the versions that workers hold, that groups wait with or that these steps trained, the newest first."""
    holders: dict[str, list[WorkerInfo]] = defaultdict(list)
    for worker in look.workers:
        holders[version_text(worker.version)].append(worker)
    steps = [step for step in steps if step.incarnation == look.incarnation]
    trained, tokens = (
        {f"{look.incarnation}.{step}": count for step, count in by_step(steps).items()}
        for by_step in (trained_by_step_of_weights, trained_tokens_by_step_of_weights)
    )
    incarnation = look.announced.incarnation if look.announced is not None else look.incarnation
    groups = {f"{incarnation}.{version.step}": version for version in look.versions}
    announced = version_text(look.announced)
    return [
        _held(name, announced, holders[name], groups.get(name, _NO_GROUPS), trained.get(name, 0), tokens.get(name, 0))
        for name in _newest({*holders, *groups, *trained, *tokens, announced})
    ]


def _held(
    name: str, announced: str, workers: Sequence[WorkerInfo], groups: VersionGroups, trained: int, trained_tokens: int
) -> HeldVersion:
    return HeldVersion(
        version=name,
        is_announced=name == announced,
        workers=len(workers),
        generating=sum(worker.active for worker in workers),
        groups_generating=groups.generating,
        groups_ready=groups.ready,
        groups_dropped=groups.dropped,
        tokens_ready=groups.ready_tokens,
        trained=trained,
        trained_tokens=trained_tokens,
    )


def _newest(names: set[str]) -> list[str]:
    """Sort versions; the dash, which stands for no version yet, comes last."""
    return sorted(
        names, key=lambda name: [int(part) for part in name.split(".")] if name[0] != "-" else [], reverse=True
    )
