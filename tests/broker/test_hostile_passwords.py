"""Holders of one role's password, with plain clients: they list no names, read no secret and spoil no other role's
work, and neither do two that put their passwords together."""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
from msgspec.structs import replace
from redis.exceptions import RedisError, ResponseError

from headway.broker.client.supervision import KEPT_S, PLACES
from headway.broker.connection.function_library import verb_flags
from headway.broker.schema import WeightVersion
from headway.broker.schema.status import PoolInfo
from headway.broker.server.access import Role, User, users
from headway.broker.server.embedded import EmbeddedServer
from headway.broker.wire.codec import encode

from .hostile import Cast
from .scenario import broadcast_group, group_id, prompt
from .test_access import HOLDER, url_of
from .test_codec import STEP
from .test_hostile_worker import may_run
from .test_rendezvous_store import WORKER
from .topologies import ask

CONNECTION = "auth client|no-touch client|setinfo cluster|slots hello ping quit reset time"
ALLOWED = {
    Role.OBSERVER: CONNECTION
    + " exists fcall_ro get getrange hgetall hmget llen lrange mget object|idletime pttl smembers xrevrange zcard"
    " zcount zrange zrangebyscore zscore",
    Role.SCORER: CONNECTION
    + " exists expire fcall fcall_ro get hdel hget hincrby hmget hset info mget sadd scard set sismember smembers srem"
    " unlink wait waitaof zadd zrangebyscore zrem zscore",
}
LISTING = """SCAN 0/KEYS */RANDOMKEY/DBSIZE/MONITOR/FUNCTION LIST/FUNCTION DUMP/CLIENT LIST/CLIENT TRACKING ON BCAST
SUBSCRIBE __keyspace@0__:x/PSUBSCRIBE */SLOWLOG GET/COMMAND LIST/CLUSTER GETKEYSINSLOT 0 10/MEMORY DOCTOR/ACL LOG
LATENCY LATEST/SAVE/SYNC/EVAL x 0""".replace("\n", "/").split("/")
OTHERS = [role for role in Role if role is not Role.LEARNER]


class Intruder:
    """Plain clients, each with the password of one role."""

    def __init__(self, server: EmbeddedServer, run: str) -> None:
        made = {user.role: user for user in users(run, {})}
        for user in made.values():  # a second password of each user
            ask(server, "ACL", "SETUSER", user.name, f">{user.password}")
        self.clients: dict[Role, Any] = {
            role: redis.Redis.from_url(url_of(server, User(role, run, user.password))) for role, user in made.items()
        }
        self.prefix = f"headway:{{{run}}}:"

    def close(self) -> None:
        for client in self.clients.values():
            client.close()


@pytest.fixture
def intruder(cast: Cast, server: EmbeddedServer, run_name: str) -> Iterator[Intruder]:
    made = Intruder(server, run_name)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("role", ALLOWED)
async def test_its_user_may_run_no_other_command(cast: Cast, server: EmbeddedServer, run_name: str, role: Role) -> None:
    listed = ask(server, "EVAL", "return redis.call('COMMAND', 'LIST')", 0)
    names = {name.decode() for name in listed}
    containers = {name.partition("|")[0] for name in names if "|" in name}
    allowed = {name for name in names - containers if may_run(server, f"headway-{role}-{run_name}", name)}
    assert allowed <= {*ALLOWED[role].split()}, allowed - {*ALLOWED[role].split()}


@pytest.mark.slow
@pytest.mark.parametrize("role", OTHERS)
@pytest.mark.parametrize("line", LISTING)
async def test_it_lists_no_keys_and_watches_nobody(intruder: Intruder, role: Role, line: str) -> None:
    with pytest.raises(RedisError, match=r"permission|NOPERM|no permissions|unknown command"):
        intruder.clients[role].execute_command(*line.split())


async def busy(cast: Cast) -> list[bytes]:
    """Let the run hold all that it may. Returns its secrets: of names of keys, sessions, tokens, a prompt."""
    run, worker = cast.run, cast.worker
    await worker.status.heartbeat(WORKER, 30)
    await cast.learner.versions.put_group(run.owner, broadcast_group())
    await cast.learner.rendezvous.create("8c2f", ["w"], {"verdict": b"go"})
    assert await worker.rendezvous.set("8c2f", "w", "in/w", b"1")
    await cast.learner.phases.generate(run.owner, 30)
    await worker.phases.may_generate("w", 30, is_awake=True)
    await cast.learner.evaluations.ask(run.owner, WeightVersion(1, 0), [prompt(100)], 2)
    evaluated = (await worker.evaluations.lease("w", WeightVersion(1, 0), 1, 30)).leases
    held = (await cast.honest.lease(3, 0)).leases
    await cast.honest.submit(held[0], 0)
    assert await worker.swap_turns.take("w:1", 0.5, 30)
    await cast.learner.status.report_step(run.owner, STEP)
    await cast.learner.heartbeat.begin(HOLDER)
    keys = cast.learner._connection.keys
    secrets = [keys.secret, worker._connection.session, cast.learner._connection.session, run.owner.token]
    secrets += [*(lease.token for lease in evaluated), *(lease.token for lease in held)]
    return [secret.encode() for secret in secrets] + [b"1+2="]


