"""An endpoint for Prometheus with the run's figures."""

import logging

from headway.deploy.observe.prometheus.exposition import MetricsEndpoint
from headway.deploy.observe.prometheus.learner_metrics import RunCollector
from headway.deploy.recipe.recipe import PrometheusOptions
from headway.deploy.run.events import Event

from .base import SinkRun

log = logging.getLogger(__name__)


class PrometheusSink:
    """Serves the figures of this learner from when it is made until it is closed.

    Counters begin at 0 in every process, as Prometheus expects: a resumed learner counts the steps that it trains.
    """

    is_record = False
    wants_heartbeats = True

    def __init__(self, options: PrometheusOptions, where: str = "metrics[1]") -> None:
        """Bind the port at once, so that a learner whose port is taken ends before it trains. `where`: the sink's key.
        Raises ConfigError."""
        self._run = RunCollector()
        remedy = f"Give this learner a port of its own: '{where}.options.port=0' takes any free one, and logs it."
        self._endpoint = MetricsEndpoint(self._run, host=options.host, port=options.port, remedy=remedy)

    @property
    def url(self) -> str:
        return self._endpoint.url

    def open(self, run: SinkRun) -> None:
        """Name the run, and log where its metrics are."""
        self._run.begin(run.name, run.identity)
        log.info("metrics for Prometheus: %s", self.url)

    def write(self, event: Event) -> None:
        """Take one event in. It never blocks."""
        self._run.note(event)

    def close(self) -> None:
        """Free the port."""
        self._endpoint.close()
