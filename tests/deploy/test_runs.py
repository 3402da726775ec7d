# mypy: disable-error-code="arg-type, misc, union-attr"
"""`headway runs` lists several runs on one server, and deletes one of them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner, Result

from headway.broker import Broker, open_broker
from headway.broker.client.supervision import LearnerInfo
from headway.broker.server.embedded import EmbeddedServer
from headway.deploy.cli.main import cli
from tests.broker.scenario import begin, rules
from tests.broker.topologies import is_redis_7_0

from .runs import step_metrics, worker
from .test_cli import headway as in_terminal

SIMILAR = ("a", "a.b", "a-b", "ab")


def headway(*arguments: str, answer: str = "") -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["runs", *arguments], input=answer)


@pytest.fixture
def stored(url: str) -> Iterator["Stored"]:
    with redis.Redis.from_url(url) as client:
        yield Stored(client)


class Stored:
    """The keys of runs on the server, byte for byte."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def of(self, run: str) -> dict[bytes, bytes]:
        keys = [key for key in self._client.keys("*") if f"{{{run}}}" in key.decode() or f"{{{run}/" in key.decode()]
        return {key: self._client.dump(key) for key in sorted(keys)}

    def age(self, run: str) -> None:
        """Make the run look unused for an hour."""
        (key,) = self._client.keys(f"headway:{{{run}}}:hidden:*:meta")
        self._client.restore(key, 0, self._client.dump(key), replace=True, idletime=3600)


async def make(url: str, run: str) -> None:
    """Make a run with samples over two shards, a batch, a worker and a step."""
    broker = await open_broker(url, run)
    broker.leases.storage.payload_shards = 2
    made = await begin(broker, rules(1), fed=4)
    await made.generate(8, 0)
    await made.take(0)
    await broker.status.report_step(made.owner, step_metrics(0, reward=0.25))
    await broker.status.heartbeat(worker("w1", None), 30)
    await broker.status.set_state(made.owner, "training")
    await broker.close()


async def test_list_and_show(url: str, server: EmbeddedServer, stored: Stored) -> None:
    assert json.loads(headway("list", "--broker", url, "--json").stdout) == []
    for run in SIMILAR:
        await make(url, run)
    stored.age("a")
    for _ in range(1 if is_redis_7_0(server) else 2):  # looking counts as no use
        listed = {line["run"]: line for line in json.loads(headway("list", "--broker", url, "--json").stdout)}
        assert sorted(listed) == sorted(SIMILAR)
        assert listed["a"].pop("idle_s") >= 3600
        assert listed["a"].pop("payload_bytes") > 0
        assert listed["a"] == {
            "run": "a",
            "state": "training",
            "incarnation": 1,
            "announced": "1.0",
            "steps": 1,
            "reward_mean": 0.25,
            "workers": 1,
        }
    table = headway("list", "--broker", url).stdout
    assert "a-b" in table
    assert "1/60" in table
    shown = json.loads(headway("show", "a", "--broker", url, "--json").stdout)
    assert (shown["run"], shown["last_step"]["step"]) == ("a", 0)
    assert "Queues" in headway("show", "a", "--broker", url).stdout
    assert "No run c at" in str(headway("show", "c", "--broker", url).exception)


async def test_deleting_one_leaves_the_others_byte_for_byte(url: str, stored: Stored) -> None:
    for run in SIMILAR:
        await make(url, run)
    before = {run: stored.of(run) for run in SIMILAR}
    assert any(b"{a/0}:payload" in key for key in before["a"])
    assert any(b"{a/1}:payload" in key for key in before["a"])
    deleted = json.loads(headway("delete", "a", "--broker", url, "--yes", "--force", "--json").stdout)
    assert deleted == {"deleted": "a", "keys": len(before["a"])}
    assert stored.of("a") == {}
    for run in SIMILAR[1:]:
        assert stored.of(run) == before[run]


async def test_a_run_in_use_is_not_deleted(url: str, stored: Stored) -> None:
    await make(url, "a")
    refused = headway("delete", "a", "--broker", url, "--yes")
    assert "Run a is in use (training): 1 workers are alive: w1. Stop them" in str(refused.exception)
    assert stored.of("a")
    assert headway("delete", "a", "--broker", url, "--force", answer="n\n").exit_code == 1
    assert stored.of("a")
    assert headway("delete", "a", "--broker", url, "--force", answer="y\n").stdout.startswith("Deleted run a: ")
    assert stored.of("a") == {}
    assert "No run a there. Runs there: none." in str(headway("delete", "a", "--broker", url, "--yes").exception)


async def test_a_run_with_a_learner_alone_is_not_deleted(broker: Broker, url: str) -> None:
    run = await begin(broker, rules(0))
    await broker.heartbeat.begin(LearnerInfo(host="gpu-3", pid=12, user="ali", since=1.8e9))
    refused = headway("delete", broker.run, "--broker", url, "--yes")
    assert f"Run {broker.run} is in use (claimed): its learner is process 12 of ali on gpu-3, since 2027-01-" in str(
        refused.exception
    )
    assert "Its learner is process 12 of ali on gpu-3" in headway("show", broker.run, "--broker", url).stdout
    shown = json.loads(headway("show", broker.run, "--broker", url, "--json").stdout)
    assert shown["learner"].startswith("process 12 of ali on gpu-3, since 2027-01-")
    await broker.status.set_state(run.owner, "finished")
    await broker.heartbeat.end()
    assert headway("delete", broker.run, "--broker", url, "--yes").exit_code == 0


@pytest.mark.parametrize("command", ["run", "learner"])
async def test_a_run_that_is_trained_elsewhere_is_not_overwritten(
    command: str, broker: Broker, url: str, stored: Stored, tmp_path: Path
) -> None:
    await begin(broker, rules(0))
    await broker.heartbeat.begin(LearnerInfo(host="gpu-3", pid=12, user="ali", since=1.8e9))
    before, here = stored.of(broker.run), tmp_path / "runs" / broker.run
    here.mkdir(parents=True)
    (here / "config.yaml").touch()
    connection = ["--broker", url, "--run", broker.run] if command == "learner" else [f"run.name={broker.run}"]
    refused = in_terminal(command, "arithmetic.yaml", f"broker.url={url}", *connection, "--overwrite", cwd=tmp_path)
    assert refused.returncode == 1
    assert f"Run {broker.run} is in use (claimed): its learner is process 12 of ali on gpu-3" in refused.stderr
    assert stored.of(broker.run) == before
    assert (here / "config.yaml").exists()


async def test_a_run_that_is_over_may_go_at_once(broker: Broker, url: str, stored: Stored) -> None:
    run = await begin(broker, rules(0))
    await broker.status.set_state(run.owner, "finished")
    assert headway("delete", broker.run, "--broker", url, "--yes").exit_code == 0
    assert stored.of(broker.run) == {}
