"""The server dies, with and without losing acknowledged writes, and the learner re-asserts its knowledge."""

import asyncio
import shutil
from pathlib import Path

import pytest

from headway.broker import Broker, open_broker
from headway.broker.client import weights
from headway.broker.client.learner import CheckpointGroups, CheckpointMark, NotReady
from headway.broker.client.leases import SubmitOutcome
from headway.broker.connection.connection import Connection
from headway.broker.errors import FencedError, ServerRestartedError
from headway.broker.schema import Lease, Owner, TrajectoryId, WeightVersion
from headway.broker.schema.weights import BroadcastGroup
from headway.broker.server.embedded import EmbeddedServer
from headway.broker.wire.codec import decode
from tests.processes import kill, until_written

from .scenario import Scenario, begin, broadcast_group, group_id, groups, manifest, of_no_run, prompt, rules


def tids(*positions: int) -> list[TrajectoryId]:
    return [TrajectoryId(group_id(position), 0, sample) for position in positions for sample in range(2)]


async def feed(run: Scenario, first: int = 0, end: int = 40) -> int:
    return await run.broker.prompts.feed([prompt(i) for i in range(first, end)], run.owner)


async def reassert(run: Scenario, step: int, committed: list[str], pinned: dict[int, list[TrajectoryId]]) -> None:
    announced = WeightVersion(run.owner.incarnation, step)
    await run.broker.batches.reassert(run.owner, announced=announced, committed_groups=committed, pinned=pinned)


async def test_a_killed_server_comes_back_with_its_data(broker: Broker, server: EmbeddedServer) -> None:
    run = await begin(broker, rules(1))
    leases = (await run.lease(8, 0)).leases
    await run.submit_all(leases[:5], 0)
    assert await run.take(0) == groups(0, 1)
    known = broker._connection.server_id
    kill(server)
    server.start()
    await run.submit_all(leases[5:7], 0)
    for verb in (run.take(0), run.announce(1), broker.batches.commit(run.owner, 1), feed(run)):
        with pytest.raises(ServerRestartedError, match=f"no longer {known}"):
            await verb
    await reassert(run, 0, [], {0: tids(0, 1)})
    assert await run.take(0) == groups(0, 1)
    await run.announce(1)
    await run.submit_all(leases[7:], 0)
    assert await run.take(1) == groups(2, 3)
    assert await broker.batches.commit(run.owner, 2) == 4
    assert (await run.queues()).payload_bytes == 0


async def test_an_offer_that_outlived_its_server_is_no_regression(broker: Broker, server: EmbeddedServer) -> None:
    run = await begin(broker, rules(1))
    await broker.versions.offer(run.owner, manifest(1, 1))
    kill(server)
    server.start()
    await reassert(run, 0, [], {})
    assert await broker.versions.current() == (WeightVersion(1, 1), WeightVersion(1, 0))
    await run.announce(0)
    assert await broker.versions.current() == (WeightVersion(1, 1), WeightVersion(1, 0))
    await run.announce(1)


async def test_an_announcement_whose_reply_the_crash_swallowed_stays(broker: Broker, server: EmbeddedServer) -> None:
    run = await begin(broker, rules(1))
    known = dict(broker.versions._put)
    await run.announce(1)
    broker.versions._put = known  # stands for a lost reply
    kill(server)
    server.start()
    await reassert(run, 0, [], {})
    assert of_no_run(await broker.versions.announced()) == manifest(1, 1)


