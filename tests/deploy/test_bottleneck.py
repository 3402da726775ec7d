"""The chain of waiting roles in every situation, as `headway status`, the live lines and the learner's log print it."""

import asyncio
import io
import json
import logging
import re
import time
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from headway.broker import BlockingBroker, Broker, open_broker
from headway.broker.client.supervision import LearnerInfo
from headway.broker.schema import RunRules, WeightVersion
from headway.broker.schema.status import PoolInfo, RunStatus, WorkerInfo
from headway.broker.server.access import Role
from headway.broker.server.embedded import EmbeddedServer
from headway.deploy.cli.main import cli
from headway.deploy.observe.bottleneck import REPEAT_S, Bottleneck, Reminder, read_status
from headway.deploy.observe.live import Monitor, panel
from headway.deploy.observe.run_warnings import log_warnings
from headway.deploy.observe.status_tables import status_json, status_tables
from headway.deploy.terminal import Terminal
from tests.broker.scenario import FRESH, Scenario, begin, group_id, hidden, rules
from tests.broker.test_access import admit, url_of

from .runs import run_status, step_metrics, worker

ALIVE_S = 60.0
HOLDER = LearnerInfo(host="node", pid=7, user="ali", since=0.0)


async def scenario(broker: Broker, which: RunRules, *workers: WorkerInfo, fed: int = 8, size: int = 4) -> Scenario:
    """Begin a run whose learner and these workers are alive; its first weights are announced."""
    run = await begin(broker, which, fed=fed, group_size=size)
    await broker.status.set_state(run.owner, "training")
    await broker.heartbeat.begin(HOLDER)
    for info in workers:
        await broker.status.heartbeat(info, ALIVE_S)
    return run


def alive(name: str, **facts: Any) -> WorkerInfo:
    return replace(worker(name, WeightVersion(1, 0)), **facts)


async def waits(broker: Broker) -> Bottleneck:
    _, waiting = await read_status(broker)
    assert waiting is not None
    return waiting


async def keep_still(broker: Broker, seconds: float) -> None:
    """Make the run look as if nothing had moved in it for so long."""
    key = await hidden(broker, "meta")
    for name in ("claimed_at", "announced_at", "pinned_at"):
        await broker._connection.execute("HSET", key, name, time.time() - seconds)


async def test_the_chain_ends_at_the_worker_whose_engine_makes_no_token(broker: Broker) -> None:
    run = await scenario(broker, rules(1), alive("w3", silent_s=40.0, host="far"))
    leases = (await run.lease(8, 0, worker="w3")).leases
    await run.submit_all(leases[:6], 0)
    waiting = await waits(broker)
    for part in ("step 1: 1 of 2 groups", "0000-00000001 lacks 2 of 4", "worker w3 on host far", "no token for 40 s"):
        assert part in waiting.text
    assert (waiting.who, waiting.why) == ("learner", "groups")
    assert (waiting.group, waiting.workers) == (group_id(1), ("w3",))
    assert not waiting.is_quiet


async def test_a_group_lies_with_several_workers_and_with_none(broker: Broker) -> None:
    run = await scenario(broker, rules(1), alive("here"), alive("busy", state="paused"))
    gone, *_ = (await run.lease(1, 0, worker="gone")).leases
    here = (await run.lease(1, 0, worker="here")).leases
    back = (await run.lease(1, 0, worker="here")).leases
    await run.lease(1, 0, worker="busy")
    await broker.leases.release(back)
    waiting = await waits(broker)
    assert gone.tid.group == here[0].tid.group == group_id(0)
    assert "Group 0000-00000000 lacks 4 of 4 samples: " in waiting.text
    assert "1 leased by worker here on host node, whose engine makes 2,500 tokens/s" in waiting.text
    assert "1 leased by worker busy on host node, which is paused" in waiting.text
    assert re.search(r"1 leased by worker gone, which is not alive and sent nothing for \d+ s: another", waiting.text)
    assert "1 not leased by any worker now" in waiting.text
    assert waiting.workers == ("busy", "gone", "here")
    ended = PoolInfo(pool="p", host="h", pid=1, running=1, ended_s={"here": 0.0})
    await broker.pools.report(ended, 1, ALIVE_S)  # its supervisor saw it end, and its heartbeats count still
    assert "1 leased by worker here, which is not alive and sent nothing for" in (await waits(broker)).text


