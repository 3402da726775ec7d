"""The speeds that Headway has to reach, as ratios to the other transports within one run."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .race import Entry, Lap


@dataclass(frozen=True)
class Target:
    """A target: Headway moves at least so many times as much as `against`."""

    against: str
    frame_bytes: int
    at_least: float


TARGETS = (
    Target("streams", 10_000, 0.7),
    Target("streams", 100_000, 0.9),
    Target("streams_plain_calls", 10_000, 0.7),
    Target("streams_plain_calls", 100_000, 0.9),
    Target("xread_one", 10_000, 3.0),
    Target("xread_one", 100_000, 3.0),
    Target("xread_one_lists", 10_000, 3.0),
    Target("xread_one_lists", 100_000, 3.0),
    Target("ray_queue", 10_000, 20.0),
    Target("ray_queue", 100_000, 8.0),
)


def judge(done: Mapping[Entry, Sequence[Lap]]) -> list[dict[str, Any]]:
    """Judge every target that was measured, with and without an append-only file."""
    return [_verdict(target, mine, theirs, done) for target in TARGETS for mine, theirs in _matches(target, list(done))]


def _matches(target: Target, entries: Sequence[Entry]) -> list[tuple[Entry, Entry]]:
    """Return Headway's entries and the others' on a server of the same durability."""
    sized = [entry for entry in entries if entry.frame_bytes == target.frame_bytes]
    return [
        (mine, theirs)
        for mine in sized
        for theirs in sized
        if mine.transport == "headway" and theirs.transport == target.against and theirs.aof in (mine.aof, None)
    ]


def _verdict(target: Target, mine: Entry, theirs: Entry, done: Mapping[Entry, Sequence[Lap]]) -> dict[str, Any]:
    """Return the median of the rounds' ratios: a disturbance that lasts is in both sides of each."""
    pairs = list(zip(done[mine], done[theirs], strict=True))
    ratio = statistics.median(ours.per_s / other.per_s for ours, other in pairs)
    cpu = statistics.median(other.cpu_s_each / ours.cpu_s_each for ours, other in pairs)
    return {
        "against": target.against,
        "aof": mine.aof,
        "frame_bytes": target.frame_bytes,
        "at_least": target.at_least,
        "ratio": round(ratio, 2),
        "ratio_per_cpu_second": round(cpu, 2) if theirs.aof else None,  # the time of others' daemons is unknown
        "pass": ratio >= target.at_least,
    }
