"""Chooses the workers that receive broadcasts: pure functions of heartbeats and of the versions that workers missed.

A worker that missed a deadline stays out until its heartbeat shows a version at least as new as the one that it
missed: it has pulled, so it runs again. This needs no clock.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from headway.broker.schema import WeightVersion
from headway.broker.schema.processes import WorkerInfo


class Member(NamedTuple):
    """One worker process: a restarted worker keeps its name but is another member."""

    worker: str
    host: str
    pid: int


def eligible(workers: Iterable[WorkerInfo], missed: Mapping[str, WeightVersion]) -> tuple[Member, ...]:
    """Return the alive workers that take part in the next broadcast, sorted by name."""
    chosen = (info for info in workers if _takes_part(info) and not is_behind(info, missed))
    return tuple(sorted(Member(info.worker, info.host, info.pid) for info in chosen))


def _takes_part(info: WorkerInfo) -> bool:
    return info.wants_broadcast and info.version is not None and info.state != "draining"


def follows_by_pull(info: WorkerInfo) -> bool:
    """Return whether the worker joins no group as long as it runs, and so can use deltas."""
    return not info.wants_broadcast and info.state != "draining"


def is_behind(info: WorkerInfo, missed: Mapping[str, WeightVersion]) -> bool:
    """Return whether a worker that missed a version has not yet shown that it caught up."""
    version = missed.get(info.worker)
    return version is not None and (info.version is None or info.version < version)


def still_missed(workers: Iterable[WorkerInfo], missed: Mapping[str, WeightVersion]) -> dict[str, WeightVersion]:
    """Return `missed` without the workers that caught up and those that are gone."""
    return {info.worker: missed[info.worker] for info in workers if info.worker in missed and is_behind(info, missed)}
