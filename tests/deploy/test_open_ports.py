"""Clients that stay silent cost the servers of metrics and pages no thread and no file beyond a bound."""

import os
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from unittest.mock import Mock

import pytest

from headway.deploy.observe.bounded_server import MOST
from headway.deploy.observe.page.live_page import PageServer
from headway.deploy.observe.sinks.prometheus import PrometheusSink
from headway.deploy.recipe.recipe import PrometheusOptions
from headway.deploy.roles.autoscaler import PooledAutoscaling, serving
from tests.weightsync.test_transports import until

IDLE = 150
HOST = "127.0.0.1"


@contextmanager
def metrics() -> Iterator[str]:
    with closing(PrometheusSink(PrometheusOptions(port=0))) as sink:
        yield sink._endpoint.url


@contextmanager
def page() -> Iterator[str]:
    watcher: Any = Mock(live={"seen": 1})
    with PageServer(watcher, HOST, 0) as server:
        server.start()
        yield f"{server.url}live.json"
        server.shutdown()


@contextmanager
def wanted() -> Iterator[str]:
    together: Any = Mock(spec=PooledAutoscaling, now={"wanted": 1})
    with serving(together, HOST, 0) as url:
        yield url


@pytest.mark.parametrize("serving", [metrics, page, wanted])
@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\nHo"])
def test_idle_clients_keep_nobody_out_and_cost_no_more_than_so_many_threads(
    serving: Callable[[], Any], says: bytes
) -> None:
    with ExitStack() as open_ones:
        url = open_ones.enter_context(serving())
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        port = int(url.split(":")[2].partition("/")[0])
        for _ in range(IDLE):
            client = open_ones.enter_context(socket.create_connection((HOST, port), timeout=240))
            client.sendall(says)
        with urllib.request.urlopen(url, timeout=240) as answer:
            assert answer.status == 200
        until(lambda: threading.active_count() <= threads + MOST)
        until(lambda: len(os.listdir("/proc/self/fd")) <= files + IDLE + MOST)
