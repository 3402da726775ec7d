"""The live page shows a run and follows it, and its server answers only requests for an address of its own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from subprocess import PIPE
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from headway.broker import Broker, open_broker
from headway.broker.errors import BrokerError, ConfigError
from headway.broker.schema import WeightVersion
from headway.broker.schema.status import DeadLetter, RunStatus, Tallies, VersionGroups
from headway.broker.server.access import Role
from headway.broker.server.embedded import EmbeddedServer
from headway.deploy.launch.local_launcher import Child, LocalLauncher
from headway.deploy.launch.pool_reports import pool_reports
from headway.deploy.launch.process_pool import Pool
from headway.deploy.observe.bottleneck import Bottleneck, StatusReader
from headway.deploy.observe.page import live_page
from headway.deploy.observe.page.content import version_counts
from headway.deploy.observe.page.live_page import PageServer, Watcher
from headway.deploy.observe.status_tables import recent, state_text
from headway.deploy.roles.run_client import Source
from headway.deploy.run.events import HeartbeatEvent, StepEvent
from headway.deploy.run.record import Record, read_record
from headway.deploy.run.run_directory import held
from tests.broker.scenario import begin, rules
from tests.broker.test_access import admit, url_of
from tests.deploy.runs import open_record, run_status, step_event, step_metrics, worker
from tests.deploy.test_supervisor import FOREVER, role

from .pages import Elements, write_run

PATIENCE_S = 240.0


def eventually(look: Callable[[], Any]) -> Any:
    """Return the first true answer. Raises AssertionError where none comes in time."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


class Told:
    """A run whose status and record a test sets."""

    def __init__(self, status: RunStatus, record: Record | None = None) -> None:
        self.status: RunStatus | BrokerError = status
        self.record = record
        self.waiting: Bottleneck | None = None

    @contextmanager
    def connect(self) -> Iterator[StatusReader]:
        yield self._look

    def read(self, status: RunStatus | None) -> Record | None:
        found, self.record = self.record, None
        return found

    def _look(self) -> tuple[RunStatus, Bottleneck | None]:
        if isinstance(self.status, BrokerError):
            raise self.status
        return self.status, self.waiting


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "POLL_S", 0.01)
    monkeypatch.setattr(live_page, "SHARE", 0)


