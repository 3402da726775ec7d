# mypy: disable-error-code="assignment"
"""A hostile program with a worker's password calls only what a worker may, and spoils only what is its own."""

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace
from redis.exceptions import RedisError, ResponseError

from headway.broker.client.leases import SubmitOutcome
from headway.broker.client.scoring import new_request_name
from headway.broker.connection.function_library import verb_flags
from headway.broker.schema import WeightVersion
from headway.broker.server.embedded import EmbeddedServer

from .audit import Auditor
from .hostile import Cast, Hostile, measures
from .scenario import broadcast_group, group_id, groups, prompt, trajectory
from .test_codec import WORKER
from .test_scoring import request
from .topologies import ask

CALLS = 4000
OWNERS = (
    *("claim", "reassert", "take", "commit", "feed", "put", "version", "state", "reject"),
    *("evaluate", "evaluation", "drop", "close_feed", "archive", "free_orphans", "garbage", "recorded", "phase"),
)
"""Functions of the run's owner."""
ALLOWED = """
auth client|no-touch client|setinfo cluster|slots exists expire fcall fcall_ro get getrange hdel hello hget hgetall
hincrby hlen hmget hset info lindex llen lrange mget object|idletime persist ping pttl quit reset rpush sadd scard set
sismember smembers srandmember srem strlen time unlink wait waitaof xadd xread zadd zcard zcount zpopmin zrange
zrangebyscore zrem zscore
"""
"""Commands of a worker's functions, and of connecting: the server refuses each key that is not a worker's."""


@pytest.mark.slow
async def test_no_other_command_is_its_own(cast: Cast, server: EmbeddedServer, run_name: str) -> None:
    """None of them may run code, list keys, watch others, or change the server."""
    listed = ask(server, "EVAL", "return redis.call('COMMAND', 'LIST')", 0)
    user, names = f"headway-worker-{run_name}", {name.decode() for name in listed}
    containers = {name.partition("|")[0] for name in names if "|" in name}
    allowed = {name for name in names - containers if may_run(server, user, name)}
    assert allowed <= {*ALLOWED.split()}, allowed - {*ALLOWED.split()}


def may_run(server: EmbeddedServer, user: str, command: str) -> bool:
    """Whether the user may run the command on some key."""
    for count in range(10):
        with suppress(ResponseError):  # the command needs more arguments
            reply = ask(server, "ACL", "DRYRUN", user, *command.split("|"), *["1"] * count)
            return b"permissions to run" not in (reply if isinstance(reply, bytes) else reply.encode())
    return False


READ = ("GET", "DUMP", "TYPE", "OBJECT ENCODING", "STRLEN", "GETRANGE {key} 0 -1", "HGETALL", "LRANGE {key} 0 -1")
WRITE = ("SET {key} x", "GETDEL", "DEL", "UNLINK", "APPEND {key} x", "SETRANGE {key} 0 x", "RENAME {key} {own}")
WRITE += (
    "RENAME {own} {key}",
    "COPY {own} {key} REPLACE",
    "EXPIRE {key} 1",
    "PERSIST",
    "HSET {key} a b",
    "RPUSH {key} x",
)
WRITE += ("SADD {key} x", "ZADD {key} 0 x", "XADD {key} * a b", "INCR", "RESTORE {key} 0 x REPLACE", "MOVE {key} 1")