async def test_no_worker_is_alive(broker: Broker) -> None:
    await scenario(broker, rules(1))
    assert "no worker is alive (start some with `headway workers`), and 0 of 2" in (await waits(broker)).text
    await broker.pools.report(PoolInfo(pool="big", host="h", pid=1, running=0), 0, ALIVE_S)
    assert "(pool big wants none: `headway scale 1 --pool big` starts one)" in (await waits(broker)).text
    await broker.pools.report(PoolInfo(pool="big", host="h", pid=1, running=0, restarting=1, given_up=1), 2, ALIVE_S)
    await broker.pools.scale("big", "to", 2)
    waiting = await waits(broker)
    assert waiting.why == "no workers"
    assert "no worker is alive (pool big wants 2 and starts 1 again, and gave 1 of another version up)" in waiting.text


async def test_all_workers_pause(broker: Broker) -> None:
    await scenario(
        broker,
        rules(1),
        alive("a", state="paused", last_error="the transfer was cut off"),
        alive("b", state="starting"),
        alive("c", state="starting"),
    )
    waiting = await waits(broker)
    assert waiting.why == "workers pause"
    for part in ("none of the 3 workers", "2 starting", "1 paused", "the transfer was cut off"):
        assert part in waiting.text


async def test_the_workers_wait_for_a_learner_that_trains(broker: Broker) -> None:
    run = await scenario(broker, rules(0), alive("w"))
    await run.generate(8, 0)
    assert await run.take(0) is not None
    waiting = await waits(broker)
    assert (waiting.who, waiting.why) == ("workers", "training")
    assert "(staleness.max_lag is 0), and the learner has trained step 1" in waiting.text


async def test_the_workers_may_go_less_far_ahead_than_the_bound(broker: Broker) -> None:
    run = await scenario(broker, rules(2, ahead=0.5), alive("w"))
    await run.generate(100, 0)
    assert await run.take(0) is not None
    waiting = await waits(broker)
    assert (waiting.who, waiting.why) == ("workers", "training")
    assert "all admitted groups are ready or leased (staleness.ahead is 0.5)" in waiting.text


async def test_nobody_waits_while_the_workers_may_go_ahead(broker: Broker) -> None:
    run = await scenario(broker, rules(3), alive("w"))
    await run.generate(8, 0)
    assert await run.take(0) is not None
    waiting = await waits(broker)
    assert (waiting.who, waiting.why) == ("nobody", "training")
    await broker.status.leave("w")
    assert (await waits(broker)).text.startswith("No worker is alive, and the learner has trained step 1 for ")


async def test_no_prompts_are_left(broker: Broker) -> None:
    await scenario(broker, rules(1), alive("w"), fed=0)
    assert "no prompts are left, and 0 of 2 groups" in (await waits(broker)).text


async def test_the_store_is_full(broker: Broker) -> None:
    run = await scenario(broker, rules(1, max_bytes=1), alive("w"))
    await run.submit_all((await run.lease(4, 0)).leases, 0)
    waiting = await waits(broker)
    assert waiting.why == "store"
    assert "(0.0 of 0.0 MB, broker.max_bytes), and 1 of 2 groups" in waiting.text


