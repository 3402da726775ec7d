"""A worker's metrics: what it has generated, submitted and swapped, and what it does now."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import msgspec
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.broker.client.submissions import SubmitOutcome
from headway.broker.schema.status import AgentInfo, WorkerInfo
from headway.rollout_workers.config import WorkersConfig

from .exposition import STATES, Family, MetricsEndpoint, family_metrics, metric

PORTS = 1024
"""Ports among which a worker looks for a free one: one for each worker that a supervisor may start."""
FIGURES = (
    Family("headway_worker_leases", "Samples that the worker holds a lease of.", "active"),
    Family("headway_worker_capacity_leases", "Samples that its engine can batch.", "capacity"),
    Family("headway_worker_tokens_per_second", "Tokens that it generates, over the last seconds.", "tokens_per_s"),
    Family("headway_worker_generated_tokens_total", "Tokens that it has generated.", "generated_tokens"),
    Family("headway_worker_resumed_tokens_total", "Tokens of others after which it continued.", "resumed_tokens"),
    Family("headway_worker_unscored_samples_total", "Samples that no reward function could score.", "unscored"),
    Family("headway_worker_weight_swaps_total", "Weight versions that it has swapped in.", "swaps"),
    Family("headway_worker_broker_calls_total", "Calls to the broker that were answered.", "broker_calls"),
    Family("headway_worker_broker_call_seconds_total", "Time until they were answered, summed up.", "broker_s"),
    Family("headway_worker_weight_swap_seconds_total", "Time of its swaps, with their checks.", "swap_s"),
    Family("headway_worker_paused_seconds_total", "Time in which it had no whole version.", "paused_s"),
    Family("headway_worker_weight_step", "Step of the weights that its engine holds.", "weight_step"),
    Family("headway_worker_weight_incarnation", "Incarnation of the learner that made them.", "weight_incarnation"),
    Family(
        "headway_worker_submitted_samples_total",
        "Samples that it has submitted, by the broker's answer.",
        label="outcome",
        by_label={outcome.value: outcome.value for outcome in SubmitOutcome},
    ),
)

AGENT = (
    Family("headway_worker_agent_episodes", "Agents' episodes that are open.", "episodes"),
    Family("headway_worker_agent_running_requests", "Calls of the model that are being answered.", "running_requests"),
    Family("headway_worker_agent_waiting_episodes", "Open episodes that wait for their tools.", "waiting_for_tools"),
    Family("headway_worker_agent_finished_episodes_total", "Episodes played to their end.", "finished"),
    Family("headway_worker_agent_finished_turns_total", "Turns of finished episodes.", "finished_turns"),
    Family("headway_worker_agent_turns_total", "Turns sampled, of episodes that have left the worker.", "turns"),
    Family("headway_worker_agent_tool_seconds_total", "Time in which these episodes asked nothing.", "tool_s"),
    Family("headway_worker_agent_read_tokens_total", "Tokens that they read after their prompts.", "read_tokens"),
    Family("headway_worker_agent_sampled_tokens_total", "Tokens that they sampled.", "sampled_tokens"),
    Family("headway_worker_agent_forks_total", "Turns that do not go on from the tokens of an earlier one.", "forks"),
    Family("headway_worker_agent_reread_tokens_total", "Tokens that forks read anew.", "reread_tokens"),
    Family("headway_worker_agent_unseen_turns_total", "Turns that their agent did not get.", "unseen_turns"),
    Family("headway_worker_agent_restarted_episodes_total", "Episodes that began anew.", "restarted"),
    Family(
        "headway_worker_agent_calls_total",
        "Calls that were answered from the record or lost, without a turn or token left, or over agent.turn_s.",
        label="outcome",
        by_label={
            "resumed": "resumed_calls",
            "repeated": "repeated_calls",
            "lost": "lost_calls",
            "over_budget": "over_budget",
            "turn_timeout": "turn_timeouts",
        },
    ),
)
"""Of `WorkerInfo.agent`."""


class WorkerCounters(Protocol):
    """The part of a `rollout_workers.worker.Worker` that is read from another thread than its own."""

    @property
    def outcomes(self) -> dict[SubmitOutcome, int]: ...
    @property
    def resumed_tokens(self) -> int: ...
    @property
    def unscored(self) -> int: ...
    def info(self) -> WorkerInfo: ...


class WorkerCollector(Collector):
    """Reads the worker at every scrape."""

    def __init__(self, worker: WorkerCounters) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        info = self._worker.info()
        said = {"worker": info.worker, "host": info.host, "engine": info.engine}
        yield InfoMetricFamily("headway_worker", "This worker, as `headway status` names it.", said)
        yield from family_metrics(FIGURES, self._figures(info))
        states = {state: float(state == info.state) for state in STATES}
        yield metric("headway_worker_state", "1 for the state that the worker is in, 0 for others.", states, "state")
        if isinstance(info.agent, AgentInfo):
            yield from agent_metrics(info.agent)

    def _figures(self, info: WorkerInfo) -> Mapping[str, float | None]:
        return {
            **msgspec.structs.asdict(info),
            "resumed_tokens": self._worker.resumed_tokens,
            "unscored": self._worker.unscored,
            "weight_step": info.version.step if info.version else None,
            "weight_incarnation": info.version.incarnation if info.version else None,
            **{outcome.value: count for outcome, count in self._worker.outcomes.items()},
        }


def agent_metrics(report: AgentInfo) -> Iterator[Metric]:
    """Yield the metrics of the episodes that agents play."""
    yield from family_metrics(AGENT, msgspec.structs.asdict(report))
    for name, text, counts in (
        ("headway_worker_agent_failed_episodes_total", "Episodes whose agent failed.", report.failures),
        ("headway_worker_agent_refused_calls_total", "Requests of agents that got an error.", report.refused_calls),
    ):
        yield metric(name, text, dict(counts), "reason")


@contextmanager
def serve_worker_metrics(worker: WorkerCounters, config: WorkersConfig) -> Iterator[MetricsEndpoint | None]:
    """Serve the worker's metrics on the first free port from `metrics_port` on; 0: on none. Raises ConfigError if no
    port is free."""
    if not config.metrics_port:
        yield None
        return
    endpoint = MetricsEndpoint(
        WorkerCollector(worker),
        host=config.metrics_host,
        port=config.metrics_port,
        tries=min(PORTS, 65536 - config.metrics_port),
        remedy="Choose another workers.metrics_port or workers.metrics_host; port 0 serves no metrics.",
    )
    try:
        yield endpoint
    finally:
        endpoint.close()