async def test_what_is_restored_replaces_nothing_that_is_stored_meanwhile(
    broker: Broker, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner publishes in one thread and re-asserts in another."""
    run = await begin(broker, rules(1))
    await broker.versions.put_group(run.owner, broadcast_group(1))
    is_restoring, goes_on, put_blob = asyncio.Event(), asyncio.Event(), weights.put_blob

    async def slow(connection: Connection, owner: Owner, key: str, blob: bytes) -> None:
        if of_no_run(decode(blob, BroadcastGroup)) == broadcast_group(1):
            is_restoring.set()
            await goes_on.wait()
        await put_blob(connection, owner, key, blob)

    monkeypatch.setattr(weights, "put_blob", slow)
    kill(server)
    server.start()
    restoring = asyncio.create_task(reassert(run, 0, [], {}))
    await is_restoring.wait()
    storing = asyncio.create_task(broker.versions.put_group(run.owner, broadcast_group(2)))
    await asyncio.wait([storing], timeout=0.5)
    goes_on.set()
    await asyncio.gather(restoring, storing)
    assert of_no_run(await broker.versions.group()) == broadcast_group(2)


@pytest.fixture
def rolled_back(server: EmbeddedServer, tmp_path: Path) -> "RolledBack":
    return RolledBack(server, tmp_path)


class RolledBack:
    """A server that forgets everything since `remember` when it is killed."""

    def __init__(self, server: EmbeddedServer, tmp_path: Path) -> None:
        self._server = server
        self._data = tmp_path / "server"
        self._kept = tmp_path / "kept"

    def remember(self) -> None:
        until_written(self._server)
        shutil.copytree(self._data / "appendonlydir", self._kept)

    def kill_and_restart(self) -> None:
        kill(self._server)
        shutil.rmtree(self._data / "appendonlydir")
        if self._kept.exists():
            shutil.copytree(self._kept, self._data / "appendonlydir")
        self._server.start()


async def test_what_a_rolled_back_server_forgot_is_neither_lost_nor_trained_twice(
    broker: Broker, rolled_back: RolledBack
) -> None:
    run = await begin(broker, rules(1), fed=12)
    early = (await run.lease(4, 0)).leases
    rolled_back.remember()  # groups 0 and 1 are leased, nothing is submitted, weights 0 are announced
    await run.submit_all(early, 0)
    trained = []
    for step in range(3):
        await run.generate(100, step)
        trained.append(await run.take(step))
        await run.announce(step + 1)
    assert trained == [groups(0, 1), groups(2, 3), groups(4, 5)]
    await broker.batches.commit(run.owner, 1)
    rolled_back.kill_and_restart()

    with pytest.raises(ServerRestartedError):
        await run.take(3)
    await reassert(run, 3, groups(0, 1), {1: tids(2, 3), 2: tids(4, 5)})
    assert (await broker.versions.current())[1] == WeightVersion(1, 3)
    restored = await broker.versions.announced()
    assert of_no_run(restored) == manifest(1, 3)
    assert await feed(run, 0, 12) == 0  # the groups that it held in the pool; the trained ones are known
    assert await run.submit(early[0], 0) is SubmitOutcome.FENCED
    await broker.prompts.close_feed(run.owner)
    for step in range(3, 6):
        await run.generate(100, step)
        trained.append(await run.take(step))
        await run.announce(step + 1)
    assert trained == [groups(2 * step, 2 * step + 1) for step in range(6)]
    await broker.batches.commit(run.owner, 6)
    queues = await run.queues()
    assert (queues.payload_bytes, queues.pinned, queues.open, queues.admitted) == (0, 0, 0, 12)


async def test_a_server_that_lost_everything_is_filled_again(broker: Broker, rolled_back: RolledBack) -> None:
    run = await begin(broker, rules(1), fed=8)
    await broker.versions.put_group(run.owner, broadcast_group(1))
    await run.generate(100, 0)
    assert await run.take(0) == groups(0, 1)
    await run.announce(1)
    rolled_back.kill_and_restart()
    await reassert(run, 1, [], {0: tids(0, 1)})
    assert of_no_run(await broker.versions.group()) == broadcast_group(1)
    assert await broker.status.config() == b"recipe"
    assert await feed(run, 0, 8) == 6
    reply = await run.lease(100, 1)
    assert {lease.tid.group for lease in reply.leases} == set(groups(2, 3, 4, 5))  # due at steps 1 and 2
    assert reply.reason == "capacity"
    # The trained batch cannot be replayed, but no worker generates it while this learner lives. Its successor,
    # whose checkpoint does not contain it, must begin it anew.
    resumed = await begin(broker, rules(1), fed=8, checkpoint=CheckpointMark(1, 0), resume=True)
    assert await resumed.take(0) is None
    assert resumed.not_ready is NotReady.REWIND
    await resumed.announce(0)
    assert (await broker.versions.current())[1] == WeightVersion(2, 0)
    await broker.leases.release(reply.leases)
    for _ in range(2):
        fresh = await broker.leases.lease("v", WeightVersion(2, 0), 100, 30)
        await resumed.submit_all(fresh.leases, 0)
    taken = await resumed.take(0)
    assert taken == groups(0, 1)


async def test_a_rewind_that_the_server_forgot_is_made_again(broker: Broker, rolled_back: RolledBack) -> None:
    run = await begin(broker, rules(1))
    await run.announce(1)
    early = (await run.lease(8, 1)).leases
    await run.submit_all(early[:2], 1)
    resumed = await begin(broker, rules(1), checkpoint=CheckpointMark(1, 0), resume=True)
    rolled_back.remember()
    await resumed.announce(0)
    rolled_back.kill_and_restart()
    await reassert(resumed, 0, [], {})
    assert (await broker.versions.current())[1] == WeightVersion(2, 0)
    assert (await resumed.queues()).requeued_stale == 1
    assert await resumed.submit(early[2], 1) is SubmitOutcome.FENCED


async def test_reassertion_yields_to_a_newer_learner(broker: Broker, url: str, server: EmbeddedServer) -> None:
    old = await begin(broker, rules(1))
    other = await open_broker(url, broker.run)
    new = await begin(other, rules(1))
    kill(server)
    server.start()
    with pytest.raises(FencedError):
        await reassert(old, 0, [], {})
    await reassert(new, 0, [], {})
    await other.close()


async def test_what_was_submitted_and_forgotten_is_submitted_again(broker: Broker, rolled_back: RolledBack) -> None:
    run = await begin(broker, rules(0))
    leases = (await run.lease(4, 0)).leases
    await run.submit_all(leases[:1], 0)
    rolled_back.remember()
    await run.submit_all(leases[1:], 0)
    rolled_back.kill_and_restart()
    await reassert(run, 0, [], {})
    assert await run.take(0) is None
    assert await broker.leases.confirm() == 3
    assert await broker.leases.confirm() == 0
    assert await run.take(0) == groups(0, 1)
    queues = await run.queues()
    assert (queues.leased, queues.retry, queues.fenced) == (0, 0, 0)


async def test_submissions_whose_leases_were_forgotten_too_still_count(broker: Broker, rolled_back: RolledBack) -> None:
    """The round decides: a worker that leased the sample in the meantime comes too late."""
    run = await begin(broker, rules(0))
    (first,) = (await run.lease(1, 0)).leases
    await broker.leases.release([first])
    rolled_back.remember()  # the group is admitted, and no worker holds a sample
    await run.generate(4, 0)
    rolled_back.kill_and_restart()
    await reassert(run, 0, [], {})
    again = (await run.lease(2, 0, worker="v")).leases
    assert await broker.leases.confirm() == 2  # the admitted group's samples
    assert await run.submit(again[0], 0) is SubmitOutcome.FENCED
    await run.generate(4, 0)
    assert await run.take(0) == groups(0, 1)
    assert (await run.queues()).payload_bytes > 0


async def test_durable_submissions_are_not_kept(broker: Broker, server: EmbeddedServer) -> None:
    run = await begin(broker, rules(0))
    await run.generate(4, 0)
    assert len(broker.leases._submissions) == 4
    assert await broker.leases.confirm() == 0
    assert len(broker.leases._submissions) == 0
    kill(server)
    server.start()
    await reassert(run, 0, [], {})
    assert await run.take(0) == groups(0, 1)  # the submissions are durable


async def test_weights_whose_announcement_was_lost_are_abandoned_too(broker: Broker, rolled_back: RolledBack) -> None:
    """Learner and server died together, and the server does not even know the current weights."""
    some = rules(4, groups_per_step=1)
    run = await begin(broker, some, group_size=1)
    flying = (await run.lease(5, 0)).leases
    await run.submit(flying[0], 0)
    assert await run.take(0, 1) == groups(0)
    await run.announce(1)
    rolled_back.remember()
    await run.submit(flying[1], 0)
    assert await run.take(1, 1) == groups(1)
    await run.announce(2)  # a checkpoint contains groups 0 and 1
    await run.submit(flying[2], 0)
    assert await run.take(2, 1) == groups(2)
    await run.announce(3)
    rolled_back.kill_and_restart()
    claim = await broker.batches.claim(
        checkpoint=CheckpointMark(1, 2),
        rules=some,
        config=b"recipe",
        resume=True,
        contains=CheckpointGroups(group_id(2), ()),
    )
    resumed = Scenario(broker, claim)
    await resumed.announce(2)
    assert await resumed.submit(flying[4], 0) is SubmitOutcome.ACCEPTED
    assert await resumed.take(2, 1) == groups(4)  # another batch than before: weights 3 are others
    await resumed.announce(3)
    assert await resumed.submit(flying[3], 0, WeightVersion(1, 3)) is SubmitOutcome.FENCED
    assert await resumed.submit(flying[2], 0) is SubmitOutcome.ACCEPTED


async def test_a_claim_that_the_server_forgot_abandons_the_same_weights_again(
    broker: Broker, rolled_back: RolledBack
) -> None:
    some = rules(4, groups_per_step=1)
    run = await begin(broker, some, group_size=1)
    flying = (await run.lease(5, 0)).leases
    await run.submit(flying[0], 0)
    assert await run.take(0, 1) == groups(0)
    await run.announce(1)
    rolled_back.remember()
    for step in (2, 3):
        await run.announce(step)
    resumed = await begin(broker, some, checkpoint=CheckpointMark(1, 1), resume=True)
    rolled_back.kill_and_restart()
    await reassert(resumed, 1, [group_id(0)], {})
    assert await broker._connection.execute("HGETALL", broker._connection.keys.hidden("forks")) == {b"2": b"1"}
    for step in (1, 2, 3):
        await resumed.announce(step)
    assert await resumed.submit(flying[1], 0, WeightVersion(1, 3)) is SubmitOutcome.FENCED
    assert await resumed.submit(flying[2], 0) is SubmitOutcome.ACCEPTED


async def test_what_the_claimed_checkpoint_contains_stays_trained(broker: Broker, rolled_back: RolledBack) -> None:
    """Server and learner die together, then the server loses the next claim, too."""
    some = rules(4, groups_per_step=1)
    run = await begin(broker, some, group_size=1)
    await run.generate(3, 0)
    rolled_back.remember()
    assert await run.take(0, 1) == groups(0)
    await run.announce(1)
    assert await run.take(1, 1) == groups(1)
    await run.announce(2)
    claim = await broker.batches.claim(
        checkpoint=CheckpointMark(1, 2),
        rules=some,
        config=b"recipe",
        resume=True,
        contains=CheckpointGroups(group_id(1), (group_id(1),)),
    )
    resumed = Scenario(broker, claim)
    rolled_back.kill_and_restart()
    await reassert(resumed, 2, [], {})
    assert await resumed.take(2, 1) == groups(2)
    queues = await resumed.queues()
    assert (queues.pinned, queues.ready) == (1, 0)
    assert await broker.prompts.feed([prompt(0, 1), prompt(1, 1)], resumed.owner) == 0


async def test_a_claim_that_was_lost_with_what_came_after_it_abandons_as_much(
    broker: Broker, rolled_back: RolledBack
) -> None:
    some = rules(4, groups_per_step=1)
    run = await begin(broker, some, group_size=1)
    await run.generate(3, 0)
    assert await run.take(0, 1) == groups(0)
    await run.announce(1)
    rolled_back.remember()
    resumed = await begin(broker, some, checkpoint=CheckpointMark(1, 1), resume=True)
    await resumed.announce(1)
    assert await resumed.take(1, 1) == groups(1)
    await resumed.announce(2)
    await broker.batches.commit(resumed.owner, 2, [group_id(1)])
    rolled_back.kill_and_restart()
    await reassert(resumed, 2, [group_id(0), group_id(1)], {})
    assert await broker._connection.execute("HGETALL", broker._connection.keys.hidden("forks")) == {b"2": b"1"}


async def test_a_batch_whose_change_was_lost_is_again_what_was_taken(broker: Broker, rolled_back: RolledBack) -> None:
    run = await begin(broker, rules(2))
    await run.generate(8, 0)
    assert await run.take(0) == groups(0, 1)
    rolled_back.remember()
    await broker.batches.drop(run.owner, 0, [group_id(0)])
    assert await run.take(0) == groups(1, 2)
    rolled_back.kill_and_restart()
    taken = [TrajectoryId(group, 0, sample) for group in groups(1, 2) for sample in range(2)]
    await reassert(run, 0, [], {0: taken})
    assert await run.take(0) == groups(1, 2)
    await run.announce(1)
    assert await broker.batches.commit(run.owner, 1) == 2
    assert await run.take(1) == groups(0, 3)


STEPS_OF_ONE = rules(4, groups_per_step=1)


async def five_leased(broker: Broker, submitted: int) -> tuple[Scenario, list[Lease]]:
    """Return a run with one sample a step: five are leased by version 0, and the first so many are submitted."""
    run = await begin(broker, STEPS_OF_ONE, group_size=1)
    flying = (await run.lease(5, 0)).leases
    await run.submit_all(flying[:submitted], 0)
    return run, list(flying)


async def test_a_step_that_is_not_reproduced_stays_abandoned_though_the_server_forgot_it(
    broker: Broker, rolled_back: RolledBack
) -> None:
    """A resumed learner gives up a batch that an earlier one trained; the server loses that, and knows the claim."""
    run, flying = await five_leased(broker, submitted=3)
    for step in range(3):
        assert await run.take(step, 1) == groups(step)
        await run.announce(step + 1)
    resumed = await begin(broker, STEPS_OF_ONE, group_size=1, checkpoint=CheckpointMark(1, 1), resume=True)
    rolled_back.remember()
    await broker.batches.drop(resumed.owner, 1, [group_id(1)])
    await resumed.announce(1)
    assert await resumed.take(1, 1) == groups(2)
    for step in (2, 3, 4):  # by then no announcement tells that the weights went back
        await resumed.announce(step)
    rolled_back.kill_and_restart()
    await reassert(resumed, 4, [], {1: [TrajectoryId(group_id(2), 0, 0)]})
    assert await resumed.submit(flying[3], 0, WeightVersion(1, 3)) is SubmitOutcome.FENCED
    assert await resumed.submit(flying[4], 0, WeightVersion(1, 1)) is SubmitOutcome.ACCEPTED


async def test_what_a_rolled_back_server_has_pinned_is_not_believed_to_be_what_was_trained(
    broker: Broker, rolled_back: RolledBack
) -> None:
    """Learner and server die together, and the server forgets that the step got another batch in the end."""
    run, flying = await five_leased(broker, submitted=2)
    assert await run.take(0, 1) == groups(0)
    rolled_back.remember()
    await broker.batches.drop(run.owner, 0, [group_id(0)])
    assert await run.take(0, 1) == groups(1)
    await run.announce(1)
    rolled_back.kill_and_restart()
    resumed = await begin(broker, STEPS_OF_ONE, group_size=1, checkpoint=CheckpointMark(1, 0), resume=True)
    assert await resumed.take(0, 1) == groups(0)  # weights 1 are others than those that were announced
    await resumed.announce(1)
    assert await resumed.submit(flying[2], 0, WeightVersion(1, 1)) is SubmitOutcome.FENCED
    assert await resumed.submit(flying[3], 0) is SubmitOutcome.ACCEPTED
