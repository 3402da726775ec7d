"""The broker against other ways of moving trajectories, its latency, its bytes, and whether it stays fast.

    python -m benchmarks.broker [--quick] [--section throughput|latency|workers|wire|growth ...] [--only TRANSPORT ...]

About fifteen minutes on two cores that have nothing else to do. The last line is one JSON object. The output and
benchmarks/broker_bench/ name the compared transports, and the promise that each gives for its speed.
"""

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from typing import Any

from .broker_bench import growth, latency, throughput, wire
from .broker_bench.transports import NAMES

Section = Callable[[argparse.Namespace], Any]


def _throughput(arguments: argparse.Namespace) -> Any:
    names = arguments.only or NAMES
    if arguments.quick:
        return throughput.measure(names=names, counts={10_000: 128}, durabilities=("everysec",), rounds=1)
    return throughput.measure(names=names, rounds=arguments.rounds)


def _latency(arguments: argparse.Namespace) -> Any:
    if arguments.quick:
        return latency.measure(workers=16, generate_s=0.05, samples=192)
    return latency.measure(workers=1000, generate_s=5.0, samples=4000)


def _workers(arguments: argparse.Namespace) -> Any:
    if arguments.quick:
        return latency.crowds(counts=(1, 8), samples_per_s=100, samples=64)
    return latency.crowds(counts=(1, 10, 100, 1000), samples_per_s=200, samples=4000)


def _wire(arguments: argparse.Namespace) -> Any:
    return wire.measure((10_000,) if arguments.quick else throughput.COUNTS)


def _growth(arguments: argparse.Namespace) -> Any:
    if arguments.quick:
        return growth.measure(through=256, held=256, window=256)
    return growth.measure(through=1_024_000, held=102_400)


SECTIONS: dict[str, Section] = {
    "throughput": _throughput,
    "latency": _latency,
    "workers": _workers,
    "wire": _wire,
    "growth": _growth,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="does it run? The figures mean nothing")
    parser.add_argument("--section", action="append", choices=list(SECTIONS), help="default: all of them")
    parser.add_argument("--only", action="append", choices=NAMES, metavar="TRANSPORT", help=", ".join(NAMES))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers and processes end too, as at Ctrl-C
    machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version()}
    results = {name: SECTIONS[name](arguments) for name in arguments.section or SECTIONS}
    print(json.dumps({"machine": machine, **results}))


if __name__ == "__main__":
    main()
