"""Millions of broken frames: decoding ends in a value that encodes again or in a FrameError, in bounded memory.

    python -m benchmarks.fuzz_decoder [--inputs 10000000] [--processes 2] [--seed 0]

Each process may grow by 256 MiB: an input that wants more is a finding. A finding is named by seed, chunk and index in
the chunk, which make it again. The last line is one JSON object; the exit code is 1 where there are findings.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from random import Random

from headway.broker.errors import FrameError

from .broken_frames import Subject, broken_frame, subjects

MAX_GROWTH_MIB = 256
"""The largest trajectory that is allowed takes about 60, and its experts 128 more."""
_CHUNK = 50_000
_KEPT_FINDINGS = 5


@dataclass
class Tally:
    """The results of the inputs."""

    refused: int = 0
    decoded: int = 0
    by_kind: Counter[int] = field(default_factory=Counter)
    """The decoded inputs, by the frame's kind."""
    findings: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    rss_mib: float = 0.0

    def add(self, other: "Tally") -> None:
        self.refused += other.refused
        self.decoded += other.decoded
        self.by_kind += other.by_kind
        self.findings += other.findings
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.rss_mib = max(self.rss_mib, other.rss_mib)


def examine(subject: Subject, frame: bytes) -> bool:
    """Whether the frame holds a value; False where it is refused. Raises any other error of the decoder."""
    try:
        value = subject.decode(frame)
    except FrameError:
        return False
    again = subject.encode(value)
    assert subject.encode(subject.decode(again)) == again, "a decoded value does not come back as it went"
    return True


def fuzz(seed: int, chunk: int, inputs: int) -> Tally:
    """Run the inputs of one chunk, which are the same for the same seed."""
    chance, tally = Random(f"{seed}:{chunk}"), Tally()
    for index in range(inputs):
        subject = chance.choice(subjects())
        frame = broken_frame(chance, subject)
        begun = time.perf_counter()
        try:
            is_value = examine(subject, frame)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what we look for
            tally.findings.append(f"{seed}:{chunk}:{index} kind {subject.kind} {error!r:.200} {frame[:400].hex()}")
            continue
        tally.slowest_s = max(tally.slowest_s, time.perf_counter() - begun)
        tally.decoded += is_value
        tally.refused += not is_value
        tally.by_kind[subject.kind] += is_value
    tally.rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return tally


def _confine() -> None:
    """Limit the growth of this process from here on."""
    subjects()
    with open("/proc/self/statm") as statm:
        held = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = held + (MAX_GROWTH_MIB << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chunks = -(-options.inputs // _CHUNK)
    sizes = [min(_CHUNK, options.inputs - chunk * _CHUNK) for chunk in range(chunks)]
    total, begun = Tally(), time.monotonic()
    with ProcessPoolExecutor(options.processes, initializer=_confine) as pool:
        for tally in pool.map(fuzz, [options.seed] * chunks, range(chunks), sizes):
            total.add(tally)
    report = {
        "seed": options.seed,
        "inputs": options.inputs,
        "seconds": round(time.monotonic() - begun, 1),
        "decoded": total.decoded,
        "decoded_by_kind": dict(sorted(total.by_kind.items())),
        "refused": total.refused,
        "slowest_s": round(total.slowest_s, 3),
        "peak_rss_mib": round(total.rss_mib, 1),
        "findings": len(total.findings),
        "first_findings": total.findings[:_KEPT_FINDINGS],
    }
    print(json.dumps(report))
    sys.exit(1 if total.findings else 0)


if __name__ == "__main__":
    main()
