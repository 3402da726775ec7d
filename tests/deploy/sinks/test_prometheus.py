"""The learner's endpoint for Prometheus has the figures of the run's record, and training waits for no scrape."""

import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from msgspec.structs import replace

from headway.algorithms import metrics as of_loss
from headway.broker.errors import ConfigError
from headway.broker.schema import WeightVersion
from headway.broker.schema.status import QueueAges, QueueDepths, Silence, Tallies, VersionGroups
from headway.broker.schema.step_metrics import LagFigures, StepMetrics
from headway.deploy.observe.prometheus.learner_metrics import (
    AGES,
    BY_LAG,
    LAG_BUCKETS,
    LAST_STEP,
    POOL_STATES,
    QUEUES,
    SUMS,
)
from headway.deploy.observe.sinks import open_sinks
from headway.deploy.observe.sinks.base import Sinks
from headway.deploy.observe.sinks.prometheus import PrometheusSink
from headway.deploy.recipe.recipe import PrometheusOptions, SinkConfig
from headway.deploy.run.events import Event, HeartbeatEvent
from headway.learner.experience.length_drift import drift_of
from tests.deploy.runs import (
    AGENT_FIGURES,
    POOL,
    SCORER,
    SCORING,
    evaluation,
    open_record,
    run_status,
    sink_run,
    stage_event,
    step_event,
    step_metrics,
)

from .scrapes import figure, scrape

HISTOGRAMS = {
    "lag_histogram": "headway_learner_trajectory_lag_steps",
    "token_lag_histogram": "headway_learner_token_lag_steps",
}
"""The histograms, by the field of a step's line."""


@contextmanager
def endpoint(*events: Event, directory: Path = Path()) -> Iterator[PrometheusSink]:
    """Yield the sink of a run that had these events."""
    with closing(PrometheusSink(PrometheusOptions(port=0))) as sink:
        sink.open(sink_run(directory, "0123456789abcdef"))
        for event in events:
            sink.write(event)
        yield sink


def varied(step: int) -> Event:
    """Return a step that differs from the others in every figure."""
    event, factor = step_event(step, reward=step / 8), 1 + step / 7
    changed: dict[str, Any] = {
        name: type(value)(value * factor)
        for name, value in msgspec.structs.asdict(event.metrics).items()
        if isinstance(value, int | float) and name not in ("step", "incarnation", "total_steps")
    }
    metrics = replace(event.metrics, **changed, lag_histogram={step: 10, 5: 7, 700: 1}, algorithm={"ess": factor / 9})
    metrics = replace(metrics, token_lag_histogram={step: 100, 900: 3})
    return replace(event, metrics=metrics)


def test_every_figure_of_the_record_is_at_the_endpoint(tmp_path: Path) -> None:
    events = [varied(step) for step in range(5)]
    record = open_record(tmp_path)
    for event in events:
        record.write(event)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    with endpoint(*events) as sink:
        found = scrape(sink.url)
    for family in LAST_STEP:
        assert figure(found, family.name) == lines[-1][family.field], family.name
    for family in SUMS:
        for label, name in (family.by_label or {"": family.field}).items():
            labels = {family.label: label} if family.label else {}
            told = sum(line.get(name, 1 if name == "steps" else 0) for line in lines)
            assert figure(found, family.name, **labels) == told, family.name
    for name, value in lines[-1]["algorithm"].items():
        assert figure(found, "headway_learner_algorithm", figure=name) == value
    for name, value in lines[-1]["reward"].items():
        assert figure(found, "headway_learner_reward", figure=name) == value
    for name, _, field in BY_LAG:
        for lag, figures in lines[-1]["by_lag"].items():
            assert figure(found, name, lag=lag) == figures.get(field), name
    for counted, histogram in HISTOGRAMS.items():
        lags = [int(lag) for line in lines for lag, count in line[counted].items() for _ in range(count)]
        assert figure(found, f"{histogram}_count") == len(lags)
        assert figure(found, f"{histogram}_sum") == sum(lags)
        for bound in ("0.0", "2.0", "6.0", "512.0", "1000.0", "+Inf"):
            assert figure(found, f"{histogram}_bucket", le=bound) == sum(lag <= float(bound) for lag in lags)


