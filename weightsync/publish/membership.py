"""Who receives broadcasts: decided from heartbeats and from who missed what, in pure functions.

A worker that missed a deadline stays out until its heartbeat shows a version at least as new as the one it
missed: it has pulled, so it runs again. No clock is needed for that.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from broker.schema import WeightVersion, WorkerInfo


class Member(NamedTuple):
    """One process: a restarted worker keeps its name but is another member."""

    worker: str
    host: str
    pid: int


def eligible(workers: Iterable[WorkerInfo], missed: Mapping[str, WeightVersion]) -> tuple[Member, ...]:
    """Alive workers that take part in the next broadcast, by name."""
    chosen = (info for info in workers if _takes_part(info) and not is_behind(info, missed))
    return tuple(sorted(Member(info.worker, info.host, info.pid) for info in chosen))


def _takes_part(info: WorkerInfo) -> bool:
    return info.wants_broadcast and info.version is not None and info.state != "draining"


def follows_by_pull(info: WorkerInfo) -> bool:
    """True for one that is in no group for as long as it runs: it has a use for deltas."""
    return not info.wants_broadcast and info.state != "draining"


def is_behind(info: WorkerInfo, missed: Mapping[str, WeightVersion]) -> bool:
    """True while a dropped worker has not shown that it caught up."""
    version = missed.get(info.worker)
    return version is not None and (info.version is None or info.version < version)


def still_missed(workers: Iterable[WorkerInfo], missed: Mapping[str, WeightVersion]) -> dict[str, WeightVersion]:
    """`missed` without those that caught up and those that are gone."""
    return {info.worker: missed[info.worker] for info in workers if info.worker in missed and is_behind(info, missed)}
