"""Messages between members of a broadcast group and the learner, and the bell."""

import asyncio

import pytest
from msgspec.structs import replace

from headway.broker import Broker, open_broker
from headway.broker.client.weights import LEARNER, LIFETIME_S, NUMBERS
from headway.broker.errors import BrokerError
from headway.broker.server.embedded import EmbeddedServer

from .scenario import begin, broadcast_group, manifest, rules
from .test_codec import WORKER as SOME_WORKER
from .topologies import ask

WORKER = replace(SOME_WORKER, worker="w")


async def notify_and_receive(broker: Broker) -> None:
    """Every new version and group wakes all waiting clients, and late ones too; only a group renames the bell."""
    run, rendezvous, versions = await begin(broker, rules(0)), broker.rendezvous, broker.versions
    heard, before = await rendezvous.wait_for_notification(b"0"), await versions.peek()
    assert heard != b"0"
    for ring in (
        versions.offer(run.owner, manifest(1, 1)),
        run.announce(1),
        versions.put_group(run.owner, broadcast_group()),
    ):
        waiting = [asyncio.create_task(rendezvous.wait_for_notification(heard)) for _ in range(3)]
        await ring
        rung, *others = await asyncio.gather(*waiting)
        assert others == [rung, rung]
        assert await rendezvous.wait_for_notification(b"0") == rung > heard
        heard, peeked = rung, await versions.peek()
        assert peeked != before
        assert (peeked.group != before.group) == (
            peeked.announced == before.announced and peeked.offered == before.offered
        )
        before = peeked


async def test_the_bell_wakes_all_who_wait_and_is_not_missed(broker: Broker) -> None:
    await notify_and_receive(broker)


async def test_a_word_is_heard_as_its_speakers_until_the_meeting_ends(
    broker: Broker, server: EmbeddedServer, run_name: str
) -> None:
    await begin(broker, rules(0))
    await broker.status.heartbeat(WORKER, 30)
    before, rendezvous = set(ask(server, "KEYS", "*")), broker.rendezvous
    for name in ("one", "two"):
        await rendezvous.create(name, ["v", "w"], {"verdict": b"open"})
    assert await rendezvous.set("one", LEARNER, "key", b"learner")
    assert await rendezvous.set("one", "w", "key", b"member")
    asked = [(LEARNER, "key"), ("w", "key"), ("v", "key"), (LEARNER, "verdict"), ("w", "verdict")]
    assert await rendezvous.get("one", asked) == [b"learner", b"member", None, b"open", None]
    assert await rendezvous.get("two", asked) == [None, None, None, b"open", None]
    assert (await rendezvous.add("one", "w", "n", 2), await rendezvous.add("one", LEARNER, "n", 3)) == (2, 5)
    assert await rendezvous.get("one", [(NUMBERS, "n")]) == [b"5"]
    for key in set(ask(server, "KEYS", "*")) - before:
        assert 0 < ask(server, "TTL", key) <= LIFETIME_S
    assert await rendezvous.set_once("one", "w", "name", b"first") == b"first"
    assert await rendezvous.set_once("one", "w", "name", b"second") == b"first"
    assert await rendezvous.delete("one", "w", [("w", "name"), (LEARNER, "key")]) == 1
    assert await rendezvous.delete("one", LEARNER, [("w", "key"), (LEARNER, "key"), (LEARNER, "other")]) == 2
    assert await rendezvous.set("one", "w", "late", b"")
    for name in ("one", "two"):
        await rendezvous.remove(name, ["v", "w"])
    assert await rendezvous.get("one", [("w", "late"), (LEARNER, "verdict")]) == [None, None]
    assert set(ask(server, "KEYS", "*")) == before
    assert not await rendezvous.set("one", "w", "later", b"")  # it is over


@pytest.mark.parametrize("who", ["stranger", "dead", "taken"])
@pytest.mark.parametrize("manner", ["set", "once", "add", "drop"])
async def test_a_process_says_words_in_no_other_name(
    broker: Broker, server: EmbeddedServer, who: str, manner: str
) -> None:
    """`stranger` lives and is no member, `dead` is a member that does not live, `taken` is another process."""
    await begin(broker, rules(0))
    await broker.rendezvous.create("m", ["w", "dead", "taken"], {})
    other = await open_broker(server.url, broker.run)
    for name in ("stranger", "w"):
        await broker.status.heartbeat(replace(WORKER, worker=name), 30)
    await other.status.heartbeat(replace(WORKER, worker="taken"), 30)
    await other.close()
    before = set(ask(server, "KEYS", "*"))
    assert (
        await broker._connection.script("rendezvous_set", "m", who, broker._connection.session, manner, "k", b"1")
        is None
    )
    for no_worker in (LEARNER, NUMBERS, "w v", "w:v"):
        with pytest.raises(BrokerError, match="worker"):
            await broker._connection.script(
                "rendezvous_set", "m", no_worker, broker._connection.session, manner, "k", b"1"
            )
    assert set(ask(server, "KEYS", "*")) == before


@pytest.mark.parametrize(("key", "word"), [("k" * 301, b""), ("k", b"x" * 65_537), ("another", b"1")])
async def test_a_members_words_are_bounded(broker: Broker, key: str, word: bytes) -> None:
    await begin(broker, rules(0))
    await broker.rendezvous.create("m", ["w"], {})
    await broker.status.heartbeat(WORKER, 30)
    for n in range(256):
        assert await broker.rendezvous.set("m", "w", f"{n}", b"")
    with pytest.raises(BrokerError, match="out of bounds"):
        await broker.rendezvous.set("m", "w", key, word)
    assert await broker.rendezvous.set("m", "w", "0", b"again")
