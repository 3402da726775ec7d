"""A worker's endpoint for Prometheus has the figures of its own reports; workers of a machine share a port range."""

import asyncio
import socket
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace

from headway.broker.client.broker import Broker
from headway.broker.client.submissions import SubmitOutcome
from headway.broker.errors import ConfigError
from headway.broker.schema import WeightVersion
from headway.broker.schema.status import WorkerInfo
from headway.deploy.observe.prometheus.exposition import STATES, MetricsEndpoint
from headway.deploy.observe.prometheus.worker_metrics import WorkerCollector, serve_worker_metrics
from headway.rollout_workers.config import WorkersConfig
from tests.broker.topologies import free_port
from tests.rollout_workers.loop import Deliveries, Learner, make_engine, make_worker, running, until

from .runs import AGENT, worker
from .sinks.scrapes import figure, scrape


class Stub:
    """Stands for a worker that has generated, resumed, submitted and swapped."""

    def __init__(self, name: str = "node-worker-0-ab12") -> None:
        self.outcomes = {SubmitOutcome.ACCEPTED: 5, SubmitOutcome.DUPLICATE: 1, SubmitOutcome.FENCED: 2}
        self.resumed_tokens = 77
        self.unscored = 3
        self.said = worker(name, WeightVersion(2, 36))

    def info(self) -> WorkerInfo:
        return self.said


def test_the_endpoint_shows_what_the_worker_says_now() -> None:
    stub = Stub()
    with closing(MetricsEndpoint(WorkerCollector(stub), host="127.0.0.1", port=0)) as endpoint:
        found = scrape(endpoint.url)
        stub.said = replace(stub.said, version=None, state="paused", active=0)
        later = scrape(endpoint.url)
    expected = {
        "leases": 60,
        "capacity_leases": 64,
        "tokens_per_second": 2500.0,
        "generated_tokens_total": 100_000,
        "resumed_tokens_total": 77,
        "unscored_samples_total": 3,
        "weight_swaps_total": 36,
        "broker_calls_total": 50,
        "weight_swap_seconds_total": 12.5,
        "paused_seconds_total": 1.5,
        "broker_call_seconds_total": 0.25,
        "weight_step": 36,
        "weight_incarnation": 2,
    }
    assert {name: figure(found, f"headway_worker_{name}") for name in expected} == expected
    submitted = {one: figure(found, "headway_worker_submitted_samples_total", outcome=one) for one in SubmitOutcome}
    assert submitted == stub.outcomes
    assert figure(found, "headway_worker_info", worker="node-worker-0-ab12", host="node", engine="embedded") == 1
    assert [state for state in STATES if figure(found, "headway_worker_state", state=state)] == ["generating"]
    assert [state for state in STATES if figure(later, "headway_worker_state", state=state)] == ["paused"]
    assert (figure(later, "headway_worker_leases"), figure(later, "headway_worker_weight_step")) == (0, None)
    assert (figure(found, "process_resident_memory_bytes") or 0) > 0


def test_the_endpoint_shows_the_episodes_of_agents_where_there_are_some() -> None:
    stub = Stub()
    with closing(MetricsEndpoint(WorkerCollector(stub), host="127.0.0.1", port=0)) as endpoint:
        without = scrape(endpoint.url)
        stub.said = replace(stub.said, agent=AGENT)
        found = scrape(endpoint.url)
    assert not [name for name, _ in without if "agent" in name]
    expected = {
        "episodes": 120,
        "running_requests": 16,
        "waiting_episodes": 96,
        "finished_episodes_total": 1000,
        "finished_turns_total": 3500,
        "turns_total": 4000,
        "tool_seconds_total": 1000.0,
        "read_tokens_total": 30_000,
        "sampled_tokens_total": 70_000,
        "forks_total": 40,
        "reread_tokens_total": 500,
        "unseen_turns_total": 12,
        "restarted_episodes_total": 8,
    }
    assert {name: figure(found, f"headway_worker_agent_{name}") for name in expected} == expected
    outcomes = {"resumed": 3, "repeated": 2, "lost": 6, "over_budget": 5, "turn_timeout": 1}
    assert {one: figure(found, "headway_worker_agent_calls_total", outcome=one) for one in outcomes} == outcomes
    for what, counts in (("failed_episodes", AGENT.failures), ("refused_calls", AGENT.refused_calls)):
        assert {one: figure(found, f"headway_worker_agent_{what}_total", reason=one) for one in counts} == counts


def test_workers_of_one_machine_take_one_port_after_the_other() -> None:
    config = WorkersConfig(metrics_port=free_port())
    with ExitStack() as stack:
        endpoints = [stack.enter_context(serve_worker_metrics(Stub(f"w{number}"), config)) for number in range(3)]
        ports = [endpoint.port for endpoint in endpoints if endpoint is not None]
        assert len(ports) == 3
        assert ports == sorted(set(ports))
        assert ports[0] >= config.metrics_port
        for number, port in enumerate(ports):
            found = scrape(f"http://127.0.0.1:{port}/metrics")
            assert figure(found, "headway_worker_info", worker=f"w{number}", host="node", engine="embedded") == 1


def test_no_port_no_endpoint() -> None:
    with serve_worker_metrics(Stub(), WorkersConfig()) as endpoint:
        assert endpoint is None


def test_a_worker_that_finds_no_free_port_says_which_key_to_change() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use"):
            MetricsEndpoint(WorkerCollector(Stub()), host="127.0.0.1", port=port)
    config = WorkersConfig(metrics_port=free_port(), metrics_host="192.0.2.1")  # an address that no machine has
    with (
        pytest.raises(ConfigError, match=r"192\.0\.2\.1, .*Choose another workers\.metrics_port"),
        serve_worker_metrics(Stub(), config),
    ):
        pass


async def test_a_working_worker_is_scraped_while_it_generates(broker: Broker, tmp_path: Path) -> None:
    learner = await Learner.start(broker, groups=4)
    deliveries = Deliveries()
    real = make_worker(broker, make_engine(tmp_path), deliveries)
    config = WorkersConfig(metrics_port=free_port())
    with serve_worker_metrics(real, config) as endpoint:
        assert endpoint is not None
        assert urlsplit(endpoint.url).hostname == "127.0.0.1"
        before = await asyncio.to_thread(scrape, endpoint.url)
        await learner.publish(0, deliveries)
        async with running(real):
            await until(lambda: real.info().submitted > 0)
            during = await asyncio.to_thread(scrape, endpoint.url)
        after, info = await asyncio.to_thread(scrape, endpoint.url), real.info()
    assert figure(before, "headway_worker_weight_step") is None
    assert figure(during, "headway_worker_weight_step") == 0
    assert (figure(during, "headway_worker_generated_tokens_total") or 0) > 0
    assert figure(after, "headway_worker_generated_tokens_total") == info.generated_tokens
    assert figure(after, "headway_worker_submitted_samples_total", outcome="accepted") == info.submitted
