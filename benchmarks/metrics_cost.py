"""Processor time that metrics cost a learner and a worker: of one step's event in the sinks, and of one scrape.

    python -m benchmarks.metrics_cost [--steps 2000] [--scrapes 200] [--workers 100]

The record and the Prometheus sink are given steps and looks at so many workers, with all figures by lag, by length, by
version and by scorer; then the learner's and a worker's figures are rendered as for a scrape. A look is asked of a real
server that holds the last 512 steps. All of it is timed by the process or thread that does it, as a difference between
two runs would be lost in their noise. The last line is one JSON object, with the share of a processor at one step a
second, one look every 10 s and one scrape every 15 s.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from headway.broker.client.broker import BlockingBroker
from headway.broker.client.submissions import SubmitOutcome
from headway.broker.schema import WeightVersion
from headway.broker.schema.status import (
    PoolInfo,
    QueueDepths,
    ScorerInfo,
    ScoringQueue,
    Tallies,
    VersionGroups,
    WorkerInfo,
)
from headway.broker.server.embedded import EmbeddedServer
from headway.deploy.observe.prometheus.learner_metrics import RunCollector
from headway.deploy.observe.prometheus.worker_metrics import WorkerCollector
from headway.deploy.observe.sinks.base import SinkRun
from headway.deploy.observe.sinks.jsonl import JsonlSink
from headway.deploy.run.events import HeartbeatEvent, StepEvent

from .page_load.run import ALIVE_S, GROUPS, RUN, SAMPLES, begin, sample_step, sample_worker

LOOK_S, SCRAPE_S = 10.0, 15.0
LOOKS = 50
_COUNTS = {1 << power: 1000 for power in range(17)}
POOLS = tuple(PoolInfo(pool=f"pool-{n}", host="node", pid=n, running=25, wanted=25) for n in range(4))
SCORERS = tuple(
    ScorerInfo(process=f"s{n}", scorer=f"quality-{n % 2}", kind="model", host="node", pid=n, state="ready", device="0")
    for n in range(8)
)
SCORING = tuple(
    ScoringQueue(
        scorer=f"quality-{n}", waiting=9, leased=9, oldest_s=1.0, answered=9, failed=0, expired_leases=0, bytes=1
    )
    for n in range(2)
)


class Worker:
    """A worker, as far as metrics read it."""

    outcomes = dict.fromkeys(SubmitOutcome, 0)
    resumed_tokens = 0
    unscored = 0

    def info(self) -> WorkerInfo:
        return sample_worker(0, 100, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--scrapes", type=int, default=200)
    parser.add_argument("--workers", type=int, default=100)
    options = parser.parse_args()
    collector = RunCollector()
    workers = tuple(sample_worker(index, options.steps, 1) for index in range(options.workers))
    queues = QueueDepths(**dict.fromkeys(QueueDepths.__struct_fields__, 1))
    tids = tuple(f"0000-{group:08d}:0:{sample}" for group in range(GROUPS) for sample in range(SAMPLES))
    events = [StepEvent(metrics=sample_step(step, options.steps), tids=tids) for step in range(options.steps)]
    look = HeartbeatEvent(
        incarnation=1,
        step=0,
        time_s=0.0,
        workers=workers,
        queues=queues,
        tallies=Tallies(**dict.fromkeys(Tallies.__struct_fields__, _COUNTS)),
        announced=WeightVersion(1, options.steps),
        versions=tuple(VersionGroups(options.steps - lag, 4, 4, 4, 32, 4000) for lag in range(32)),
        pools=POOLS,
        scorers=SCORERS,
        scoring=SCORING,
    )
    with tempfile.TemporaryDirectory() as directory:
        record = JsonlSink()
        record.open(SinkRun(name="run", identity="0" * 16, directory=Path(directory)))
        costs = {"record_step_ms": milliseconds([partial(record.write, event) for event in events])}
    costs |= {
        "prometheus_step_ms": milliseconds([partial(collector.note, event) for event in events]),
        "prometheus_look_ms": milliseconds([lambda: collector.note(replace(look))] * options.scrapes),
        "server_look_ms": asked(options.workers, options.steps),
        "learner_scrape_ms": scraped(collector, options.scrapes),
        "worker_scrape_ms": scraped(WorkerCollector(Worker()), options.scrapes),
    }
    learner_ms = costs["record_step_ms"] + costs["prometheus_step_ms"]
    learner_ms += (costs["prometheus_look_ms"] + costs["server_look_ms"]) / LOOK_S + costs[
        "learner_scrape_ms"
    ] / SCRAPE_S
    shares = {"learner_share": learner_ms / 1000, "worker_share": costs["worker_scrape_ms"] / SCRAPE_S / 1000}
    print(
        json.dumps({"workers": options.workers, **{name: round(value, 6) for name, value in (costs | shares).items()}})
    )


def asked(workers: int, steps: int) -> float:
    """Return the milliseconds that a look at a run on a server of its own costs the process that asks."""
    with tempfile.TemporaryDirectory() as directory, EmbeddedServer(Path(directory)) as server:
        broker = BlockingBroker(server.url, RUN)
        broker.call(begin(broker, steps))
        for index in range(workers):
            broker.call(broker.broker.status.heartbeat(sample_worker(index, steps, 1), ALIVE_S))
        before = time.process_time()
        for _ in range(LOOKS):
            broker.call(broker.broker.status.snapshot())
        spent = time.process_time() - before
        broker.close()
    return 1000 * spent / LOOKS


def scraped(collector: Collector, times: int) -> float:
    """Return the milliseconds of rendering all metrics of the collector once."""
    registry = CollectorRegistry()
    registry.register(collector)
    return milliseconds([lambda: generate_latest(registry)] * times)


def milliseconds(calls: list[Callable[[], object]]) -> float:
    """Return the mean processor time of this thread for a call."""
    before = time.thread_time()
    for call in calls:
        call()
    return 1000 * (time.thread_time() - before) / len(calls)


if __name__ == "__main__":
    main()
