"""The learner and the workers of a run may wait for the batch of the next step, or for the oldest unfinished groups.

A look costs the server a few reads, however many groups the run has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.broker.connection.connection import Connection, pairs, text


@dataclass(frozen=True)
class MissingSample:
    """A sample that its group still lacks."""

    sample: int
    holder: str
    """The worker that leased it last; empty where none did. A name with a `?` belongs to another process."""
    held_s: float
    """The time since it was leased, or since its last segment."""
    is_leased: bool
    """False where the lease has expired, or was handed back."""


@dataclass(frozen=True)
class UnfinishedGroup:
    """A group that was admitted, and lacks samples."""

    group: str
    size: int
    done: int
    """The samples that were submitted."""
    floor: int | None
    """The step of the oldest weights that sample it; None before its first lease."""
    missing: tuple[MissingSample, ...]
    """The samples that it lacks, or the first of them."""


@dataclass(frozen=True)
class StepProgress:
    """The progress of the next step, by the server's clock."""

    quiet_s: float
    """The time since a batch was taken, a version announced or the run claimed."""
    claimed_s: float
    """The time since a learner claimed the run."""
    taken: int | None
    """The newest step whose batch the learner took; None where it holds none."""
    taken_groups: int
    """The groups of that batch."""
    taken_s: float
    """The time since a batch was taken."""
    has_learner: bool
    """Whether a learner has given a sign of life lately."""
    groups_per_step: int
    max_lag: int
    ahead: float
    """Steps of groups that are admitted beyond those of the next step."""
    on_straggler: str
    stored_bytes: int
    max_bytes: int
    feed_is_closed: bool
    youngest_floor: int | None
    """The step of the oldest weights of the last group that the next step would train; None: too few are ready."""
    unfinished: tuple[UnfinishedGroup, ...]
    """The oldest unfinished groups, those that were begun first."""


class ProgressVerbs:
    """Looks at what the next step waits for."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def look(self) -> StepProgress | None:
        """Returns the progress, or None where no learner has claimed the run yet. Raises ForeignRunError."""
        reply = await self._connection.script("progress", absent=None)
        if reply is None:
            return None
        clock, flat, taken, taken_groups, has_learner, youngest, *groups = reply
        now, meta = float(clock), dict(pairs(flat))
        if "groups_per_step" not in meta:
            return None
        since = {name: now - float(meta.get(name, 0)) for name in ("claimed_at", "announced_at", "pinned_at")}
        return StepProgress(
            quiet_s=max(0.0, min(since.values())),
            claimed_s=max(0.0, since["claimed_at"]),
            taken=_whole(taken),
            taken_groups=int(taken_groups),
            taken_s=max(0.0, since["pinned_at"]),
            has_learner=bool(has_learner),
            groups_per_step=int(meta["groups_per_step"]),
            max_lag=int(meta["max_lag"]),
            ahead=float(meta.get("ahead") or meta["max_lag"]),
            on_straggler=meta["on_straggler"],
            stored_bytes=int(meta.get("payload_bytes", 0)) + int(meta.get("archive_bytes", 0)),
            max_bytes=int(meta["max_bytes"]),
            feed_is_closed=meta.get("feed_closed") == "1",
            youngest_floor=_whole(youngest),
            unfinished=tuple(_group(group, now) for group in groups),
        )


def _group(reply: Sequence[Any], now: float) -> UnfinishedGroup:
    group, size, done, floor, *missing = reply
    return UnfinishedGroup(
        group=text(group),
        size=int(size),
        done=int(done),
        floor=_whole(floor),
        missing=tuple(_sample(sample, now) for sample in missing),
    )


def _sample(reply: Sequence[Any], now: float) -> MissingSample:
    sample, holder, since, is_leased = reply
    held_s = max(0.0, now - float(since)) if since else 0.0
    return MissingSample(sample=int(sample), holder=text(holder), held_s=held_s, is_leased=bool(is_leased))


def _whole(value: bytes) -> int | None:
    return int(value) if value else None