@contextmanager
def serving(watcher: Watcher) -> Iterator[PageServer]:
    with watcher, PageServer(watcher, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(url: str, path: str, **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection(urlsplit(url).netloc)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def get_json(url: str, path: str) -> Any:
    answer, body = get(url, path)
    assert answer.status == 200
    return json.loads(body)


def test_the_page_holds_the_record_and_may_ask_only_its_server(tmp_path: Path) -> None:
    run = read_record(str(write_run(tmp_path / "run")))
    with serving(Watcher(None, Told(run_status(), run).read)) as server:
        eventually(lambda: get_json(server.url, "/page.json")["number"])
        answer, body = get(server.url, "/")
        elements = Elements(body.decode())
        assert json.loads(elements.texts["content"]) == get_json(server.url, "/page.json")
        assert json.loads(elements.texts["content"])["runs"][0]["steps"] == [0, 1, 2, 3, 4]
        assert b"connect-src 'self';" in body
        assert (answer.getheader("Cache-Control"), answer.getheader("X-Frame-Options")) == ("no-store", "DENY")
        assert get(server.url, "/other")[0].status == 404


def test_each_look_brings_workers_rates_and_versions() -> None:
    run = Told(run_status())
    with serving(Watcher(run.connect, run.read)) as server:
        live = eventually(
            lambda: (
                (found := get_json(server.url, "/live.json"))["status"] and len(found["rates"]["trained"]) > 1 and found
            )
        )
        assert [one["worker"] for one in live["status"]["workers"]] == ["node-worker-0-ab12", "node-worker-1-cd34"]
        assert live["worker_rates"]["node-worker-0-ab12"][-1] == 2500.0
        assert (live["rates"]["generated"][-1], live["rates"]["trained"][-1]) == (5000.0, 2000.0)
        assert "recent_steps" not in live["status"]
        letter = DeadLetter(tid="0-1:0:0", worker="bad", reason="<b>impossible</b>")
        run.status = msgspec.structs.replace(run_status(), workers=(), quarantined=("bad",), dead_letters=(letter,))
        live = eventually(lambda: (found := get_json(server.url, "/live.json"))["status"]["quarantined"] and found)
        assert (live["worker_rates"], live["status"]["dead_letters"][0]["reason"]) == ({}, "<b>impossible</b>")


def test_a_shown_rate_is_a_mean_of_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "RATE_LOOKS", 10**6)
    monkeypatch.setattr(live_page, "KEPT_POINTS", 10**6)
    busy = run_status()
    idle = tuple(msgspec.structs.replace(worker, tokens_per_s=0.0) for worker in busy.workers)
    run = Told(busy)
    with Watcher(run.connect, run.read) as watcher:
        eventually(lambda: watcher.live.rates)
        run.status = msgspec.structs.replace(busy, workers=idle)
        eventually(lambda: 0 < watcher.live.rates["generated"][-1] < 4000.0)
        name = busy.workers[0].worker
        assert 0 < watcher.live.worker_rates[name][-1] < 2500.0
        assert watcher.live.rates["generated"][0] == 5000.0


def test_a_broker_that_is_away_is_told_and_the_last_look_stays() -> None:
    run = Told(run_status())
    with Watcher(run.connect, run.read) as watcher:
        eventually(lambda: watcher.live.status)
        run.status = BrokerError("No answer.")
        assert eventually(lambda: watcher.live.problem) == "No answer."
        assert watcher.live.status is not None
        run.status = run_status()
        eventually(lambda: not watcher.live.problem)


def test_the_page_says_who_waits_for_whom() -> None:
    run = Told(run_status())
    run.waiting = Bottleneck(who="learner", why="stragglers", text="Step 3 waits for a.", is_quiet=True, quiet_s=40.0)
    with Watcher(run.connect, run.read) as watcher:
        status = eventually(lambda: watcher.live.status)
        assert (status["waiting"]["text"], status["waiting"]["is_quiet"]) == ("Step 3 waits for a.", True)


def test_a_new_step_makes_a_new_page(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    run = Told(run_status(), read_record(str(directory)))
    with Watcher(None, run.read) as watcher:
        eventually(lambda: watcher.page["number"] == 1)
        open_record(directory).write(step_event(5, incarnation=2))
        run.record = read_record(str(directory))
        eventually(lambda: watcher.page["number"] == 2)
        assert watcher.page["runs"][0]["steps"] == [0, 1, 2, 3, 4, 5]


def test_a_finished_directory_shows_what_the_live_page_showed_last(tmp_path: Path) -> None:
    lengths = Tallies(
        dispatched_by_prompt_length={8: 30, 16: 10},
        trained_by_prompt_length={8: 30},
        finished_by_response_length={8: 80, 16: 90},
        cut_by_response_length={16: 4},
    )
    status = msgspec.structs.replace(
        run_status(), tallies=lengths, versions=(VersionGroups(35, generating=4, ready=2, dropped=1),)
    )
    record = open_record(tmp_path)
    for step in status.recent_steps:
        record.write(StepEvent(metrics=step, tids=()))
    assert status.last_step is not None
    record.write(HeartbeatEvent.of(status, status.last_step))
    run = Told(status, read_record(str(tmp_path)))
    with Watcher(run.connect, run.read) as watcher:
        live = eventually(lambda: watcher.live.status and watcher.live)
        (shown,) = eventually(lambda: watcher.page["runs"])
    assert shown["trained_by_response_length"] == {8: 37 * 56, 16: 37 * 200}
    look = shown["last_look"]
    assert look["step"] == 36
    assert look["versions"] == msgspec.to_builtins(live.versions)
    assert len(look["versions"]) > 3
    assert (look["workers"], look["worker_count"]) == (live.status["workers"], live.workers)
    assert msgspec.to_builtins(look["tallies"], str_keys=True) == live.status["tallies"]


def test_samples_are_counted_by_the_version_that_sampled_them() -> None:
    status = msgspec.structs.replace(
        run_status(0),
        announced=WeightVersion(1, 10),
        recent_steps=(step_metrics(9), step_metrics(10)),
        workers=(worker("a", WeightVersion(1, 10)), worker("b", WeightVersion(1, 9)), worker("c", None)),
        versions=(
            VersionGroups(9, generating=4, ready=2, dropped=0, ready_samples=8, ready_tokens=640),
            VersionGroups(3, generating=0, ready=0, dropped=7),
        ),
    )
    found = {
        one.version: (one.workers, one.generating, one.trained, one.trained_tokens)
        for one in version_counts(status, recent(status))
    }
    assert found == {
        "1.10": (1, 60, 20, 500),
        "1.9": (1, 60, 220, 3500),
        "1.8": (0, 0, 236, 3500),
        "1.7": (0, 0, 36, 500),
        "1.3": (0, 0, 0, 0),
        "-": (1, 60, 0, 0),
    }
    assert list(found) == ["1.10", "1.9", "1.8", "1.7", "1.3", "-"]
    groups = {
        one.version: (one.groups_generating, one.groups_ready, one.tokens_ready, one.groups_dropped)
        for one in version_counts(status, recent(status))
    }
    assert groups == {name: {"1.9": (4, 2, 640, 0), "1.3": (0, 0, 0, 7)}.get(name, (0, 0, 0, 0)) for name in found}


async def test_a_worker_that_misses_heartbeats_is_late_and_then_lost(broker: Broker, server: EmbeddedServer) -> None:
    await begin(broker, rules(1), fed=4)
    watcher = Watcher(Source(None, lambda: (server.url, broker.run)).connect, lambda status: None)
    with watcher:
        await broker.status.heartbeat(worker("leaves", None), 60.0)
        await broker.status.heartbeat(worker("dies", None), 2.0)
        seen = await asyncio.to_thread(eventually, lambda: (found := watcher.live).missing and found)
        assert ([one.worker for one in seen.missing], seen.missing[0].is_lost) == (["dies"], False)
        told = {one["worker"]: one["is_late"] for one in seen.status["workers"]}
        assert told == {"dies": True, "leaves": False}
        await broker.status.leave("leaves")
        seen = await asyncio.to_thread(eventually, lambda: not (found := watcher.live).workers and found)
        assert [(one.worker, one.host, one.is_lost) for one in seen.missing] == [("dies", "node", True)]
        await broker.status.heartbeat(worker("dies", None), 60.0)
        assert await asyncio.to_thread(eventually, lambda: not watcher.live.missing)


async def test_a_killed_worker_is_dead_while_its_heartbeat_still_holds(
    broker: Broker, server: EmbeddedServer, tmp_path: Path
) -> None:
    await begin(broker, rules(1), fed=4)
    pool = Pool("workers", 2, lambda number: role(f"w-{number}", FOREVER, tmp_path))
    pool.resize(LocalLauncher(), print)
    killed, other = pool.slots.values()
    names = {slot.tag: f"node-{slot.command.name}-{slot.tag}" for slot in (killed, other)}
    for name in names.values():
        await broker.status.heartbeat(worker(name, None), 60.0)
    watcher = Watcher(Source(None, lambda: (server.url, broker.run)).connect, lambda status: None)
    with watcher, pool_reports(server.url, broker.run, [pool]):
        await asyncio.to_thread(eventually, lambda: watcher.live.status and watcher.live.status["pools"])
        assert watcher.live.missing == []
        assert isinstance(killed.child, Child)
        assert isinstance(other.child, Child)
        os.kill(killed.child.pid, signal.SIGKILL)
        await asyncio.to_thread(eventually, lambda: list(pool.reap(print)))
        live = await asyncio.to_thread(eventually, lambda: (found := watcher.live).missing and found)
        assert [(one.worker, one.is_lost, one.has_ended) for one in live.missing] == [(names[killed.tag], True, True)]
        assert {one["worker"]: one["has_ended"] for one in live.status["workers"]} == {
            names[killed.tag]: True,
            names[other.tag]: False,
        }
        status = await broker.status.snapshot()
        said = {one.worker: state_text(one, status) for one in status.workers}
        assert said == {names[killed.tag]: "dead: its process ended", names[other.tag]: "generating"}
    other.child.kill()


def test_a_page_asks_for_a_window_of_many_workers() -> None:
    names = [f"w-{index:03d}" for index in range(120)]
    run = Told(msgspec.structs.replace(run_status(), workers=tuple(worker(name, None) for name in names)))
    with serving(Watcher(run.connect, run.read)) as server:
        eventually(lambda: get_json(server.url, "/live.json")["status"])
        for asked, first in ((0, 0), (50, 50), (100, 100), (10**8, 100)):
            live = get_json(server.url, f"/live.json?first={asked}")
            assert (live["first"], live["workers"]) == (first, 120)
            assert [one["worker"] for one in live["status"]["workers"]] == names[first : first + 50]
            assert live["worker_rates"].keys() == set(names[first : first + 50])
            assert live["status"]["throughput"]["generated_tokens_per_s"] == 120 * 2500.0
        assert len(get_json(server.url, "/live.json?first=-1")["status"]["workers"]) == 120


def test_a_running_run_is_followed_without_the_names_of_its_trajectories(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    whole = read_record(str(directory), again=True).summary
    with held(directory):
        (directory / "trained.jsonl").unlink()
        followed = read_record(str(directory), again=True).summary
    assert "trained_twice" in whole
    assert "trained_twice" not in followed
    assert followed["trained_trajectories"] == 5 * 256
    same = {
        "steps",
        "reward_last",
        "eval_before",
        "eval_after",
        "max_lag_seen",
        "wall_s",
        "learner_wait_fraction",
        "trained_tokens_per_s",
    }
    assert {name: followed[name] for name in same} == {name: whole[name] for name in same}


def test_loopback_answers_only_those_who_call_it_by_its_name() -> None:
    run = Told(run_status())
    with serving(Watcher(run.connect, run.read)) as server:
        assert "token" not in server.url
        assert get(server.url, "/live.json", Host="attacker.example")[0].status == 403
        assert get(server.url, "/live.json", Host=f"localhost:{server.server_port}")[0].status == 200


def test_beyond_loopback_every_request_needs_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "_is_loopback", lambda host: False)
    run = Told(run_status())
    with serving(Watcher(run.connect, run.read)) as server:
        for path in ("/", "/live.json", "/page.json"):
            assert get(server.url, path)[0].status == 403
            assert get(server.url, f"{path}?token=wrong")[0].status == 403
            assert get(server.url, f"{path}?token={server.token}")[0].status == 200
        assert server.url.endswith(f"/?token={server.token}")


@pytest.mark.parametrize(
    ("host", "is_loopback"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("a", False)]
)
def test_which_hosts_are_loopback(host: str, is_loopback: bool) -> None:
    assert live_page._is_loopback(host) is is_loopback


def test_a_taken_port_is_an_error_with_a_remedy() -> None:
    watcher = Watcher(None, lambda status: None)
    with PageServer(watcher, "127.0.0.1", 0) as server, pytest.raises(ConfigError, match="Choose another --port"):
        PageServer(watcher, "127.0.0.1", server.server_port)


@contextmanager
def dashboard(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a dashboard in a process of its own, which Ctrl-C ends."""
    command = [sys.executable, "-m", "headway", "dashboard", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, cwd=cwd) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait() == 0


@contextmanager
def dashboard_url(*arguments: str, cwd: Path) -> Iterator[str]:
    """Yield the address of a dashboard, the only line that it prints for programs."""
    with dashboard(*arguments, "--json", cwd=cwd) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        yield json.loads(process.stdout.readline())["url"]
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""


@pytest.mark.slow
async def test_the_command_follows_a_run_of_a_broker(broker: Broker, server: EmbeddedServer, tmp_path: Path) -> None:
    made = await begin(broker, rules(1), fed=4)
    await broker.status.report_step(made.owner, step_metrics(0, reward=0.25))
    await broker.status.heartbeat(worker("w-0", None), 60.0)
    with dashboard_url("--broker", server.url, "--run", broker.run, cwd=tmp_path) as url:
        live = eventually(lambda: (found := get_json(url, "/live.json"))["status"] and found["page"] and found)
        assert [one["worker"] for one in live["status"]["workers"]] == ["w-0"]
        (run,) = get_json(url, "/page.json")["runs"]
        assert (run["name"], run["curves"]["reward_mean"]["mean"]) == (broker.run, [0.25])
        assert run["notes"][0].startswith("The broker keeps the last 512 steps")
        await broker.status.report_step(made.owner, step_metrics(1, reward=0.75))
        eventually(lambda: get_json(url, "/page.json")["runs"][0]["curves"]["reward_mean"]["mean"] == [0.25, 0.75])


async def test_an_observer_s_password_is_enough(server: EmbeddedServer, run_name: str) -> None:
    made = admit(server, run_name)
    learner = await open_broker(url_of(server, made[Role.LEARNER]), run_name)
    run = await begin(learner, rules(1), fed=4)
    await learner.status.report_step(run.owner, step_metrics(0))
    source = Source(None, lambda: (url_of(server, made[Role.OBSERVER]), run_name))
    with source.connect() as look:
        status, waiting = await asyncio.to_thread(look)
    assert (status.run, waiting is not None) == (run_name, True)
    record = source.read(status)
    assert record is not None
    assert [step.step for step in record.steps] == [0]
    await learner.close()


def test_the_command_shows_a_run_that_is_over(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    with dashboard(str(directory), cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == "Loading, and looking for the run; its page's address follows ...\n"
        url = process.stdout.readline().split()[1]
        assert eventually(lambda: get_json(url, "/page.json")["runs"])[0]["steps"] == [0, 1, 2, 3, 4]
        problem = eventually(lambda: get_json(url, "/live.json")["problem"])
        assert problem.startswith(f"{directory} has no process")


def test_the_command_follows_a_run_that_has_no_broker_yet(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "runs" / "early")
    with held(directory), dashboard_url(cwd=tmp_path) as url:
        assert eventually(lambda: get_json(url, "/page.json")["runs"])[0]["name"] == "early"
        problem = eventually(lambda: get_json(url, "/live.json")["problem"])
        assert problem.endswith("runs/early has no broker yet; its figures are those of its files.")