def test_the_endpoint_shows_the_last_step_of_a_stage() -> None:
    with endpoint(stage_event(1), stage_event(2, pass_rate=0.5, metrics={"held_out/loss": 0.25, "norm": None})) as sink:
        found = scrape(sink.url)
    assert figure(found, "headway_stage_steps") == 2
    names = ("loss", "pass_rate", "held_out/loss", "norm")
    assert [figure(found, "headway_stage_figure", figure=name) for name in names] == [0.5, 0.5, 0.25, None]


def test_the_endpoint_shows_the_agents_of_the_last_step() -> None:
    event = step_event(0)
    with endpoint(event) as sink:
        assert not [name for name, _ in scrape(sink.url) if "agent" in name]
    with endpoint(replace(event, metrics=replace(event.metrics, agent=AGENT_FIGURES))) as sink:
        found = scrape(sink.url)
    shown = {name: figure(found, "headway_learner_agent", figure=name) for name in ("turns_mean", "failures/raised")}
    assert shown == {"turns_mean": 3.5, "failures/raised": 2.0}


def test_no_figure_of_a_step_or_of_the_queues_is_left_out() -> None:
    shown = {name for family in (*LAST_STEP, *SUMS) for name in (family.by_label or {"": family.field}).values()}
    counted_here = {"steps", "skipped_updates"}
    assert shown - counted_here == set(StepMetrics.__struct_fields__) - {
        *HISTOGRAMS,
        "response_length_histogram",
        "by_lag",
        "algorithm",
        "agent",
        "reward",
        "reward_samples",
    }
    assert {field for _, _, field in BY_LAG} == set(LagFigures.__struct_fields__) - {"trajectories", "tokens"}
    assert of_loss.LAG_BUCKETS == LAG_BUCKETS
    queues = {name for family in QUEUES for name in (family.by_label or {"": family.field}).values()}
    assert queues == set(QueueDepths.__struct_fields__)
    assert {family.field for family in AGES} == set(QueueAges.__struct_fields__)


def test_the_endpoint_shows_the_pool_and_the_queues_of_the_last_look() -> None:
    tallies = Tallies(
        dispatched_by_prompt_length={8: 500, 16: 700},
        trained_by_prompt_length={8: 400},
        dispatched_by_lag={0: 30, 2: 18},
        resumed_by_lag={1: 640},
        finished_by_response_length={16: 90, 32: 10},
        cut_by_response_length={8: 3},
    )
    held = (
        VersionGroups(8, generating=1, ready=0, dropped=0),
        VersionGroups(7, generating=5, ready=0, dropped=0, ready_tokens=70),
        VersionGroups(4, generating=2, ready=3, dropped=1, ready_samples=12, ready_tokens=500),
    )
    status = replace(
        run_status(),
        tallies=tallies,
        announced=WeightVersion(1, 7),
        versions=held,
        pools=(POOL,),
        scorers=(SCORER,),
        scoring=(SCORING,),
        quarantined=("evil",),
        silences={"w0": Silence(0.1, is_late=False), "w1": Silence(9.0, is_late=True)},
    )
    heartbeat = HeartbeatEvent.of(status, step_metrics(3))
    gone = replace(heartbeat, workers=heartbeat.workers[:1])
    with endpoint(evaluation(1, 0, 0.25), step_event(0), heartbeat) as sink:
        found = scrape(sink.url)
        sink.write(gone)
        later = scrape(sink.url)
    queues = msgspec.structs.asdict(status.queues)
    for family in QUEUES:
        for label, name in (family.by_label or {"": family.field}).items():
            labels = {family.label: label} if family.label else {}
            assert figure(found, family.name, **labels) == queues[name], family.name
    for family in AGES:
        assert figure(found, family.name) == getattr(status.ages, family.field), family.name
    assert figure(found, "headway_broker_begun_groups_total", prompt_tokens="16") == 700
    assert figure(found, "headway_broker_trained_groups_total", prompt_tokens="8") == 400
    assert figure(found, "headway_broker_leases_total", lag="2") == 18
    assert figure(found, "headway_broker_resumed_lag_tokens_total", lag="1") == 640
    assert figure(found, "headway_broker_finished_samples_total", response_tokens="32") == 10
    assert figure(found, "headway_broker_cut_samples_total", response_tokens="8") == 3
    assert figure(found, "headway_learner_trained_samples_total", response_tokens="16") == 200
    assert figure(found, "headway_broker_lag_generating_groups", lag="0") == 6, "of the offered version, too"
    assert figure(found, "headway_broker_lag_generating_groups", lag="3") == 2
    assert figure(found, "headway_broker_lag_ready_groups", lag="3") == 3
    assert figure(found, "headway_broker_lag_ready_samples", lag="3") == 12
    assert [figure(found, "headway_broker_lag_ready_tokens", lag=lag) for lag in "03"] == [70, 500]
    assert figure(found, "headway_pool_workers", state="generating") == 2
    assert figure(later, "headway_pool_workers", state="generating") == 1
    assert figure(later, "headway_pool_workers", state="paused") == 0
    assert figure(found, "headway_pool_weight_step", worker="node-worker-0-ab12") == 37
    assert figure(found, "headway_pool_weight_step", worker="node-worker-1-cd34") is None, "it has no version yet"
    assert figure(found, "headway_pool_worker_tokens_per_second", worker="node-worker-0-ab12") == 2500
    assert figure(found, "headway_pool_late_workers") == figure(found, "headway_pool_quarantined_workers") == 1
    for state in POOL_STATES:
        assert figure(found, "headway_pool_processes", pool="gpu", state=state) == getattr(POOL, state)
    of = {"scorer": "quality"}
    for state in ("waiting", "leased"):
        assert figure(found, "headway_scorer_requests", state=state, **of) == getattr(SCORING, state)
    for outcome in ("answered", "failed"):
        ended = figure(found, "headway_scorer_requests_ended_total", outcome=outcome, **of)
        assert ended == getattr(SCORING, outcome)
    assert figure(found, "headway_scorer_processes", state="ready", **of) == 1
    assert figure(found, "headway_scorer_oldest_request_seconds", **of) == SCORING.oldest_s
    assert figure(found, "headway_scorer_expired_leases_total", **of) == SCORING.expired_leases
    assert figure(found, "headway_scorer_stored_bytes", **of) == SCORING.bytes
    assert figure(found, "headway_broker_length_drift_ratio") == drift_of(tallies, status.queues) > 0.5
    assert figure(found, "headway_learner_pass_rate") == 0.25
    assert figure(found, "headway_run_info", run="arithmetic", identity="0123456789abcdef") == 1
    assert (figure(found, "process_resident_memory_bytes") or 0) > 0


