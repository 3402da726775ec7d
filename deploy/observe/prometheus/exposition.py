"""Metric families (name, help, and the figures that each shows), and the HTTP endpoint that Prometheus scrapes."""

import errno
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args, get_type_hints

from prometheus_client import CollectorRegistry, MetricsHandler, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.broker.errors import ConfigError
from headway.broker.schema.status import WorkerInfo
from headway.deploy.observe.bounded_server import TIMEOUT_S, BoundedServer

STATES: tuple[str, ...] = get_args(get_type_hints(WorkerInfo)["state"])
"""The states of a worker."""
Figures = Mapping[str, float | None]
"""Figures by the name of their field; None: there is no number now."""


@dataclass(frozen=True)
class Family:
    """One metric that shows one field, or several by the value of a label."""

    name: str
    help: str
    field: str = ""
    """The field of a metric without a label."""
    label: str = ""
    by_label: Mapping[str, str] | None = None
    """The field for each value of the label."""

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")

    def of(self, figures: Figures) -> Metric:
        """Return the metric with these figures, without samples for those that are None."""
        fields = self.by_label or {"": self.field}
        return metric(self.name, self.help, {value: figures[name] for value, name in fields.items()}, self.label)


def metric(name: str, text: str, values: Mapping[str, float | None], label: str = "") -> Metric:
    """Return a counter if `name` ends in `_total`, else a gauge, with a sample for each value of `label`."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    made = kind(name, text, labels=[label] if label else [])
    for of, value in values.items():
        if value is not None:
            made.add_metric([of] if label else [], value)
    return made


def labelled_metric(name: str, text: str, labels: tuple[str, str], values: Mapping[tuple[str, str], float]) -> Metric:
    """Return the same with two labels, whose values are the keys of `values`."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    made = kind(name, text, labels=labels)
    for of, value in values.items():
        made.add_metric(of, value)
    return made


def family_metrics(families: Iterable[Family], figures: Figures) -> Iterator[Metric]:
    """Yield each of the families with its figures."""
    return (family.of(figures) for family in families)


class MetricsEndpoint:
    """Serves a collector's metrics, and the process's own memory and CPU time, until it is closed.

    Every scrape has a thread of its own, so that a slow client holds no other up.
    """

    def __init__(self, collector: Collector, *, host: str, port: int, tries: int = 1, remedy: str = "") -> None:
        """Bind the first free one of `tries` ports from `port` on; 0: any free port. Raises ConfigError, with the
        remedy, if there is none."""
        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        answer = type("Answer", (MetricsHandler,), {"registry": registry, "timeout": TIMEOUT_S})
        for one in range(port, port + tries):
            try:
                self._server = BoundedServer(host, one, answer).start()
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or one == port + tries - 1:
                    ports = f"port {port}" if tries == 1 else f"ports {port} to {port + tries - 1}"
                    why = f"No metrics can be served at {host}, {ports}: {error.strerror or error}."
                    raise ConfigError(f"{why} {remedy}".rstrip()) from error
        self.host, self.port = host, self._server.server_port

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Free the port. Scrapes that are under way end by themselves."""
        self._server.stop()
