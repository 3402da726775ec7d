"""Trajectories a second through every transport, for all sizes and durabilities in one run."""

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .learner import BATCH
from .payloads import payloads_of
from .race import Entry, Lap, laps
from .servers import Durability
from .targets import judge
from .transports import NAMES, ON_A_SERVER, is_installed, open_transport

KB = 1000
COUNTS = {10 * KB: 6144, 100 * KB: 1536, 300 * KB: 512}
"""The trajectories of one lap, by the size of their frames."""
_SHARES = {"headway_segments": 1 / 3, "xread_one_lists": 1 / 4, "ray_queue": 1 / 6, "transfer_queue": 1 / 6}
"""Slow transports move fewer, so that their laps end in the same time."""


def measure(
    *,
    names: Sequence[str] = NAMES,
    counts: Mapping[int, int] = COUNTS,
    durabilities: Sequence[Durability] = ("off", "everysec"),
    rounds: int,
) -> dict[str, Any]:
    """Measure all installed transports, and judge their targets."""
    here = [name for name in names if is_installed(name)]
    done: dict[Entry, list[Lap]] = defaultdict(list)
    for lap in laps(_entries(here, counts, durabilities), rounds):
        done[lap.entry].append(lap)
        print(f"{lap.entry}: {lap.per_s:.0f}/s", file=sys.stderr, flush=True)
    return {
        "promises": {name: open_transport(name).promise for name in here},
        "not_installed": [name for name in names if name not in here],
        "laps": [_summary(entry, done[entry]) for entry in done],
        "targets": judge(done),
    }


def _entries(names: Iterable[str], counts: Mapping[int, int], durabilities: Sequence[Durability]) -> list[Entry]:
    entries = []
    for name in names:
        for frame_bytes, most in counts.items():
            count = max(1, round(most * _SHARES.get(name, 1.0) / BATCH)) * BATCH
            for aof in durabilities if name in ON_A_SERVER else (None,):
                entries.append(Entry(name, aof, frame_bytes, count))
    return entries


def _summary(entry: Entry, done: Sequence[Lap]) -> dict[str, Any]:
    rate = statistics.median(lap.per_s for lap in done)
    frame_bytes = payloads_of(entry.frame_bytes).frame_bytes
    return {
        "transport": entry.transport,
        "aof": entry.aof,
        "frame_bytes": round(frame_bytes),
        "trajectories": entry.count,
        "trajectories_per_s": round(rate),
        "mb_per_s": round(rate * frame_bytes / 1e6, 1),
        "rounds": [round(lap.per_s) for lap in done],
        "cpu_us_per_trajectory": {
            who: round(1e6 * statistics.median(getattr(lap, f"{who}_cpu_s") for lap in done) / entry.count)
            for who in ("producer", "consumer", "server")
        },
    }