def test_counters_are_there_before_the_first_step_and_gauges_are_not() -> None:
    with endpoint() as sink:
        found = scrape(sink.url)
    assert figure(found, "headway_learner_steps_total") == 0
    assert figure(found, "headway_learner_step") is None


def test_a_step_without_a_finite_gradient_is_counted_and_shows_no_norm() -> None:
    event = step_event(1)
    skipped = replace(event, metrics=replace(event.metrics, loss=None, grad_norm=None))
    with endpoint(step_event(0), skipped) as sink:
        found = scrape(sink.url)
    assert figure(found, "headway_learner_skipped_updates_total") == 1
    assert figure(found, "headway_learner_gradient_norm") is None


def test_a_second_learner_on_the_same_port_is_told_what_to_do(tmp_path: Path) -> None:
    with endpoint() as sink:
        port = urlsplit(sink.url).port
        configs = (SinkConfig(kind="jsonl"), SinkConfig(kind="prometheus", options={"port": port}))
        words = rf"No metrics can be served at 127\.0\.0\.1, port {port}: Address already in use.*metrics\[1\]\.options"
        with pytest.raises(ConfigError, match=words):
            open_sinks(configs, sink_run(tmp_path))


def test_a_scraper_that_does_not_read_holds_up_neither_training_nor_others(tmp_path: Path) -> None:
    sink = PrometheusSink(PrometheusOptions(port=0))
    address = urlsplit(sink.url)
    with (
        socket.create_connection((address.hostname, address.port)) as silent,
        socket.create_connection((address.hostname, address.port)) as deaf,
        Sinks({"record": open_record(tmp_path), "prometheus": sink}, sink_run(tmp_path)) as sinks,
    ):
        silent.sendall(b"GET /metrics HTTP/1.1\r\n")  # it never sends the rest of its request
        deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")  # it never reads the answer
        for step in range(50):
            sinks.write(step_event(step))
        while figure(scrape(sink.url), "headway_learner_step") != 49:
            pass
    assert sinks.lost == {"prometheus": 0}


def test_a_closed_endpoint_frees_its_port() -> None:
    with endpoint() as sink:
        port = urlsplit(sink.url).port or 0
    with closing(PrometheusSink(PrometheusOptions(port=port))) as again:
        assert again.url == sink.url