async def test_it_reads_and_writes_no_key_but_what_is_meant_for_it(cast: Cast, auditor: Auditor) -> None:
    """This holds for every name, most of which the worker cannot know."""
    await cast.honest.generate(4, 0)
    await cast.worker.status.heartbeat(WORKER, 30)
    await cast.learner.versions.put_group(cast.run.owner, broadcast_group())
    (lease,) = (await cast.honest.lease(1, 0, ttl_s=30)).leases
    assert await cast.run.take(0) is not None
    saved = auditor.save()
    secret = auditor.keys.secret.encode()
    known = {key for key in saved if secret not in key and b":payload:" not in key and b":segment:" not in key}
    own = f"{cast.hostile.prefix}payload:own:0:0:x"
    meant_for_it = {"config", "verbs", "identity", "model", "broadcast", "manifest:announced"}
    for key in sorted(known):
        name = key.decode().removeprefix(cast.hostile.prefix)
        for line in (*(READ if name not in meant_for_it else ()), *WRITE):
            words = [word.format(key=key.decode(), own=own) for word in line.split()]
            if "{key}" not in line:
                words.append(key.decode())
            with pytest.raises(RedisError, match=r"permission|NOPERM|no such key"):
                cast.hostile.client.execute_command(*words)
    for name in ("hidden:", "hidden:x", "prompt:x"):
        assert cast.hostile.client.exists(cast.hostile.prefix + name) == 0
    assert {key: dump for key, (_, dump) in auditor.save().items()} == {key: dump for key, (_, dump) in saved.items()}
    assert await cast.honest.submit(lease, 0) is SubmitOutcome.ACCEPTED


@pytest.mark.parametrize("verb", OWNERS)
async def test_no_function_of_the_owner_is_its_own(cast: Cast, verb: str) -> None:
    before = await cast.learner.status.snapshot()
    for arguments in ([1, "token", ""], [2, 99, "1", "token", "", 99, "1", "", 0], [0] * 14):
        with pytest.raises(
            RedisError, match=r"ACL failure|NOPERM|user executing the script|RESTARTED|compare|nil value"
        ):
            cast.hostile.call(verb, *arguments)
    after = await cast.learner.status.snapshot()
    assert replace(after, ages=before.ages) == before


async def test_it_reads_only_prompts_that_it_has_leased(cast: Cast) -> None:
    (member, token, *_), *_ = cast.hostile.lease(1)
    assert cast.hostile.call("prompts", member, token)[0] is not None
    other = f"{group_id(1)}:0:0"
    assert cast.hostile.call("prompts", other, token, member, "x", "none:0:0", "") == [None, None, None]


async def test_it_wakes_and_puts_to_sleep_nobody_else(cast: Cast) -> None:
    await cast.learner.phases.generate(cast.run.owner)
    assert await cast.worker.phases.may_generate(WORKER.worker, 30, is_awake=False)
    cast.hostile.call("asleep", WORKER.worker, "evil")
    with pytest.raises(RedisError, match="ARGUMENT"):
        cast.hostile.call("asleep", f"{WORKER.worker} {'e' * 32}", "evil")
    assert await cast.learner.phases.train(cast.run.owner) == (WORKER.worker,)
    await cast.worker.phases.fell_asleep(WORKER.worker)
    assert await cast.learner.phases.train(cast.run.owner) == ()


async def test_no_session_can_be_read(cast: Cast, auditor: Auditor) -> None:
    """The session of a worker in quarantine cannot be read either."""
    await cast.worker.status.heartbeat(WORKER, 30)
    await cast.learner.phases.generate(cast.run.owner)
    await cast.worker.phases.may_generate(WORKER.worker, 30, is_awake=False)
    assert (await cast.honest.lease(1, 0, worker=WORKER.worker)).leases
    auditor.redis.sadd(auditor.keys.hidden("quarantined"), f"{WORKER.worker} {cast.worker.session}")
    for verb in ("workers", "snapshot", "peek", "engines_awake", "usage"):
        call = f"{cast.hostile.library}_{verb}", 1, f"{cast.hostile.prefix}hidden:of:{cast.hostile.identity}"
        with suppress(RedisError):
            assert cast.worker.session not in repr(cast.hostile.client.fcall_ro(*call))


async def test_it_asks_no_scorer_that_the_run_does_not_have(cast: Cast) -> None:
    """Otherwise invented names would leave no room for the run's own."""
    for number in range(70):
        with pytest.raises(RedisError, match=f"the run has no s{number}"):
            cast.hostile.call("score_ask", f"s{number}", "evil", "1", 30, 1, f"a{number}", b"x")
    with pytest.raises(RedisError, match="permission"):  # the learner's own call
        cast.hostile.call("score_ask", "quality", "", "", 30, 1, "a", b"x")
    name = new_request_name()
    assert await cast.worker.scoring.ask("quality", {name: request()}, ttl_s=60, hold_s=60, worker="w") == {name}
    assert [queue.scorer for queue in (await cast.learner.status.snapshot()).scoring] == ["quality"]


