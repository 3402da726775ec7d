"""Lag and speed by `staleness.max_lag` and `staleness.ahead`: the real broker between engines and a learner that sleep.

    python -m benchmarks.ahead [--steps 40] [--of 1,2,3,2:1,...] [--token-ms 10] [--train-ms 150] [--spread 1.0]

Each of `--of` is a bound on lag, and behind a colon how far ahead samples are begun. A step has 64 samples of 8
prompts; each of four engines has room for 32 samples, and a token takes it so long whatever else it does. Lengths are
log-normal (median 50 tokens, at most 1,024): `--spread 0.3` has short tails, 1.0 long ones. New weights reach engines
just before they are announced. Processes that sleep need little of a processor, so a busy machine disturbs little.

A line for each goes to standard error; the last line of standard output is one JSON object. `lag` is that of a
sample's oldest token, `token_lag` that of all its tokens; the first ten steps do not count.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import uvloop

from headway.broker import Broker, open_broker
from headway.broker.schema import Lease, RunRules, Trajectory, VersionSpan, WeightVersion
from headway.broker.server.embedded import EmbeddedServer

from .broker_bench.learner import BATCH, Learner, Run
from .broker_bench.payloads import GROUP_SIZE, SHORT_PROMPT, prompt
from .broker_bench.servers import fresh_server

ENGINES, SLOTS = 4, 32
MEDIAN_TOKENS, MOST_TOKENS = 50, 1024
FIRST = 10
"""The number of first steps that do not count: engines fill, and no sample is old yet."""
IDLE_S = 0.02
LEASE_S = 600.0


@dataclass(frozen=True)
class Pace(Run):
    """A run that begins samples for so many steps beyond the next one."""

    ahead: float | None = None

    @property
    def rules(self) -> RunRules:
        """The same rules, with the pace."""
        return msgspec.structs.replace(super().rules, ahead=self.ahead)


@dataclass
class Seen:
    """The lags and waits of the steps that count."""

    lags: list[int] = field(default_factory=list)
    token_lags: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (lag, tokens)."""
    waited_s: float = 0.0
    """The time for which the learner waited for batches."""

    def add(self, trajectory: Trajectory, step: int) -> None:
        """Note a sample that this step trains."""
        self.lags.append(step - min(span.version.step for span in trajectory.spans))
        self.token_lags += [(step - span.version.step, span.end - span.start) for span in trajectory.spans]


class Engine:
    """A worker whose engine's tokens take time and nothing else."""

    def __init__(self, name: str, broker: Broker, token_s: float, lengths: random.Random, spread: float) -> None:
        self._name = name
        self._broker = broker
        self._token_s = token_s
        self._lengths = lengths
        self._spread = spread
        self._running = 0
        self.version = WeightVersion(1, 0)

    async def work(self) -> None:
        """Lease and generate until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                free = SLOTS - self._running
                leased = await self._broker.leases.lease(self._name, self.version, free, LEASE_S) if free else None
                for lease in leased.leases if leased else ():
                    self._running += 1
                    tasks.create_task(self._generate(lease))
                await asyncio.sleep(IDLE_S)

    async def _generate(self, lease: Lease) -> None:
        drawn = round(MEDIAN_TOKENS * self._lengths.lognormvariate(0, self._spread))
        length, done, spans = max(1, min(MOST_TOKENS, drawn)), 0, list[VersionSpan]()
        began = time.monotonic()
        while done < length:
            version = self.version
            await asyncio.sleep(min(5, length - done) * self._token_s)
            now_done = max(done + 1, min(length, int((time.monotonic() - began) / self._token_s)))
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(spans[-1].start, now_done, version)
            else:
                spans.append(VersionSpan(done, now_done, version))
            done = now_done
        self._running -= 1
        await self._broker.leases.submit(lease, _trajectory(lease, length, tuple(spans)))


def _trajectory(lease: Lease, length: int, spans: tuple[VersionSpan, ...]) -> Trajectory:
    return Trajectory(
        tid=lease.tid,
        prompt_tokens=np.asarray(prompt(0, GROUP_SIZE, SHORT_PROMPT).token_ids, np.int32),
        response_tokens=np.zeros(length, np.int32),
        behavior_logprobs=np.zeros(length, np.float32),
        loss_mask=np.ones(length, np.uint8),
        spans=spans,
        rewards={"length": 1.0},
        reward=1.0,
        worker="engine",
        finish_reason="stop",
    )


async def measure(server: EmbeddedServer, run: Pace, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one run."""
    name = f"ahead-{run.max_lag}-{run.ahead}"
    broker, seen, lengths = await open_broker(server.url, name), Seen(), random.Random(0)
    try:
        learner = await Learner.begin(broker, run)
        token_s = options.token_ms / 1000
        engines = [Engine(f"w{e}", broker, token_s, lengths, options.spread) for e in range(ENGINES)]
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(engine.work()) for engine in engines]
            seconds = await _train(learner, engines, seen, options)
            for task in work:
                task.cancel()
    finally:
        await broker.close()
    tokens = sum(count for _, count in seen.token_lags)
    return {
        "max_lag": run.max_lag,
        "ahead": run.max_lag if run.ahead is None else run.ahead,
        "samples_per_s": round((options.steps - FIRST) * BATCH / seconds, 1),
        "lag": round(fmean(seen.lags), 2),
        "lag_max": max(seen.lags),
        "token_lag": round(sum(lag * count for lag, count in seen.token_lags) / tokens, 2),
        "learner_waits": round(seen.waited_s / seconds, 2),
    }


async def _train(learner: Learner, engines: Sequence[Engine], seen: Seen, options: argparse.Namespace) -> float:
    """Take and train all steps, and return the seconds of those that count."""
    step, asked, began = 0, time.monotonic(), time.monotonic()
    async for batch in learner.steps(range(options.steps)):
        if step == FIRST:
            began = time.monotonic()
        if step >= FIRST:
            seen.waited_s += time.monotonic() - max(asked, began)
            for trajectory in (one for group in batch.groups for one in group.trajectories):
                seen.add(trajectory, step)
        await asyncio.sleep(options.train_ms / 1000)
        step, asked = step + 1, time.monotonic()
        for engine in engines:
            engine.version = WeightVersion(1, step)
    return time.monotonic() - began


def main() -> int:
    """Return the exit code."""
    options = _parse()
    found = []
    with fresh_server("off") as server:
        for max_lag, ahead in options.of:
            run = Pace(
                groups=options.steps * BATCH // GROUP_SIZE + 64 * BATCH, max_lag=max_lag, ahead=ahead, prompt_tokens=4
            )
            found.append(uvloop.run(measure(server, run, options)))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(
        json.dumps({"token_ms": options.token_ms, "train_ms": options.train_ms, "spread": options.spread, "of": found})
    )
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ahead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--of", type=_bounds, default=_bounds("0,1,2,3,4,2:1,3:1,3:1.5,4:2,6:2,6:3"), metavar="L[:A],..."
    )
    parser.add_argument("--token-ms", type=float, default=10.0)
    parser.add_argument("--train-ms", type=float, default=150.0)
    parser.add_argument("--spread", type=float, default=1.0)
    options = parser.parse_args()
    if options.steps <= FIRST:
        parser.error(f"--steps: the first {FIRST} do not count")
    return options


def _bounds(text: str) -> list[tuple[int, float | None]]:
    pairs = [part.partition(":") for part in text.split(",")]
    return [(int(bound), float(ahead) if ahead else None) for bound, _, ahead in pairs]


if __name__ == "__main__":
    sys.exit(main())