async def test_an_older_group_holds_back_those_that_are_ready(broker: Broker) -> None:
    run = await scenario(broker, rules(1, 1), alive("slow"), alive("w"), size=1)
    await run.lease(1, 0, worker="slow")
    await run.announce(1)
    await run.submit_all((await run.lease(1, 1)).leases, 1)
    assert await run.take(1, 1) is None
    waiting = await waits(broker)
    assert (waiting.why, waiting.group, waiting.workers) == ("stragglers", group_id(0), ("slow",))
    assert "1 of 1 groups are ready, but an older group is unfinished" in waiting.text


async def test_the_learner_has_not_taken_what_is_ready(broker: Broker) -> None:
    run = await scenario(broker, rules(0), alive("w"))
    await run.generate(8, 0)
    assert (await waits(broker)).why == "learner busy"


async def test_the_workers_wait_for_weights(broker: Broker, url: str, run_name: str) -> None:
    await broker.batches.claim(checkpoint=FRESH, rules=rules(1), config=b"", resume=False)
    await broker.heartbeat.begin(HOLDER)
    assert (await waits(broker)).text.startswith("The workers wait for the first weights: the learner took the run ")


async def test_the_workers_wait_for_weights_of_a_resumed_learner(broker: Broker, url: str, run_name: str) -> None:
    run = await scenario(broker, rules(1))
    await run.announce(1)
    successor = await open_broker(url, run_name)
    await begin(successor, rules(1), resume=True)
    await successor.heartbeat.begin(HOLDER)
    waiting = await waits(successor)
    await successor.close()
    assert waiting.why == "no weights"
    assert "The workers wait for weights of the new learner" in waiting.text


async def test_a_learner_that_gives_no_sign_of_life_may_have_ended_or_be_stopped(broker: Broker) -> None:
    await scenario(broker, rules(1), alive("w"))
    await broker.heartbeat.end()
    await keep_still(broker, 5000)
    text = (await waits(broker)).text
    assert re.search(r"no sign of life, .* 50\d\d s old\..* with --resume", text), text


async def test_nobody_was_heard_of(broker: Broker) -> None:
    await scenario(broker, rules(1))
    await broker.status.state()  # the learner's sign of life has been seen meanwhile
    await broker.heartbeat.end()
    waiting = await waits(broker)
    assert (waiting.who, waiting.why) == ("nobody", "no learner")
    assert waiting.text.startswith("Neither a learner nor workers give a sign of life, and the run's last ")
    assert "a full disk: make room" in waiting.text


