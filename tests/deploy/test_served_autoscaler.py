"""`headway autoscale --serve` on a real broker answers for pods that each are a pool of one worker."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace as changed

from headway.broker import BlockingBroker
from headway.broker.schema import Owner
from headway.broker.schema.status import PoolInfo
from headway.broker.server.embedded import EmbeddedServer
from headway.deploy.recipe.resolve import load_recipe, recipe_to_bytes
from headway.deploy.roles.autoscaler import PooledAutoscaling, Targets, beyond_tolerance, serving
from tests.broker.scenario import FRESH, rules
from tests.broker.test_codec import WORKER
from tests.broker.topologies import free_port

from .test_autoscaling import LONG_S, WAITING
from .test_cli import clean_environment

TARGETS = Targets(least=2, most=32, steps=4)
DEADLINE_S = 240.0


@pytest.fixture
def client(server: EmbeddedServer, run_name: str) -> Iterator[BlockingBroker]:
    opened = BlockingBroker(server.url, run_name)
    yield opened
    opened.close()


def begin(client: BlockingBroker) -> Owner:
    """Begin a run that trains; four pods of it run, and one of another pool."""
    config = recipe_to_bytes(load_recipe("arithmetic.yaml"))
    claim = client.call(client.broker.batches.claim(checkpoint=FRESH, rules=rules(2), config=config, resume=False))
    client.call(client.broker.status.set_state(claim.owner, "training"))
    for pool in ("workers.pod-a", "workers.pod-b", "workers.pod-c", "workers.pod-d", "other.pod-e"):
        client.call(client.broker.pools.report(PoolInfo(pool=pool, host="h", pid=7, running=1), 1, LONG_S))
    client.call(client.broker.status.heartbeat(changed(WORKER, capacity=8, active=12), LONG_S))
    return claim.owner


def make_steps(client: BlockingBroker, owner: Owner, steps: int) -> None:
    for step in range(steps):
        client.call(client.broker.status.report_step(owner, changed(WAITING, step=step)))


def test_pods_of_a_pool_count_as_one_pool_and_a_starving_learner_gets_more(client: BlockingBroker) -> None:
    owner = begin(client)
    together = PooledAutoscaling(client, "workers", TARGETS, 0.0, False)
    assert (together.look().wanted, together.now.running) == (4, 4)
    make_steps(client, owner, 4)
    assert together.look().wanted == 6
    assert together.look().wanted == 6  # two pods still start
    assert "4 of 6" in together.now.reason


def test_before_the_run_it_wants_the_fewest_and_after_it_none(client: BlockingBroker) -> None:
    together = PooledAutoscaling(client, "workers", TARGETS, 0.0, False)
    assert together.look().wanted == 2
    owner = begin(client)
    assert together.look().wanted == 4
    client.call(client.broker.status.set_state(owner, "stopped"))  # its learner's pod moves
    assert together.look().wanted == 4
    client.call(client.broker.status.set_state(owner, "finished"))
    assert together.look().wanted == 0


def test_what_is_served_is_the_last_look(client: BlockingBroker) -> None:
    begin(client)
    together = PooledAutoscaling(client, "workers", TARGETS, 0.0, False)
    with serving(together, "127.0.0.1", free_port()) as address:
        assert json.loads(urllib.request.urlopen(address).read())["wanted"] == 2
        now = together.look()
        assert json.loads(urllib.request.urlopen(address).read()) == msgspec.to_builtins(now)


@pytest.mark.parametrize(
    ("before", "wanted", "said"),
    [(4, 5, 5), (4, 3, 3), (20, 21, 23), (20, 19, 17), (20, 20, 20), (31, 32, 31), (30, 32, 30), (2, 1, 2), (0, 2, 2)],
)
def test_a_change_is_one_that_kubernetes_does_not_take_for_none(before: int, wanted: int, said: int) -> None:
    assert beyond_tolerance(before, wanted, TARGETS) == said


def test_the_command_serves_until_it_is_stopped(
    client: BlockingBroker, server: EmbeddedServer, run_name: str, tmp_path: Path
) -> None:
    begin(client)
    port = free_port()
    command = [sys.executable, "-m", "headway", "autoscale", "--pool=workers", "--most=8", "--serve", str(port)]
    environment = {**clean_environment(), "HEADWAY_BROKER": server.url, "HEADWAY_RUN": run_name}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + DEADLINE_S
        wanted = None
        while wanted != 4:
            assert time.monotonic() < deadline
            time.sleep(0.1)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
                    wanted = json.loads(answer.read())["wanted"]
            except OSError:
                assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def test_serving_needs_a_pool(capsys: pytest.CaptureFixture[str]) -> None:
    from headway.deploy.cli.main import answer

    assert answer(["autoscale", "--most", "4", "--serve", "8080"]) == 2
    assert "--serve needs --pool" in capsys.readouterr().err
