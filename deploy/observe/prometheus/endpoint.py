"""The HTTP endpoint of one process, which Prometheus scrapes."""

import errno

from prometheus_client import CollectorRegistry, MetricsHandler, ProcessCollector
from prometheus_client.registry import Collector

from headway.broker.errors import ConfigError
from headway.deploy.observe.bounded_server import TIMEOUT_S, BoundedServer


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