async def test_its_requests_leave_room_for_those_of_others_and_last_a_minute(cast: Cast, auditor: Auditor) -> None:
    """This holds if it asks under one name, under many, or under another worker's name."""
    await cast.worker.status.heartbeat(WORKER, 30)
    huge, names = b"x" * (2**23 - 8), [WORKER.worker, *(f"evil{n}" for n in range(3))]
    for name in names[1:]:
        cast.hostile.call("heartbeat", name, "evil", 30_000, b"junk", 1)

    def ask_for_much() -> None:
        for number in range(12):
            said = names[number % len(names)], "evil", 3600, 86400, f"{random.getrandbits(64):x}"
            cast.hostile.call("score_ask", "quality", *said, huge)

    honest = {new_request_name(): request(n) for n in range(20)}
    ask_for_much()
    for verbs, worker in ((cast.worker.scoring, WORKER.worker), (cast.learner.scoring, "")):
        mine = {f"{name}{worker[:1]}": asked for name, asked in honest.items()}
        assert await verbs.ask("quality", mine, ttl_s=60, hold_s=60, worker=worker) == set(mine)
        ask_for_much()
        found = await verbs.collect("quality", list(mine), ttl_s=60)
        assert {one.state for one in found.values()} == {"waiting"}
    (queue,) = (await cast.learner.status.snapshot()).scoring
    assert 1 << 25 < queue.bytes <= 1 << 26
    seconds, _ = auditor.redis.time()
    (_, latest), *_ = auditor.redis.zrevrange(auditor.keys.hidden("scoring:asked:quality"), 0, 0, withscores=True)
    assert latest < seconds + 62


async def test_a_worker_in_quarantine_asks_no_scorer(cast: Cast, auditor: Auditor) -> None:
    auditor.redis.sadd(auditor.keys.hidden("quarantined"), "evil 1")
    with pytest.raises(RedisError, match="quarantine"):
        cast.hostile.call("score_ask", "quality", "evil", "1", 30, 1, "a", b"x")


async def test_it_takes_no_swap_turn_that_others_wait_for(cast: Cast, auditor: Auditor) -> None:
    """It gets none for an unknown worker, none again and again, and none for long."""
    verbs, share, call = cast.worker.swap_turns, 0.5, cast.hostile.call
    await cast.worker.status.heartbeat(WORKER, 30)
    assert call("swap_turn", "nobody:1", "1", 600, share) == 1
    mine = f"{WORKER.worker}:1"
    assert await verbs.take(mine, share, 30)
    await verbs.give_back(mine)
    assert call("heartbeat", "evil", "s", 30_000, b"junk", 1)[0] == 1
    assert call("swap_turn", "evil:1", "s", 600, share) == 1
    assert not await verbs.take(mine, share, 30)
    call("end_swap_turn", "evil:1")
    assert call("swap_turn", "evil:2", "s", 600, share) == 0, "the other one waits"
    assert await verbs.take(mine, share, 30)
    await verbs.give_back(mine)
    assert call("swap_turn", "evil:3", "s", 600, share) == 1
    assert not await verbs.take(mine, share, 30)
    auditor.redis.zincrby(auditor.keys.hidden("turns:begun"), -61, "evil:3")
    assert call("swap_turn", "evil:3", "s", 600) == 0, "a minute is over"
    assert await verbs.take(mine, share, 30)