@pytest.mark.parametrize("role", OTHERS)
async def test_no_answer_holds_what_opens_more(cast: Cast, intruder: Intruder, role: Role) -> None:
    """Whatever function that only reads is called, with whatever of these arguments."""
    secrets = await busy(cast)
    client, answers = intruder.clients[role], list[str]()
    members = [f"{group_id(n)}:0:{i}" for n in range(3) for i in (0, 1)]
    for verb in (name for name, flags in verb_flags().items() if "no-writes" in flags):
        for arguments in ([], ["m", "", "key"], ["8c2f", "w", "in/w"], [part for m in members for part in (m, "x")]):
            name, of = f"{cast.hostile.library}_{verb}", f"{intruder.prefix}hidden:of:{cast.hostile.identity}"
            with suppress(ResponseError):
                answers.append(repr(client.fcall_ro(name, 1, of, *arguments)))
    for key in (
        "config",
        "verbs",
        "identity",
        "holder",
        "fault:0",
        "model",
        "broadcast",
        "manifest:announced",
        "scoring",
    ):
        with suppress(ResponseError):
            answers.append(repr(client.get(intruder.prefix + key)))
    assert answers
    for secret in secrets:
        assert not [answer for answer in answers if secret.decode() in answer], secret


@pytest.mark.parametrize("looking", [Role.OBSERVER, Role.SCORER])
async def test_two_passwords_open_no_more_than_each(cast: Cast, intruder: Intruder, looking: Role) -> None:
    """One who could see the name of a key could set the bound on lag with a worker's password."""
    await busy(cast)
    names = set[bytes]()
    for line in LISTING:
        with suppress(RedisError):
            reply = intruder.clients[looking].execute_command(*line.split())
            names |= {part for part in (reply[-1] if isinstance(reply, list) else []) if isinstance(part, bytes)}
    for name in names:
        if name.endswith(b":meta"):
            intruder.clients[Role.WORKER].hset(name, "max_lag", 1_000_000)
    assert not names
    keys = cast.learner._connection.keys
    assert int(await cast.learner._connection.execute("HGET", keys.hidden("meta"), "max_lag")) == 8


@pytest.mark.parametrize("role", OTHERS)
async def test_it_changes_no_rule_version_weight_or_sample(
    cast: Cast, intruder: Intruder, server: EmbeddedServer, role: Role
) -> None:
    """Not under any name that it can know."""
    await busy(cast)
    before = {key: ask(server, "DUMP", key) for key in ask(server, "KEYS", "*")}
    known = [key for key in before if cast.learner._connection.keys.secret.encode() not in key]
    known = [key for key in known if b":payload:" not in key and b":segment:" not in key]
    for key in [*known, b"headway:runs"]:
        for line in (
            "SET {} x",
            "UNLINK {}",
            "HSET {} max_lag 99",
            "SADD {} x",
            "SREM {} x",
            "EXPIRE {} 1",
            "PERSIST {}",
        ):
            with pytest.raises(RedisError):
                intruder.clients[role].execute_command(*(key if part == "{}" else part for part in line.split()))
    after = {key: ask(server, "DUMP", key) for key in ask(server, "KEYS", "*")}
    assert after == before


AWAY = {"a time beyond all": 1e308, "a late time": 1e12, "a negative time": -1.0, "no number": "x"}


@pytest.mark.parametrize("kind", AWAY)
async def test_a_fault_of_no_real_time_is_passed_over(cast: Cast, intruder: Intruder, kind: str) -> None:
    """A display that wrote the time would end."""
    fault = {"worker": "w", "host": "h", "rule": "r", "reason": "x", "at": AWAY[kind]}
    for place in PLACES:
        intruder.clients[Role.WORKER].set(f"{intruder.prefix}fault:{place}", json.dumps(fault), ex=KEPT_S)
    assert (await cast.learner.status.snapshot()).faults == ()
    await cast.worker.faults.report(worker="w", host="h", rule="version", reason="another one")
    assert [fault.rule for fault in (await cast.learner.status.snapshot()).faults] == ["version"]


async def test_awake_workers_are_bounded(cast: Cast, intruder: Intruder) -> None:
    """Names that no process has would fill the server, and the learner's answers."""
    await cast.learner.phases.generate(cast.run.owner, 30)
    pipe = intruder.clients[Role.WORKER].pipeline(transaction=False)
    name, of = f"{cast.hostile.library}_awake", f"{intruder.prefix}hidden:of:{cast.hostile.identity}"
    for n in range(4100):
        pipe.fcall(name, 1, of, f"evil{n}", "s", 60, 1)
    refused = [reply for reply in pipe.execute(raise_on_error=False) if isinstance(reply, ResponseError)]
    assert len(refused) == 4
    assert len(await cast.learner.phases.train(cast.run.owner) or ()) == 4096


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf, 1e308])
async def test_a_report_with_a_figure_of_no_process_is_passed_over(cast: Cast, figure: float) -> None:
    """A display that adds such figures up would end."""
    await cast.worker.status.heartbeat(WORKER, 30)
    report = encode(replace(WORKER, worker="evil", tokens_per_s=figure))
    cast.hostile.call("heartbeat", "evil", "s", 30_000, report, 1)
    pool = PoolInfo(pool="evil", host="h", pid=1, running=1, ended_s={"x": figure})
    cast.hostile.call("pool", "evil", "s", 30_000, encode(pool), 1, 0)
    status = await cast.learner.status.snapshot()
    assert [info.worker for info in status.workers] == ["w"]
    assert status.pools == ()


async def test_odd_reports_of_workers_end_no_look(cast: Cast) -> None:
    for n, frame in enumerate((b"", b"\xff" * 64, b"HWAY" + bytes(40), encode(WORKER)[:-3], encode(WORKER) + b"x")):
        cast.hostile.call("heartbeat", f"evil{n}", "s", 30_000, frame, 1)
    await cast.worker.status.heartbeat(WORKER, 30)
    assert [info.worker for info in (await cast.learner.status.snapshot()).workers] == ["w"]
    assert [info.worker for info in await cast.learner.status.workers()] == ["w"]
