"""Idle time of engines, as workers report it to the run's server."""

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.peers import engine_idle
from headway.broker import BlockingBroker
from headway.broker.errors import BrokerError
from headway.broker.schema.status import RunStatus
from headway.broker.server.embedded import EmbeddedServer
from headway.deploy.run.directory import endpoint
from tests.broker.scenario import FRESH, rules
from tests.broker.topologies import wait_until
from tests.peers.races import told


def test_idle_time_of_engines_is_of_the_steps_that_count_however_few_reports_there_are() -> None:
    a, b = [(10.0, 4.0), (12.0, 6.0), (16.0, 6.0)], [(13.0, 0.0), (13.5, 0.5)]
    assert engine_idle.idle({"a": a}, 11.0, 13.0) == pytest.approx(0.5)  # busy until 12
    assert engine_idle.idle({"a": a}, 12.5, 13.5) == 1.0  # between two reports
    assert engine_idle.idle({"a": a, "b": b}, 11.0, 20.0) == pytest.approx(0.4)  # of the times that are known
    assert engine_idle.idle({"a": a[:1], "b": b}, 14.0, 20.0) is None
    assert engine_idle.idle({}, 0.0, 1.0) is None


def test_what_workers_report_is_read_from_the_runs_server(server: EmbeddedServer, tmp_path: Path) -> None:
    with engine_idle.reports_of(tmp_path / "tiny") as seen, closing(BlockingBroker(server.url, "tiny")) as client:
        client.call(client.broker.batches.claim(checkpoint=FRESH, rules=rules(2), config=b"", resume=False))
        (tmp_path / "tiny").mkdir()
        with endpoint(tmp_path / "tiny", server.url, "tiny"):
            between = []
            for busy_s in (0.5, 0.75):
                sent = time.time()
                client.call(client.broker.status.heartbeat(told("a", busy_s), 60.0))
                wait_until(lambda: seen.get("a", [(0.0, 0.0)])[-1][1] == busy_s)  # noqa: B023  # called at once
                between.append((busy_s, sent - 0.01, time.time() + 0.01))
    assert [at for at, _ in seen["a"]] == sorted(at for at, _ in seen["a"])
    assert {busy_s for _, busy_s in seen["a"]} == {0.5, 0.75}
    for busy_s, first, last in between:
        assert all(first <= at <= last for at, of_report in seen["a"] if of_report == busy_s)


def test_reports_are_followed_to_another_server(server: EmbeddedServer, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "stale") as stale, engine_idle.reports_of(tmp_path / "tiny") as seen:
        (tmp_path / "tiny").mkdir()
        for one, name in ((stale, "old"), (server, "new")):
            with closing(BlockingBroker(one.url, "tiny")) as client, endpoint(tmp_path / "tiny", one.url, "tiny"):
                client.call(client.broker.batches.claim(checkpoint=FRESH, rules=rules(2), config=b"", resume=False))
                client.call(client.broker.status.heartbeat(told(name, 0.5), 60.0))
                wait_until(lambda: name in seen)  # noqa: B023  # called at once


def test_a_failing_look_opens_the_server_anew_and_a_worker_without_a_session_is_skipped(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[BlockingBroker] = []
    call = BlockingBroker.call

    def followed(self: BlockingBroker, coroutine: Any) -> Any:
        answer = call(self, coroutine)
        if isinstance(answer, RunStatus) and self not in asked:
            asked.append(self)
            if len(asked) == 1:
                raise BrokerError("lost")
            return msgspec.structs.replace(answer, silences={})
        return answer

    with closing(BlockingBroker(server.url, "tiny")) as client:
        client.call(client.broker.batches.claim(checkpoint=FRESH, rules=rules(2), config=b"", resume=False))
        client.call(client.broker.status.heartbeat(told("a", 0.5), 60.0))
        monkeypatch.setattr(BlockingBroker, "call", followed)
        (tmp_path / "tiny").mkdir()
        with endpoint(tmp_path / "tiny", server.url, "tiny"), engine_idle.reports_of(tmp_path / "tiny") as seen:
            wait_until(lambda: "a" in seen)
    assert len(asked) == 2