class Fuzz:
    """Calls of every function with arguments that may do damage."""

    def __init__(self, hostile: Hostile) -> None:
        self._hostile = hostile
        self._random = random.Random(7)
        self._held: list[list[bytes]] = []
        self.refused = self.answered = 0

    def strike(self) -> None:
        verb = self._random.choice(sorted(verb_flags()))
        if verb == "lease" or self._random.random() < 0.05:
            with suppress(RedisError):
                self._held = (self._hostile.lease(self._random.randrange(4), 0.2) + self._held)[:16]
        try:
            self._hostile.call(verb, *self._arguments(verb))
            self.answered += 1
        except RedisError:
            self.refused += 1

    def _arguments(self, verb: str) -> list[Any]:
        held = self._random.choice(self._held) if self._held else [b"0000-00000000:0:0", b"x"]
        member, token = held[0].decode(), held[1].decode()
        with suppress(RedisError):
            self._hostile.store(f"payload:{member}:{token}", b"junk", is_new=True)
            self._hostile.store(f"segment:{member}:1", b"junk", is_new=True)
        usual: dict[str, list[Any]] = {
            "submit": [0, member, token, "", measures(4, 1, 0, 4)],
            "append": [member, token, 0, f"segment:{member}:1", 30, measures(4, 1, 0, 3)],
            "release": [member, token],
            "discard": [member, token, -1, "reason", b"head"],
            "intend": [member, token, "ab cd"],
            "mark_lost": [member, token, "reason", b"head"],
            "swap_turn": [token, "1", 30, 0.5],
            "awake": ["evil", "s", 30, 1],
            "asleep": ["evil", "s"],
            "evaluation_lease": ["1.0", 2, 0.1, "abc", "evil 1", "", 0, "abc"],
            "evaluation_submit": ["1.0", self._random.randrange(4), "abc", "1.0", "1.0", 1, 0.5, 3, "evil 1"],
            "evaluation_release": ["1.0", self._random.randrange(4), "abc"],
            "heartbeat": ["evil", "s", 1000, b"junk", 1, 30, member, token],
            "score_ask": ["quality", "evil", "s", 30, 1, "abc", b"junk"],
            "score_collect": ["quality", 30, 1, "abc", "abd"],
            "rendezvous_set": ["m", "evil", "s", "set", "key", b"word"],
            "rendezvous_get": ["m", "", "key", "evil", "key", "+", "key"],
        }
        arguments = usual.get(verb, [1, "x", "", 0, 5, "x", 1, 1, "", 0])
        for place in range(len(arguments)):
            if self._random.random() < 0.25:
                arguments[place] = self._junk()
        if self._random.random() < 0.2:
            arguments = arguments[: self._random.randrange(len(arguments) + 1)]
        return arguments

    def _junk(self) -> Any:
        group, sample = group_id(self._random.randrange(12)), self._random.randrange(3)
        numbers = [-1, 0, 1, 2, 1e300, "nan", "inf", "0x10", "1e5", 1 << 62]
        texts = [
            "",
            " ",
            b"\xff\x00",
            b"\xff" * 20,
            measures(4, 9, 1, 1),
            "x" * 5000,
            group,
            f"prompt:{group}",
            "*",
            "a:b:c",
            ":0:0",
            f"{group}:00:0",
        ]
        return self._random.choice([*numbers, *texts, f"{group}:0:{sample}"])


@pytest.mark.slow
async def test_a_flood_of_calls_costs_no_group_and_trains_none_twice(cast: Cast, auditor: Auditor) -> None:
    fuzz, trained = Fuzz(cast.hostile), list[str]()
    await cast.learner.evaluations.ask(cast.run.owner, WeightVersion(1, 0), [prompt(100), prompt(101)], 2)
    for _ in range(CALLS // 40):
        for _ in range(40):
            fuzz.strike()
        for lease in (await cast.honest.lease(2, 0, ttl_s=30)).leases:
            outcome = await cast.worker.leases.submit(lease, trajectory(lease, 0))
            assert outcome is SubmitOutcome.ACCEPTED
        auditor.look().check()
    assert min(fuzz.refused, fuzz.answered) > CALLS // 20
    await cast.learner.prompts.close_feed(cast.run.owner)
    async with asyncio.timeout(240):
        for step in range(6):
            if step:
                await cast.run.announce(step)
            while (batch := await cast.run.take(step)) is None:
                for lease in (await cast.honest.lease(8, step, ttl_s=30)).leases:
                    await cast.worker.leases.submit(lease, trajectory(lease, step))
                await asyncio.sleep(0.02)
            trained += batch
            await cast.learner.batches.commit(cast.run.owner, step + 1)
    assert sorted(trained) == groups(*range(12))
