"""A Prometheus server of Debian's package, which scrapes the endpoints of a run twice a second."""

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError

import yaml

from tests.broker.topologies import free_port, wait_until

IS_INSTALLED = shutil.which("prometheus") is not None
SCRAPES = 4


class Prometheus:
    """Answers queries."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, expression: str) -> list[Any]:
        """Return the series of an instant query. Raises HTTPError for one that Prometheus refuses."""
        with urllib.request.urlopen(
            f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        ) as said:
            answer = json.load(said)
        assert answer["status"] == "success", answer
        found: list[Any] = answer["data"]["result"]
        return found

    def has_scraped(self, targets: int) -> bool:
        """Whether every target was scraped some times."""
        with suppress(URLError):
            counts = [float(one["value"][1]) for one in self.ask("count_over_time(up[1m])")]
            return len(counts) == targets and min(counts) >= SCRAPES
        return False


@contextmanager
def prometheus(directory: Path, ports: Sequence[int]) -> Iterator[Prometheus]:
    """Yield a server once it has scraped these ports some times."""
    directory.mkdir()
    targets = [f"127.0.0.1:{port}" for port in ports]
    job = {"job_name": "headway", "scrape_interval": "500ms", "static_configs": [{"targets": targets}]}
    (directory / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    with (directory / "log").open("wb") as log:
        started = subprocess.Popen(
            ["prometheus", *options, f"--web.listen-address={address}"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        server = Prometheus(f"http://{address}")
        wait_until(lambda: server.has_scraped(len(ports)))
        yield server
    finally:
        started.kill()
        started.wait()


def without_variables(expression: str) -> str:
    """Return a query of the dashboard as Grafana sends it, with all values chosen and a short interval."""
    return re.sub(r"\$\w+", ".*", expression.replace("$__rate_interval", "1m"))
