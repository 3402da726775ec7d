"""Each role has a user of its own, whose own work succeeds and whose other commands are refused."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from headway.broker import Broker, open_broker
from headway.broker.client.evaluations import EvaluationResult
from headway.broker.client.leases import AppendOutcome, SubmitOutcome
from headway.broker.client.supervision import LearnerInfo
from headway.broker.client.weights import LEARNER
from headway.broker.connection.function_library import FILES, script_source
from headway.broker.errors import BrokerError, BrokerUnavailableError, RunNotFoundError
from headway.broker.schema import Lease, Owner, Segment, TrajectoryId, VersionSpan, WeightVersion
from headway.broker.schema.weights import ModelFiles
from headway.broker.server.access import Role, User, users
from headway.broker.server.embedded import EmbeddedServer

from .renewal import renew
from .scenario import Scenario, begin, broadcast_group, group_id, groups, manifest, of_no_run, prompt, rules, trajectory
from .test_codec import STEP
from .test_rendezvous_store import WORKER
from .topologies import ask, is_redis_7_0

HOLDER = LearnerInfo(host="h", pid=1, user="ali", since=0.0)


def admit(server: EmbeddedServer, run: str | None) -> dict[Role, User]:
    """Create the users."""
    made = {user.role: user for user in users(run, {})}
    for user in made.values():
        ask(server, "ACL", "SETUSER", user.name, *user.rules(is_for_7_0=is_redis_7_0(server)))
    return made


def url_of(server: EmbeddedServer, user: User) -> str:
    return server.url.replace("unix://", f"unix://{user.name}:{user.password}@")


@pytest.fixture
async def brokers(server: EmbeddedServer, run_name: str) -> AsyncIterator[dict[Role, Broker]]:
    async with AsyncExitStack() as stack:
        opened = {}
        for role, user in admit(server, run_name).items():
            opened[role] = await open_broker(url_of(server, user), run_name, timeout_s=2)
            stack.push_async_callback(opened[role].close)
        yield opened


def segment(lease: Lease, index: int, step: int = 0) -> Segment:
    return Segment(
        tid=lease.tid,
        index=index,
        start=2 * index,
        tokens=np.array([5, 6], np.int32),
        behavior_logprobs=np.array([-1, -2], np.float32),
        loss_mask=np.ones(2, np.uint8),
        spans=(VersionSpan(2 * index, 2 * index + 2, WeightVersion(1, step)),),
    )


async def work(worker: Broker, shards: int) -> None:
    """Do everything that a worker ever does."""
    worker.leases.storage.payload_shards = shards
    assert await worker.status.config() == b"recipe"
    assert of_no_run(await worker.versions.announced()) == manifest(1, 0)
    assert await worker.versions.offered() is None
    assert await worker.versions.model() == ModelFiles(files={"config.json": b"{}"})
    assert of_no_run(await worker.versions.group()) == broadcast_group()
    assert await worker.versions.current() == (WeightVersion(1, 0), WeightVersion(1, 0))
    await worker.status.heartbeat(WORKER, 30)
    assert [of_no_run(info) for info in await worker.status.workers()] == [WORKER]
    assert await worker.archive.read("blob", 2, 3) == b"blo"
    with pytest.raises(BrokerError):
        await worker.archive.put("blob", 0, b"other")
    assert await worker.swap_turns.take("t", 0.5, 30)
    assert await worker.swap_turns.renew("t", 30)
    await worker.swap_turns.give_back("t")
    assert await worker.phases.may_generate("w", 30, is_awake=False)
    evaluated, *rest = (await worker.evaluations.lease("w", WeightVersion(1, 0), 2, 30)).leases
    await worker.evaluations.release(rest)
    assert await worker.evaluations.submit(evaluated, EvaluationResult(True, 1.0, 3), [evaluated.version]) == "accepted"
    assert await worker.rendezvous.set_once("m", "w", "in/w", b"1") == b"1"
    assert await worker.rendezvous.set("m", "w", "ack", b"")
    assert await worker.rendezvous.add("m", "w", "n", 2) == 2
    assert await worker.rendezvous.get("m", [("w", "in/w"), (LEARNER, "verdict")]) == [b"1", b"go"]
    assert await worker.rendezvous.delete("m", "w", [("w", "ack")]) == 1
    with pytest.raises(BrokerError):
        await worker.rendezvous.set("m", LEARNER, "verdict", b"void")
    assert await worker.rendezvous.wait_for_notification(b"0") != b"0"
    with pytest.raises(BrokerError):
        await worker._connection.execute("XADD", worker._connection.keys("bell"), "*", "rung", "")
    assert await worker.status.state() == "claimed"
    first, *others = (await worker.leases.lease("w", WeightVersion(1, 0), 4, 30)).leases
    assert (await worker.leases.append(first, segment(first, 0), 30)).outcome is AppendOutcome.APPENDED
    assert await renew(worker, [first, *others]) == set()
    await worker.leases.release([first])
    (again,) = (await worker.leases.lease("v", WeightVersion(1, 0), 1, 30)).leases
    assert len(again.segments) == 1
    for lease in (again, *others):
        assert await worker.leases.submit(lease, trajectory(lease, 0)) is SubmitOutcome.ACCEPTED
    assert await worker.leases.confirm() == 0
    await worker.status.snapshot()  # `headway workers` shows the run
    await worker.faults.report(worker="w", host="h", rule="version", reason="another one")
    with pytest.raises(BrokerError):
        await worker._connection.execute("SET", worker._connection.keys("fault:10"), "more than the places")
    await worker.status.leave(WORKER.worker)


async def watch(observer: Broker) -> None:
    """Do everything that a status display ever does."""
    status = await observer.status.snapshot()
    assert status.announced == WeightVersion(1, 1)
    assert [(fault.worker, fault.rule) for fault in status.faults] == [("w", "version")]
    assert await observer.status.runs() == (observer.run,)
    usage = await observer.usage.read()
    assert usage is not None
    assert usage.state == "training"
    assert (await observer.heartbeat.users()).learner == HOLDER
    assert await observer.status.config() == b"recipe"


@pytest.mark.parametrize("shards", [1, 2])
async def test_a_whole_run_with_a_user_for_each_role(brokers: dict[Role, Broker], shards: int) -> None:
    learner, worker = brokers[Role.LEARNER], brokers[Role.WORKER]
    run = await begin(learner, rules(1), fed=8)
    await learner.versions.put_model(run.owner, ModelFiles(files={"config.json": b"{}"}))
    await learner.versions.put_group(run.owner, broadcast_group())
    await learner.rendezvous.create("m", ["w"], {"verdict": b"open"})
    await learner.rendezvous.set("m", LEARNER, "verdict", b"go")
    await learner.phases.generate(run.owner, 30)
    await learner.evaluations.ask(run.owner, WeightVersion(1, 0), [prompt(100)], 2)
    assert await learner.archive.keep(run.owner, {"blob": 6}) == set()
    await learner.archive.put("blob", 0, b"a blob")
    assert (await learner.archive.room()).max_bytes > 0
    await work(worker, shards)
    progress = await learner.evaluations.progress(run.owner, WeightVersion(1, 0))
    assert progress is not None
    assert progress.done == 1
    await learner.evaluations.end(run.owner, WeightVersion(1, 0))
    assert await learner.phases.train(run.owner) == ("w",)
    assert await learner.phases.are_engines_awake()
    await worker.phases.fell_asleep("w")
    assert await learner.phases.train(run.owner) == ()
    assert await run.take(0) == groups(0, 1)
    await learner.status.report_step(run.owner, STEP)
    await run.announce(1)
    await learner.status.set_state(run.owner, "training")
    await learner.heartbeat.begin(HOLDER)
    await watch(brokers[Role.OBSERVER])
    assert [fault.worker for fault in (await learner.status.snapshot()).faults] == ["w"]
    pinned = {0: [TrajectoryId(group_id(position), 0, sample) for position in (0, 1) for sample in (0, 1)]}
    await learner.batches.reassert(run.owner, announced=WeightVersion(1, 1), committed_groups=[], pinned=pinned)
    assert await learner.prompts.feed([prompt(8)], run.owner) == 1
    assert await learner.batches.commit(run.owner, 1, watermark=group_id(2)) == 2
    await learner.prompts.close_feed(run.owner)
    assert await learner.batches.settled_without_training() == []
    assert not (await learner.prompts.waiting())[1]
    assert (await learner.status.snapshot()).queues.payload_bytes == 0
    assert await learner.status.delete_run() > 0
    with pytest.raises(RunNotFoundError):
        await learner.status.snapshot()


def test_the_learner_may_run_every_command_of_its_functions() -> None:
    """Some of them run only after a fault, or under a rule that few recipes set."""
    text = re.sub(
        r"^verb\('lease'.*?^end\)$", "", "".join(map(script_source, FILES)), flags=re.M | re.S
    )  # the worker's
    (learner,) = [user for user in users("run", {}) if user.role is Role.LEARNER]
    allowed = {rule.removeprefix("+").partition("|")[0] for rule in learner.rules()}
    assert {name.lower() for name in re.findall(r"call\('([A-Z]+)'", text)} <= allowed


async def test_what_is_damaged_is_reported_by_the_worker(brokers: dict[Role, Broker], server: EmbeddedServer) -> None:
    run = await begin(brokers[Role.LEARNER], rules(1), fed=8)
    worker, keys = brokers[Role.WORKER].leases, brokers[Role.LEARNER]._connection.keys
    (lease,) = (await worker.lease("w", WeightVersion(1, 0), 1, 30)).leases
    await worker.append(lease, segment(lease, 0), 30)
    await worker.release([lease])
    (name,) = ask(server, "KEYS", keys("segment:*"))
    ask(server, "SETRANGE", name, 20, "\xff\xff")
    ask(server, "SETRANGE", keys.prompt(group_id(1)), 20, "\xff\xff")
    granted = (await worker.lease("v", WeightVersion(1, 0), 4, 30)).leases
    assert {lease.tid.group for lease in granted} == {group_id(0)}
    assert all(lease.segments == () for lease in granted)
    assert (await brokers[Role.LEARNER].prompts.waiting())[1]
    assert (await run.queues()).rejected == 2


FORBIDDEN = {
    Role.LEARNER: ("FLUSHALL", "CONFIG GET dir", "KEYS *", "GET {other}:config", "SET {other}:config x", "GET plain"),
    Role.WORKER: (
        "FLUSHALL",
        "CONFIG SET dir /tmp",
        "KEYS *",
        "SCAN 0",
        "ACL LIST",
        "SHUTDOWN",
        "REPLICAOF NO ONE",
        "SCRIPT FLUSH",
        "SCRIPT LOAD x",
        "EVAL x 0",
        "FUNCTION LIST",
        "FUNCTION DUMP",
        "FUNCTION LOAD x",
        "GET {run}:secret",
        "RPUSH {run}:payload:x x",
        "SET {run}:manifest:announced x",
        "RENAME {run}:payload:x {run}:manifest:announced",
        "SET {run}:prompt:x x",
        "SET {run}:config x",
        "GET {run}:owner",
        "UNLINK {run}:model",
        "GET {other}:config",
        "HSET {other}:hidden:meta x y",
        "SET {other}:payload:x x",
    ),
    Role.SCORER: (
        "FLUSHALL",
        "KEYS *",
        "SCAN 0",
        "FUNCTION LIST",
        "GET {run}:secret",
        "GET {run}:owner",
        "GET {run}:prompt:x",
        "GET {run}:manifest:announced",
        "HSET {run}:hidden:s:meta state stopped",
        "SET {run}:hidden:s:worker:w x",
        "SET {run}:payload:x x",
        "SET {run}:config x",
        "GET {other}:config",
        "HSET {other}:hidden:s:scoring:request:a:b x y",
    ),
    Role.OBSERVER: (
        "FLUSHALL",
        "GET {run}:manifest:announced",
        "GET {run}:payload:x",
        "HSET {run}:hidden:meta state stopped",
        "UNLINK {run}:hidden:meta",
        "FCALL x 1 {run}:hidden:",
        "GET {run}:secret",
        "GET {run}:prompt:x",
        "HGETALL {other}:hidden:meta",
    ),
}


@pytest.mark.parametrize("role", Role)
async def test_the_rest_is_refused(brokers: dict[Role, Broker], role: Role) -> None:
    tags = {"run": f"headway:{{{brokers[role].run}}}", "other": "headway:{other}"}
    for line in FORBIDDEN[role]:
        command = [part.format(**tags) for part in line.split()]
        with pytest.raises(
            BrokerError, match=r"user at unix:.* may not do this .*another role's, take the URL .*`headway acl`"
        ):
            await brokers[role]._connection.execute(*command)


async def test_a_worker_cannot_pose_as_the_learner(brokers: dict[Role, Broker]) -> None:
    run = await begin(brokers[Role.LEARNER], rules(1))
    await run.generate(4, 0)
    worker = brokers[Role.WORKER]
    with pytest.raises(BrokerError, match="may not do this"):
        await worker._connection.execute("GET", worker._connection.keys("owner"))
    digest = await brokers[Role.LEARNER]._connection.execute("GET", worker._connection.keys("owner"))
    posing = Scenario(worker, replace(run.claim, owner=Owner(run.owner.incarnation, digest.decode())))
    before = await brokers[Role.OBSERVER].status.snapshot()
    for verb in (
        lambda: posing.announce(5),
        lambda: posing.take(0),
        lambda: worker.batches.commit(posing.owner, 5),
        lambda: worker.prompts.close_feed(posing.owner),
    ):
        with pytest.raises(BrokerError, match=r"may not do this|taken run .* over"):
            await verb()
    with pytest.raises(BrokerError, match="may not do this"):
        await worker._connection.learner_script("feed", posing.owner, group_id(99), 2, 3)
    after = await brokers[Role.OBSERVER].status.snapshot()
    assert msgspec.structs.replace(after, ages=before.ages) == before
    assert await run.take(0) == groups(0, 1)


async def test_a_worker_waits_for_scripts_until_the_learner_loads_them(
    brokers: dict[Role, Broker], server: EmbeddedServer
) -> None:
    run = await begin(brokers[Role.LEARNER], rules(1))
    ask(server, "FUNCTION", "FLUSH")
    worker = Scenario(brokers[Role.WORKER], run.claim)
    leasing = asyncio.create_task(worker.lease(4, 0))
    await asyncio.sleep(0.05)
    assert not leasing.done()
    await brokers[Role.LEARNER]._connection.load_verbs()
    assert len((await leasing).leases) == 4
    ask(server, "FUNCTION", "FLUSH")
    with pytest.raises(BrokerUnavailableError, match="its function lease is not loaded: the run's learner does that"):
        await worker.lease(4, 0)


async def test_a_run_that_is_not_there_yet_is_none_for_a_worker_either(brokers: dict[Role, Broker]) -> None:
    with pytest.raises(RunNotFoundError, match=r"Runs there: our user may not list them\."):
        await brokers[Role.WORKER].status.snapshot()
    with pytest.raises(RunNotFoundError, match=r"Runs there: none\."):
        await brokers[Role.OBSERVER].status.snapshot()


async def test_users_of_all_runs(server: EmbeddedServer) -> None:
    made = admit(server, None)
    for run in ("one", "two"):
        learner = await open_broker(url_of(server, made[Role.LEARNER]), run)
        worker = await open_broker(url_of(server, made[Role.WORKER]), run)
        scenario = Scenario(worker, (await begin(learner, rules(1))).claim)
        await scenario.generate(4, 0)
        with pytest.raises(BrokerError, match="may not do this"):
            await worker._connection.execute("SET", worker._connection.keys("manifest:announced"), "x")
        await learner.close()
        await worker.close()


async def test_a_wrong_password_is_told_and_not_shown(server: EmbeddedServer, run_name: str) -> None:
    user = admit(server, run_name)[Role.WORKER]
    wrong = User(user.role, user.run, "sesame")
    with pytest.raises(BrokerUnavailableError, match="refuses our user or password") as caught:
        await open_broker(url_of(server, wrong), run_name)
    assert "sesame" not in str(caught.value)