async def test_a_learner_whose_sign_of_life_is_lost_does_not_log_that_none_is_alive(
    broker: Broker, url: str, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    await scenario(broker, rules(1), alive("w"))
    await broker.heartbeat.end()
    await keep_still(broker, 60)
    assert (await waits(broker)).is_quiet
    looks: list[RunStatus] = []
    blocking = BlockingBroker(url, run_name)
    with log_warnings(blocking, looks.append, 0.01):
        async with asyncio.timeout(240):
            while len(looks) < 3:  # noqa: ASYNC110 - a thread looks
                await asyncio.sleep(0.01)
    blocking.close()
    assert "learner" not in caplog.text


async def test_in_a_run_that_is_over_nobody_waits(broker: Broker) -> None:
    run = await scenario(broker, rules(1))
    await broker.status.set_state(run.owner, "finished")
    assert (await read_status(broker))[1] is None


async def test_a_look_reads_a_few_groups_and_samples_only(broker: Broker) -> None:
    run = await scenario(broker, rules(20), alive("w"), fed=40, size=40)
    await run.lease(1000, 0)
    progress = await broker.progress.read()
    assert progress is not None
    assert [len(group.missing) for group in progress.unfinished] == [16] * 4
    assert (await broker.status.snapshot()).queues.open == 25


async def test_a_run_is_quiet_for_the_length_of_its_steps(broker: Broker) -> None:
    run = await scenario(broker, rules(1), alive("w"))
    await keep_still(broker, 100.0)
    assert (await waits(broker)).is_quiet
    assert (await waits(broker)).quiet_s >= 100
    await broker.status.report_step(run.owner, replace(step_metrics(0), step_s=50.0))
    assert not (await waits(broker)).is_quiet


@pytest.mark.parametrize("role", [Role.LEARNER, Role.WORKER, Role.OBSERVER])
async def test_each_role_that_shows_the_run_may_look(server: EmbeddedServer, run_name: str, role: Role) -> None:
    made = admit(server, run_name)
    learner = await open_broker(url_of(server, made[Role.LEARNER]), run_name)
    run = await scenario(learner, rules(1), alive("w"))
    await run.lease(2, 0)
    other = await open_broker(url_of(server, made[role]), run_name)
    assert (await waits(other)).why == "groups"
    await other.close()
    await learner.close()


WAITING = Bottleneck(who="learner", why="groups", text="The learner waits.", is_quiet=True, quiet_s=40.0)


def test_a_reminder_tells_a_reason_once_and_again_after_a_while() -> None:
    now = 0.0
    reminder = Reminder(clock=lambda: now)
    assert reminder.news(replace(WAITING, is_quiet=False)) == ""
    assert reminder.news(WAITING) == WAITING.text
    assert reminder.news(WAITING) == ""
    assert reminder.news(replace(WAITING, why="store")) == WAITING.text
    now = REPEAT_S
    assert reminder.news(replace(WAITING, why="store")) == WAITING.text
    assert reminder.news(None) == ""
    assert reminder.news(replace(WAITING, why="store")) == WAITING.text


def shown(content: Any) -> str:
    console = Terminal(width=120, record=True, file=io.StringIO())
    console.print(content)
    return console.export_text()


def test_status_and_the_quiet_panel_tell_who_waits() -> None:
    assert "waits     The learner waits." in shown(status_tables(run_status(), WAITING))
    assert status_json(run_status(), WAITING)["waiting"]["why"] == "groups"
    assert status_json(run_status())["waiting"] is None
    assert "The learner waits." in shown(panel(run_status(), None, 1.0, WAITING))
    assert "The learner waits." not in shown(panel(run_status(), None, 1.0, replace(WAITING, is_quiet=False)))


def test_in_a_pipe_it_is_a_line_of_its_own_once() -> None:
    output = io.StringIO()
    monitor = Monitor(lambda: (run_status(1), WAITING), Terminal(file=output, width=200))
    for _ in range(3):
        monitor._refresh()
    assert output.getvalue().count("The learner waits.\n") == 1


@pytest.fixture
async def stuck(broker: Broker) -> Broker:
    """Return a run with samples for which a worker has made no token in 100 s."""
    run = await scenario(broker, rules(1), alive("w3", silent_s=90.0))
    await run.lease(8, 0, worker="w3")
    await keep_still(broker, 100.0)
    return broker


async def test_headway_status_tells_it(stuck: Broker, url: str, run_name: str) -> None:
    arguments = ["status", "--broker", url, "--run", run_name]
    printed = await asyncio.to_thread(CliRunner().invoke, cli, [*arguments, "--json"])
    waiting = json.loads(printed.stdout)["waiting"]
    assert (waiting["why"], waiting["workers"], waiting["is_quiet"]) == ("groups", ["w3"], True)
    printed = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
    assert "worker w3 on host node, whose engine has made no token for 90 s" in " ".join(printed.stdout.split())


async def test_the_learners_log_tells_it_and_names_workers_that_were_set_aside(
    stuck: Broker, url: str, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    await stuck.faults.report(worker="w9", host="far", rule="version", reason="protocol 1, not 2.")
    blocking = BlockingBroker(url, run_name)
    with caplog.at_level(logging.WARNING), log_warnings(blocking, lambda status: None, 0.01):
        async with asyncio.timeout(240):
            while "whose engine has made no token for 90 s" not in caplog.text:  # noqa: ASYNC110 - a thread logs it
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
    blocking.close()
    assert caplog.text.count("The learner waits for step 1") == 1
    assert caplog.text.count("protocol 1, not 2.") == 1
