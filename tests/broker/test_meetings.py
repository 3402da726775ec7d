"""Messages between members of a broadcast group and the learner, and the bell."""

import asyncio

from broker import Broker
from broker.client.meetings import LIFETIME_S
from broker.server.embedded import EmbeddedServer

from .scenario import begin, broadcast_group, manifest, rules
from .topologies import ask


async def ring_and_hear(broker: Broker) -> None:
    """Every new version and group wakes all waiting clients, and late ones too; only a group renames the bell."""
    run, meetings, versions = await begin(broker, rules(0)), broker.meetings, broker.versions
    heard, before = await meetings.wait_for_bell(b"0"), await versions.glance()
    assert heard != b"0"
    for ring in (
        versions.offer(run.owner, manifest(1, 1)),
        run.announce(1),
        versions.put_group(run.owner, broadcast_group()),
    ):
        waiting = [asyncio.create_task(meetings.wait_for_bell(heard)) for _ in range(3)]
        await ring
        rung, *others = await asyncio.gather(*waiting)
        assert others == [rung, rung]
        assert await meetings.wait_for_bell(b"0") == rung > heard
        heard, glance = rung, await versions.glance()
        assert glance != before
        assert (glance.group != before.group) == (
            glance.announced == before.announced and glance.offered == before.offered
        )
        before = glance


async def test_the_bell_wakes_all_who_wait_and_is_not_missed(broker: Broker) -> None:
    await ring_and_hear(broker)


async def test_a_word_is_heard_in_its_meeting_until_that_ends(
    broker: Broker, server: EmbeddedServer, run_name: str
) -> None:
    meetings = broker.meetings
    await meetings.say("one", "key", b"learner", leads=True)
    await meetings.say("one", "key", b"member", leads=False)
    await meetings.say("one", "other", b"member", leads=False)
    assert await meetings.hear("one", ["key", "other", "third"]) == [b"learner", b"member", None]
    assert await meetings.hear("two", ["key"]) == [None]
    for key in ("meeting:one", "joining:one"):
        assert 0 < ask(server, "TTL", f"headway:{{{run_name}}}:{key}") <= LIFETIME_S
    assert await meetings.say_once("one", "name", b"first") == b"first"
    assert await meetings.say_once("one", "name", b"second") == b"first"
    assert await meetings.forget("one", ["key"], leads=True) == 2
    await meetings.end("one")
    assert await meetings.hear("one", ["other", "name"]) == [None, None]
    assert ask(server, "KEYS", "*") == []
    assert await meetings.count("one", "number", 2) == 2  # a late member
    assert 0 < ask(server, "TTL", f"headway:{{{run_name}}}:joining:one") <= LIFETIME_S
    await meetings.end("one")
