"""Messages between members of a broadcast group and the learner, and the bell."""

import asyncio

import pytest
from msgspec.structs import replace

from headway.broker import Broker, open_broker
from headway.broker.client.meetings import LEARNER, LIFETIME_S, NUMBERS
from headway.broker.errors import BrokerError
from headway.broker.server.embedded import EmbeddedServer

from .scenario import begin, broadcast_group, manifest, rules
from .test_codec import WORKER as SOME_WORKER
from .topologies import ask

WORKER = replace(SOME_WORKER, worker="w")


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


async def test_a_word_is_heard_as_its_speakers_until_the_meeting_ends(
    broker: Broker, server: EmbeddedServer, run_name: str
) -> None:
    await begin(broker, rules(0))
    await broker.status.heartbeat(WORKER, 30)
    before, meetings = set(ask(server, "KEYS", "*")), broker.meetings
    for name in ("one", "two"):
        await meetings.begin(name, ["v", "w"], {"verdict": b"open"})
    assert await meetings.say("one", LEARNER, "key", b"learner")
    assert await meetings.say("one", "w", "key", b"member")
    asked = [(LEARNER, "key"), ("w", "key"), ("v", "key"), (LEARNER, "verdict"), ("w", "verdict")]
    assert await meetings.hear("one", asked) == [b"learner", b"member", None, b"open", None]
    assert await meetings.hear("two", asked) == [None, None, None, b"open", None]
    assert (await meetings.count("one", "w", "n", 2), await meetings.count("one", LEARNER, "n", 3)) == (2, 5)
    assert await meetings.hear("one", [(NUMBERS, "n")]) == [b"5"]
    for key in set(ask(server, "KEYS", "*")) - before:
        assert 0 < ask(server, "TTL", key) <= LIFETIME_S
    assert await meetings.say_once("one", "w", "name", b"first") == b"first"
    assert await meetings.say_once("one", "w", "name", b"second") == b"first"
    assert await meetings.forget("one", "w", [("w", "name"), (LEARNER, "key")]) == 1
    assert await meetings.forget("one", LEARNER, [("w", "key"), (LEARNER, "key"), (LEARNER, "other")]) == 2
    assert await meetings.say("one", "w", "late", b"")
    for name in ("one", "two"):
        await meetings.end(name, ["v", "w"])
    assert await meetings.hear("one", [("w", "late"), (LEARNER, "verdict")]) == [None, None]
    assert set(ask(server, "KEYS", "*")) == before
    assert not await meetings.say("one", "w", "later", b"")  # it is over


@pytest.mark.parametrize("who", ["stranger", "dead", "taken"])
@pytest.mark.parametrize("manner", ["set", "once", "add", "drop"])
async def test_a_process_says_words_in_no_other_name(
    broker: Broker, server: EmbeddedServer, who: str, manner: str
) -> None:
    """`stranger` lives and is no member, `dead` is a member that does not live, `taken` is another process."""
    await begin(broker, rules(0))
    await broker.meetings.begin("m", ["w", "dead", "taken"], {})
    other = await open_broker(server.url, broker.run)
    for name in ("stranger", "w"):
        await broker.status.heartbeat(replace(WORKER, worker=name), 30)
    await other.status.heartbeat(replace(WORKER, worker="taken"), 30)
    await other.close()
    before = set(ask(server, "KEYS", "*"))
    assert await broker._connection.script("say", "m", who, broker._connection.session, manner, "k", b"1") is None
    for no_worker in (LEARNER, NUMBERS, "w v", "w:v"):
        with pytest.raises(BrokerError, match="worker"):
            await broker._connection.script("say", "m", no_worker, broker._connection.session, manner, "k", b"1")
    assert set(ask(server, "KEYS", "*")) == before


@pytest.mark.parametrize(("key", "word"), [("k" * 301, b""), ("k", b"x" * 65_537), ("another", b"1")])
async def test_a_members_words_are_bounded(broker: Broker, key: str, word: bytes) -> None:
    await begin(broker, rules(0))
    await broker.meetings.begin("m", ["w"], {})
    await broker.status.heartbeat(WORKER, 30)
    for n in range(256):
        assert await broker.meetings.say("m", "w", f"{n}", b"")
    with pytest.raises(BrokerError, match="out of bounds"):
        await broker.meetings.say("m", "w", key, word)
    assert await broker.meetings.say("m", "w", "0", b"again")
