"""Memory of server and client while a million prompts go through the broker; it should stay flat.

    python -m benchmarks.memory [--prompts 1000000] [--every 50000]

Every prompt is a group of one tiny sample: fed, leased, submitted, taken, committed, its name forgotten below the
watermark. A line of figures for every `--every` prompts goes to standard error; the last line of standard output is
one JSON object.
"""

import argparse
import json
import sys
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import uvloop

from .broker_bench.flow import Look, flow
from .broker_bench.payloads import SHORT_PROMPT, payloads_of
from .broker_bench.servers import fresh_server

FRAME_BYTES = 200
_FLAT_WITHIN = 0.1
_FIGURES = ("server_used_bytes", "server_rss_bytes", "client_rss_bytes", "keys")


def measure(prompts: int, every: int) -> dict[str, Any]:
    """Return slopes over all looks but the first, before which not everything has been used once."""
    looks: list[Look] = []

    def note(one: Look) -> None:
        looks.append(one)
        print(json.dumps(asdict(one)), file=sys.stderr, flush=True)

    with fresh_server("everysec") as server:
        uvloop.run(flow(server, payloads_of(FRAME_BYTES, SHORT_PROMPT), prompts, group_size=1, every=every, note=note))
    settled = looks[1:] or looks
    return {
        "prompts": looks[-1].trained,
        "wall_s": round(looks[-1].wall_s - looks[0].wall_s),
        "per_cpu_second": [_speed(*pair) for pair in pairwise(looks)],
        **{name: _trend(settled, name) for name in _FIGURES},
    }


def _trend(looks: list[Look], name: str) -> dict[str, Any]:
    """Return the trend of a figure.

    It is flat where the line through all looks gains over the whole run only a small share of its beginning.
    """
    trained = np.array([one.trained for one in looks], float)
    values = np.array([getattr(one, name) for one in looks], float)
    slope = float(np.polyfit(trained, values, 1)[0]) if len(looks) > 1 else 0.0
    gained = slope * (trained[-1] - trained[0])
    return {
        "first": int(values[0]),
        "last": int(values[-1]),
        "highest": int(values.max()),
        "slope_per_prompt": round(slope, 3),
        "flat": bool(gained <= _FLAT_WITHIN * values[0]),
    }


def _speed(before: Look, after: Look) -> int:
    spent = after.client_cpu_s + after.server_cpu_s - before.client_cpu_s - before.server_cpu_s
    return round((after.trained - before.trained) / spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=50_000)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.prompts, arguments.every)))


if __name__ == "__main__":
    main()
