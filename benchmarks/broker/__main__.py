"""The broker against other ways of moving trajectories, its latency, and whether it stays small.

    python -m benchmarks.broker [--quick] [--section throughput|workers|memory ...] [--only TRANSPORT ...]

About fifteen minutes on two cores that have nothing else to do. The last line is one JSON object, which has the promise
that each transport gives for its speed, and whether Headway's targets are met.
"""

import argparse
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import command

from . import memory, race, workers
from .transports import TRANSPORTS


def _throughput(options: argparse.Namespace) -> Any:
    names = options.only or list(TRANSPORTS)
    if options.quick:
        return race.measure(names, {10_000: 128}, ("everysec",), rounds=1)
    return race.measure(names, race.COUNTS, ("off", "everysec"), rounds=options.rounds)


def _workers(options: argparse.Namespace) -> Any:
    counts, samples_per_s, samples = ((1, 8), 100, 64) if options.quick else ((1, 10, 100, 1000), 200, 4000)
    return [workers.measure(count, count / samples_per_s, samples) for count in counts]


def _memory(options: argparse.Namespace) -> Any:
    return memory.measure(512, 128) if options.quick else memory.measure(options.prompts, options.prompts // 20)


SECTIONS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "throughput": _throughput,
    "workers": _workers,
    "memory": _memory,
}


def main() -> int:
    """Measure the sections that are asked for."""
    parser = command.parser(__doc__, "broker")
    parser.add_argument("--quick", action="store_true", help="does it run? The figures mean nothing")
    parser.add_argument("--section", action="append", choices=list(SECTIONS), help="default: all of them")
    parser.add_argument("--only", action="append", choices=TRANSPORTS, metavar="TRANSPORT", help=", ".join(TRANSPORTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=1_000_000, help="of the section memory")
    options = parser.parse_args()
    command.end_children_at_sigterm()
    machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version()}
    return command.finish(
        {"machine": machine, **{name: SECTIONS[name](options) for name in options.section or SECTIONS}}
    )


if __name__ == "__main__":
    sys.exit(main())
