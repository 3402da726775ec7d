# mypy: disable-error-code="assignment, misc, union-attr, var-annotated"
"""A hostile program with a worker's password can spoil only its own samples and counters."""

import asyncio
import itertools
import random
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import numpy as np
import pytest
import redis
from msgspec.structs import replace
from redis.exceptions import RedisError, ResponseError

from broker import Broker, open_broker
from broker.client.evaluations import EvaluationLease, EvaluationResult
from broker.client.leases import AppendOutcome, SubmitOutcome, parse_tid
from broker.client.scoring import new_request_name
from broker.connection.verbs import script_names
from broker.errors import BrokerError
from broker.schema import Lease, Segment, VersionSpan, WeightVersion
from broker.schema.weights import ModelFiles
from broker.server.access import Role
from broker.server.embedded import EmbeddedServer
from broker.wire.codec import encode_segment

from .audit import Auditor
from .renewal import renew
from .scenario import Scenario, begin, broadcast_group, group_id, groups, manifest, prompt, rules, trajectory
from .test_access import admit, segment, url_of
from .test_codec import WORKER
from .test_scoring import request
from .topologies import ask

CALLS = 4000
OTHERS_RESULT = ("1.0", "1.0", 0, -1.0, 1, "evil 1")
OWNERS = (
    *("claim", "reassert", "take", "commit", "feed", "put", "version", "state", "reject"),
    *("evaluate", "evaluation", "drop", "close_feed", "archive", "strays", "sweep", "recorded", "phase"),
)
"""Functions of the run's owner."""
ALLOWED = """
auth client|no-touch client|setinfo cluster|slots exists expire fcall fcall_ro get getrange hdel hello hget hgetall
hincrby hmget hset hsetnx info lindex llen lrange mget object|idletime persist ping pttl quit reset rpush sadd scard set
sismember smembers srandmember srem strlen time unlink wait waitaof xadd xread zadd zcard zcount zpopmin zrange
zrangebyscore zrem zscore
"""
"""Commands of a worker's functions, and of connecting: the server refuses each key that is not a worker's."""


def measures(*numbers: int) -> bytes:
    """Return the measures of a blob, as functions take them: its bytes, {incarnation, step, tokens} of each version."""
    return struct.pack(f">{len(numbers)}I", *numbers)


class Hostile:
    """A plain client with the worker's password."""

    def __init__(self, url: str, run: str) -> None:
        self.client: Any = redis.Redis.from_url(url)
        self.prefix = f"headway:{{{run}}}:"
        _, self.library = self.client.get(f"{self.prefix}verbs").decode().split(" ")
        self.identity = self.client.get(f"{self.prefix}identity").decode()

    def call(self, verb: str, *arguments: Any) -> Any:
        """Call a function of the library. Raises the server's error."""
        return self.client.fcall(f"{self.library}_{verb}", 1, f"{self.prefix}hidden:of:{self.identity}", *arguments)

    def lease(self, count: int, ttl_s: float = 30, *, step: int = 0, holder: str = "evil 1") -> list[list[bytes]]:
        """Return {member, token} of each lease, and where it has segments, their oldest step and names."""
        nonce = f"{random.getrandbits(64):x}"
        leased: list[list[bytes]] = self.call("lease", 1, step, count, ttl_s, nonce, holder, "", 0)[4:]
        return leased

    def submit(self, leased: list[bytes], oldest: int, newest: int, *, frame: bytes = b"junk") -> bytes:
        """Submit a sample, and return the outcome."""
        member, token = leased[0].decode(), leased[1].decode()
        self.store(f"payload:{member}:{token}", frame)
        (outcome,) = self.call("submit", 0, member, token, "", measures(len(frame), 1, oldest, 1, 1, newest, 0))
        return bytes(outcome)

    def append(
        self, leased: list[bytes], oldest: int, newest: int, *, frame: bytes = b"junk", tokens: int = 6
    ) -> bytes:
        """Append a first segment, and return the outcome."""
        member, token = leased[0].decode(), leased[1].decode()
        name = f"segment:{member}:{random.getrandbits(64):x}"
        self.store(name, frame)
        outcome, _ = self.call(
            "append", member, token, 0, name, 30, measures(len(frame), 1, oldest, tokens, 1, newest, 0)
        )
        return bytes(outcome)

    def renew(self, leased: list[bytes], ttl_s: float = 30) -> list[bytes]:
        """The token, if the lease is lost."""
        _, _, _, *lost = self.call("heartbeat", "evil", "1", 30_000, b"junk", 0, ttl_s, *leased[:2])
        return lost

    def store(self, name: str, frame: bytes, *, is_new: bool = False) -> None:
        self.client.set(self.prefix + name, frame, px=60_000, nx=is_new)


class Cast:
    """A learner, an honest worker and a hostile one, each as its own user."""

    def __init__(self, learner: Broker, worker: Broker, hostile: Hostile, run: Scenario) -> None:
        self.learner, self.worker, self.hostile, self.run = learner, worker, hostile, run
        self.honest = Scenario(worker, run.claim)


@pytest.fixture
async def cast(server: EmbeddedServer, run_name: str) -> AsyncIterator[Cast]:
    async with AsyncExitStack() as stack:
        made = admit(server, run_name)
        learner = await open_broker(url_of(server, made[Role.LEARNER]), run_name)
        worker = await open_broker(url_of(server, made[Role.WORKER]), run_name)
        stack.push_async_callback(learner.close)
        stack.push_async_callback(worker.close)
        run = await begin(learner, rules(8, lease_ttl_s=0.5, segment_s=0.1, scorers="quality teacher"), fed=12)
        await learner.versions.put_model(run.owner, ModelFiles(files={"config.json": b"{}"}))
        hostile = Hostile(url_of(server, made[Role.WORKER]), run_name)
        stack.callback(hostile.client.close)
        yield Cast(learner, worker, hostile, run)


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


async def leased_by_honest(cast: Cast) -> tuple[Lease, bytes]:
    """Return a sample that the hostile worker held before, and its token."""
    (member, token, *_), *_ = cast.hostile.lease(1)
    await asyncio.sleep(0.6)
    leases = (await cast.honest.lease(4, 0, ttl_s=30)).leases
    return next(lease for lease in leases if str(lease.tid) == member.decode()), token


async def test_it_hands_in_no_sample_that_another_one_holds(cast: Cast) -> None:
    lease, late = await leased_by_honest(cast)
    proofless = f"{'a' * 16}.{'b' * 8}.{'c' * 24}".encode()
    for token in (late, proofless, b"x", b""):
        name = f"payload:{lease.tid}:{token.decode()}"
        if token:
            cast.hostile.store(name, b"junk")
        for again in (0, 1):
            with suppress(RedisError):
                said = (str(lease.tid), token, "", measures(4, 1, 0, 4))
                assert cast.hostile.call("submit", again, *said) == [b"fenced"]
            if token:
                cast.hostile.store(name, b"junk")
    for verb, arguments in {"release": [], "discard": [-1, "x", "x"], "lose": ["x", "x"]}.items():
        assert cast.hostile.call(verb, str(lease.tid), late, *arguments) == 0
    assert cast.hostile.renew([str(lease.tid).encode(), late]) == [late]
    assert await renew(cast.worker, [lease]) == set()
    assert await cast.honest.submit(lease, 0) is SubmitOutcome.ACCEPTED


async def test_it_hands_in_no_evaluation_sample_that_another_one_holds(cast: Cast) -> None:
    version = WeightVersion(1, 0)
    await cast.learner.evaluations.ask(cast.run.owner, version, [prompt(100), prompt(101)], 1)
    await cast.worker.status.heartbeat(WORKER, 30)
    (lease,) = (await cast.worker.evaluations.lease("w", version, 1, 30)).leases
    _, _, (other, token, _) = cast.hostile.call("evaluation_lease", "1.0", 9, 1e9, "abc", "evil 1", "")
    assert other != lease.sample
    for tokens in (token, b"x", b""):
        said = ["1.0", lease.sample, tokens, "1.0", "1.0", 1, 1.0, 1, "evil 1"]
        assert cast.hostile.call("evaluation_submit", *said) == b"fenced"
        assert cast.hostile.call("evaluation_release", "1.0", lease.sample, tokens) == 0
        assert cast.hostile.call("evaluation_lease", "1.0", 9, 30, "abc", "evil 1", "", lease.sample, tokens) == [
            2,
            [0],
        ]
    for place, junk in ((1, -1), (1, "x"), (5, 2), (6, "nan"), (6, "inf"), (6, "1e999999"), (6, "x" * 99), (7, -1)):
        said = ["1.0", other, token, "1.0", "1.0", 1, 1.0, 1, "evil 1"]
        said[place] = junk
        with pytest.raises(RedisError, match="ARGUMENT"):
            cast.hostile.call("evaluation_submit", *said)
    assert await cast.worker.evaluations.submit(lease, EvaluationResult(True, 1.0, 3), [version]) == "accepted"
    progress = await cast.learner.evaluations.look(cast.run.owner, version)
    assert progress is not None
    assert (progress.samples, progress.done) == (2, 1)


async def test_it_keeps_no_evaluation_sample_for_itself(cast: Cast, auditor: Auditor) -> None:
    """It renews the leases of all of them, but other workers get copies, and the learner sees no progress."""
    version, keep_s = WeightVersion(1, 0), 1.0
    await cast.worker.status.heartbeat(WORKER, 30)
    await cast.learner.evaluations.ask(cast.run.owner, version, [prompt(100), prompt(101)], 2, keep_s)
    held: list[Any] = []
    for _ in range(4):
        held += cast.hostile.call("evaluation_lease", "1.0", 9, 30, "abc", "evil 1", "")[2:]
    mine = tuple[EvaluationLease, ...]()
    async with asyncio.timeout(20):
        while len(mine) < 4:
            await asyncio.sleep(0.05)
            said = [part for sample, token, _ in held for part in (sample, token)]
            assert cast.hostile.call("evaluation_lease", "1.0", 9, 30, "abc", "evil 1", "", *said)[1] == []
            mine += (await cast.worker.evaluations.lease(WORKER.worker, version, 9, 30, mine)).leases
        while (await cast.learner.evaluations.look(cast.run.owner, version)).quiet_s < 2 * keep_s:
            await asyncio.sleep(0.05)
            cast.hostile.call("evaluation_lease", "1.0", 9, 30, "abc", f"evil {random.getrandbits(32)}", "", *said)
    assert sorted(lease.sample for lease in mine) == [0, 1, 2, 3]
    assert not {lease.token for lease in mine} & {token.decode() for _, token, _ in held}
    (sample, token, _), *_ = held
    assert cast.hostile.call("evaluation_submit", "1.0", sample, mine[0].token, *OTHERS_RESULT) == b"fenced"
    for lease in mine:
        assert await cast.worker.evaluations.submit(lease, EvaluationResult(True, 1.0, 3), [version]) == "accepted"
        assert await cast.worker.evaluations.submit(lease, EvaluationResult(True, 1.0, 3), [version]) == "duplicate"
    assert cast.hostile.call("evaluation_submit", "1.0", sample, token, *OTHERS_RESULT) == b"fenced"
    auditor.look().check()
    progress = await cast.learner.evaluations.look(cast.run.owner, version)
    assert [result.reward for result in progress.results] == [1.0] * 4


async def test_it_names_no_blob_but_its_own(cast: Cast) -> None:
    """The function frees or keeps a blob by the name in a submission, whichever client stored it."""
    (lease,) = (await cast.honest.lease(1, 0, ttl_s=30)).leases
    assert await cast.honest.submit(lease, 0) is SubmitOutcome.ACCEPTED
    theirs = f"payload:{lease.tid}:{lease.token}"
    (member, token, *_), *_ = cast.hostile.lease(1)
    for name in (theirs, "manifest:announced", f"segment:{member.decode()}:x\n", f"3/{theirs}"):
        with pytest.raises(RedisError, match="ARGUMENT"):
            cast.hostile.call("append", member, token, 0, name, 1, measures(9, 1, 0, 1))
    _, _, number = member.decode().rpartition(":")
    for said, shard in ((f"{number}:{lease.token}", ""), ("", ""), (token, "3"), (token, "x/"), (token, "3/x:")):
        with pytest.raises(RedisError, match="ARGUMENT"):
            cast.hostile.call("submit", 0, member, said, shard, measures(9, 1, 0, 4))
    assert cast.hostile.client.exists(cast.hostile.prefix + theirs) == 1


async def test_its_measures_are_numbers_in_bounds(cast: Cast) -> None:
    (member, token, *_), *_ = cast.hostile.lease(1)
    usual, large = (9, 1, 0, 4), 1 << 31
    wrong = [b"", measures(9), measures(9, 1, 0), measures(*usual)[:-1], measures(0, 1, 0, 4), b"x" * 90_004]
    wrong += [measures(*usual[:place], large, *usual[place + 1 :]) for place in range(len(usual))]
    wrong += [measures(9, 1, 0, large - 1, 1, 1, 1), measures(*usual, 1)]
    for packed in wrong:
        with pytest.raises(RedisError, match="ARGUMENT"):
            cast.hostile.call("submit", 0, member, token, "", packed)
        with pytest.raises(RedisError, match="ARGUMENT"):
            cast.hostile.call("append", member, token, 0, f"segment:{member.decode()}:1", 1, packed)


async def test_a_name_that_is_no_text_does_not_hold_up_the_learner(cast: Cast) -> None:
    """The learner frees blobs on other shards, by the names that workers gave them."""
    for member in (b"\xff:0:0", b"x\ny:0:0"):
        said = (member, b"t", "3/", measures(9, 1, 0, 4))
        assert cast.hostile.call("submit", 0, *said) == [b"fenced"]
        assert cast.hostile.call("append", member, b"t", 0, b"3/segment:" + member + b":1", 1, said[-1])[0] == b"fenced"
    await cast.honest.generate(4, 0)
    assert await cast.run.take(0) is not None
    assert await cast.learner.batches.commit(cast.run.owner, 1) > 0
    assert await cast.learner.batches.commit(cast.run.owner, 1) == 0


async def test_it_says_no_size_that_is_not(cast: Cast) -> None:
    (member, token, *_), *_ = cast.hostile.lease(1)
    name = f"payload:{member.decode()}:{token.decode()}"
    cast.hostile.store(name, b"junk")
    assert cast.hostile.call("submit", 0, member, token, "", measures(1 << 30, 1, 0, 4)) == [b"no payload"]
    assert (await cast.learner.status.snapshot()).queues.payload_bytes == 0


async def test_a_prompt_that_is_whole_is_not_lost(cast: Cast) -> None:
    (member, token, *_), *_ = cast.hostile.lease(1)
    (lease,) = (await cast.honest.lease(1, 0, ttl_s=30)).leases
    assert lease.tid.group == member.decode().split(":")[0]
    assert cast.hostile.call("lose", member, token, "damaged", b"") == 0
    assert await cast.honest.submit(lease, 0) is SubmitOutcome.ACCEPTED


async def test_it_holds_no_lease_for_ever(server: EmbeddedServer, cast: Cast, auditor: Auditor) -> None:
    auditor.redis.hset(auditor.keys.hidden("meta"), "lease_hold_s", 1.0)
    (member, token, *_), *_ = cast.hostile.lease(1, ttl_s=1e9)
    lost: list[bytes] = []
    async with asyncio.timeout(20):
        while not lost:
            await asyncio.sleep(0.1)
            lost = cast.hostile.renew([member, token], 1e9)
        while member.decode() not in [str(lease.tid) for lease in await leases_of(cast)]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def leases_of(cast: Cast) -> tuple[Lease, ...]:
    return (await cast.honest.lease(8, 0, ttl_s=30)).leases


async def hoard(hostile: Hostile, names: Iterator[int], last_step: list[int], *, answers: bool) -> None:
    """Lease all samples under a new name each time, and let no lease expire.

    The worker reports progress by segments without tokens, or hands in samples that cannot be trained.
    """
    held: list[list[bytes]] = []
    while True:
        name = next(names)
        leased = await asyncio.to_thread(hostile.lease, 1000, 30, step=last_step[0], holder=f"evil{name} {name}")
        held += [one for one in leased if not one[1].startswith(b"copy")]
        for one in leased if answers else ():
            with suppress(ResponseError):
                await asyncio.to_thread(hostile.submit, one, last_step[0], last_step[0])
        for one in held[-100:] if not answers else ():
            with suppress(ResponseError):
                await asyncio.to_thread(hostile.append, one, last_step[0], last_step[0], tokens=0)
                await asyncio.to_thread(hostile.renew, one)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("answers", [False, True], ids=["nothing", "pills"])
async def test_it_may_lease_all_samples_under_ever_new_names_and_the_learner_goes_on(cast: Cast, answers: bool) -> None:
    """The honest worker also gets the samples that the hostile one holds, and the first trainable sample wins."""
    run, last_step = cast.run, [0]
    await cast.worker.status.heartbeat(replace(WORKER, worker="w"), 120)
    await cast.honest.generate(4, 0)  # trained samples give a worker standing
    assert await run.take(0) is not None
    await cast.learner.versions.announce(run.owner, manifest(1, 1))
    last_step[0] = 1
    attack = asyncio.create_task(hoard(cast.hostile, itertools.count(), last_step, answers=answers))
    try:
        async with asyncio.timeout(60):
            await asyncio.sleep(0.3)
            for step in (1, 2, 3):
                while await run.take(step) is None:
                    await asyncio.sleep(0.1)  # the hostile one is always faster
                    leases = (await cast.honest.lease(4, step)).leases
                    await asyncio.sleep(0.1)
                    for lease in leases:
                        await cast.honest.submit(lease, step)
                    assert not attack.done()
                last_step[0] = step + 1
                await cast.learner.versions.announce(run.owner, manifest(1, step + 1))
    finally:
        attack.cancel()
        with suppress(asyncio.CancelledError):
            await attack


async def test_a_worker_that_was_killed_bars_nobody_from_a_sample_that_was_refused(cast: Cast) -> None:
    """Otherwise the learner would wait for two minutes once all workers have been replaced by others."""
    run, honest = cast.run, cast.honest
    await cast.worker.status.heartbeat(replace(WORKER, worker="w"), 1.0)
    await honest.generate(4, 0)
    assert await run.take(0) is not None
    await cast.learner.versions.announce(run.owner, manifest(1, 1))
    (pill,) = cast.hostile.lease(1, step=1)
    assert cast.hostile.submit(pill, 1, 1) == b"accepted"
    await honest.generate(3, 1)
    assert await run.take(1) is None
    (lease,) = (await honest.lease(1, 1, "new")).leases
    assert await honest.submit(lease, 1) is SubmitOutcome.FENCED, "its holder has no standing, and one that has lives"
    await asyncio.sleep(1.1)
    (lease,) = (await honest.lease(1, 1, "new")).leases
    assert await honest.submit(lease, 1) is SubmitOutcome.ACCEPTED
    assert await run.take(1) is not None


async def test_a_copy_is_given_only_of_a_sample_that_does_not_get_on(cast: Cast) -> None:
    honest, run = cast.honest, cast.run
    mine = (await honest.lease(24, 0, "a")).leases
    assert len(mine) == 24  # the run has no others
    assert await run.take(0) is None
    await asyncio.sleep(1.2)  # the learner waits for longer than a lease lasts; a holder stores tokens
    await renew(cast.worker, mine)
    for lease in mine[1:]:
        assert (await cast.worker.leases.append(lease, segment(lease, 0), 30)).outcome is AppendOutcome.APPENDED
    (copy,) = (await honest.lease(4, 0, "b")).leases
    assert copy.tid == mine[0].tid
    assert (await honest.queues()).copied_leases == 1
    assert (await honest.lease(4, 0, "b")).leases == ()
    assert await honest.submit(copy, 0) is SubmitOutcome.ACCEPTED
    assert await renew(cast.worker, mine) == {mine[0].token}
    assert await honest.submit(mine[0], 0) is SubmitOutcome.FENCED


async def test_strikes_of_copies_end_their_holder(cast: Cast) -> None:
    mine = (await cast.honest.lease(24, 0, "a")).leases
    assert await cast.run.take(0) is None
    await asyncio.sleep(1.2)
    await renew(cast.worker, mine)
    copies = cast.hostile.lease(3)
    assert len(copies) == 3
    assert [cast.hostile.submit(one, 0, 1000) for one in copies] == [b"fenced"] * 3
    assert cast.hostile.call("lease", 1, 0, 1, 30, "a", "evil 1", "", 0)[1] == b"quarantined"


async def test_it_reports_under_no_name_of_another(cast: Cast) -> None:
    await cast.worker.status.heartbeat(WORKER, 30)
    assert cast.hostile.call("heartbeat", WORKER.worker, "evil", 30_000, b"junk", 1)[0] == 0
    cast.hostile.call("leave", WORKER.worker, "evil")
    assert [(info.worker, info.host) for info in await cast.learner.status.workers()] == [(WORKER.worker, WORKER.host)]
    with pytest.raises(RedisError, match="ARGUMENT"):
        cast.hostile.call("heartbeat", "big", "evil", 30_000, b"x" * 16_385, 1)


async def test_it_takes_no_name_of_a_worker_that_is_held_up(cast: Cast) -> None:
    await cast.worker.status.heartbeat(WORKER, 0.001)
    await asyncio.sleep(0.01)
    assert await cast.learner.status.workers() == ()
    assert cast.hostile.call("heartbeat", WORKER.worker, "evil", 30_000, b"junk", 1)[0] == 0
    await cast.worker.status.heartbeat(WORKER, 30)
    assert [info.host for info in await cast.learner.status.workers()] == [WORKER.host]


async def test_no_name_is_held_for_long_without_a_word(cast: Cast, auditor: Auditor) -> None:
    """A client that wants to keep names from others has to name them again all the time."""
    assert cast.hostile.call("heartbeat", "evil", "s", 3_600_000, b"junk", 1)[0] == 1
    for name in ("worker:evil", "session:evil"):
        assert 0 < auditor.redis.pttl(auditor.keys.hidden(name)) <= 120_000


async def test_samples_that_it_leases_under_the_name_of_another_are_not_that_ones(cast: Cast) -> None:
    """A worker that comes second to its name can still work."""
    await cast.worker.status.heartbeat(WORKER, 30)
    assert cast.hostile.call("heartbeat", "w2", "evil", 30_000, b"junk", 1)[0] == 1
    for name in (WORKER.worker, "w2"):
        (leased,) = cast.hostile.lease(1, holder=f"{name} evil")
        assert cast.hostile.submit(leased, 0, 1000) == b"fenced"
    (lease,) = (await cast.honest.lease(1, 0, worker=WORKER.worker)).leases
    await cast.worker.leases.give_up(lease, "no reward")
    (second,) = (await cast.honest.lease(1, 0, worker="w2")).leases
    assert await cast.honest.submit(second, 0) is SubmitOutcome.ACCEPTED
    letters = (await cast.learner.status.snapshot()).dead_letters
    assert [letter.worker for letter in letters] == [f"{WORKER.worker}?", "w2", WORKER.worker]


async def test_whoever_begins_again_under_new_names_is_noticed(cast: Cast) -> None:
    """A quarantine does not stop it, and samples that an honest worker hands back do not count."""
    (lease,) = (await cast.honest.lease(1, 0)).leases
    await cast.worker.leases.give_up(lease, "no reward")
    for number in range(4):
        (leased,) = cast.hostile.lease(1, holder=f"evil{number} {number}")
        assert cast.hostile.submit(leased, 0, 1000) == b"fenced"
    status = await cast.learner.status.snapshot()
    assert (status.refused_lately, status.refused_workers, status.queues.rejected) == (4, 4, 5)


async def test_segments_are_of_whoever_appended_them(cast: Cast) -> None:
    """The text of the frame and the reader of the segment do not change that."""
    leased, *_ = cast.hostile.lease(1)
    assert cast.hostile.append(leased, 0, 0) == b"appended"
    assert cast.hostile.call("release", *leased) == 1
    taken = (await cast.honest.lease(1, 0, worker=WORKER.worker)).leases
    assert [str(lease.tid).encode() for lease in taken] == [leased[0]]
    assert taken[0].segments == ()
    other, *_ = cast.hostile.lease(1)
    with pytest.raises(RedisError, match="ARGUMENT"):
        cast.hostile.call("discard", *other, WORKER.worker, "x", b"")
    cast.hostile.call("discard", *other, -1, "x", b"")
    letters = (await cast.learner.status.snapshot()).dead_letters
    assert [letter.worker for letter in letters] == ["evil", "evil"]


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
    for verb in ("workers", "snapshot", "glance", "engines", "usage"):
        call = f"{cast.hostile.library}_{verb}", 1, f"{cast.hostile.prefix}hidden:of:{cast.hostile.identity}"
        with suppress(RedisError):
            assert cast.worker.session not in repr(cast.hostile.client.fcall_ro(*call))


async def later(cast: Cast, step: int) -> None:
    """Bring the run to this step, with nothing under way."""
    for number in range(step):
        while await cast.run.take(number) is None:
            assert (await cast.honest.generate(4, number)).leases
        await cast.learner.batches.commit(cast.run.owner, number + 1)
        await cast.run.announce(number + 1)


@pytest.mark.parametrize("way", ["submit", "append"])
async def test_its_sample_is_no_older_than_the_weights_that_it_leased_for(cast: Cast, way: str) -> None:
    """Otherwise the whole group, with the samples of others, would be too old to be trained."""
    await later(cast, 3)
    for number in range(3):
        leased, *_ = cast.hostile.lease(1, step=3)
        hand_in = cast.hostile.submit if way == "submit" else cast.hostile.append
        assert hand_in(leased, 2, 3) == b"fenced"
        (mine,) = (await cast.honest.lease(1, 3)).leases
        assert str(mine.tid).encode() == leased[0]
        assert await cast.honest.submit(mine, 3) is SubmitOutcome.ACCEPTED
        assert (await cast.learner.status.snapshot()).queues.rejected == number + 1
    status = await cast.learner.status.snapshot()
    assert status.quarantined == ("evil",)
    assert "step 2" in status.dead_letters[-1].reason
    with pytest.raises(ValueError, match="not enough values"):
        (_,) = cast.hostile.lease(1, step=3)


async def test_it_submits_nothing_again_that_is_too_old_to_be_trained(cast: Cast, auditor: Auditor) -> None:
    """The submission looks as if the server had forgotten the lease: it has expired, and its weights are unknown."""
    await later(cast, 3)
    auditor.redis.hset(auditor.keys.hidden("meta"), "max_lag", 1)
    first, second = cast.hostile.lease(2, step=3)
    for leased, oldest, outcome in ((first, 1, b"fenced"), (second, 2, b"accepted")):
        member, token = leased[0].decode(), leased[1].decode()
        assert cast.hostile.call("release", member, token) == 1
        cast.hostile.store(f"payload:{member}:{token}", b"junk")
        said = (member, token, "", measures(4, 1, oldest, 1, 1, 3, 0))
        assert cast.hostile.call("submit", 1, *said) == [outcome]


async def test_nobody_is_blamed_for_going_on_after_an_older_segment_than_it_was_said_to_be(cast: Cast) -> None:
    await later(cast, 3)
    leased, *_ = cast.hostile.lease(1, step=3)
    tid = parse_tid(leased[0])
    old = Segment(
        tid=tid,
        index=0,
        start=0,
        tokens=np.full(6, 7, np.int32),
        behavior_logprobs=np.full(6, -1, np.float32),
        loss_mask=np.ones(6, np.uint8),
        spans=(VersionSpan(0, 6, WeightVersion(1, 0)),),
        identity=cast.hostile.identity,
    )
    assert cast.hostile.append(leased, 3, 3, frame=encode_segment(old)) == b"appended"
    assert cast.hostile.call("release", *leased[:2]) == 1
    (mine,) = (await cast.honest.lease(1, 3)).leases
    assert (mine.tid, mine.segments) == (tid, ())
    assert await cast.honest.submit(mine, 3) is SubmitOutcome.ACCEPTED


async def test_its_names_are_so_many_and_no_more(cast: Cast, auditor: Auditor) -> None:
    """Names make room once they send no more heartbeats."""
    keys = auditor.keys
    with cast.hostile.client.pipeline(transaction=False) as pipe:
        for number in range(4200):
            key = f"{cast.hostile.prefix}hidden:of:{cast.hostile.identity}"
            pipe.fcall(f"{cast.hostile.library}_heartbeat", 1, key, f"n{number}", "evil", 600_000, b"junk", 0)
        replies = pipe.execute(raise_on_error=False)
    assert sum(isinstance(reply, list) for reply in replies) == 4096
    assert all("4096 are alive" in str(reply) for reply in replies if not isinstance(reply, list))
    with pytest.raises(BrokerError, match="4096 are alive"):
        await cast.worker.status.heartbeat(WORKER, 30)
    auditor.redis.unlink(keys.hidden("worker:n7"), keys.hidden("session:n7"))
    await cast.worker.status.heartbeat(WORKER, 30)
    assert WORKER.worker in [info.worker for info in await cast.learner.status.workers()]


async def test_a_segment_that_is_named_again_stays(cast: Cast, auditor: Auditor) -> None:
    (leased,) = cast.hostile.lease(1)
    member, token = leased[0].decode(), leased[1].decode()
    name = f"segment:{member}:1"
    cast.hostile.store(name, b"junk")
    said = (name, 30, measures(4, 1, 0, 6))
    assert cast.hostile.call("append", member, token, 0, *said) == [b"appended", 1]
    for shown, index, outcome in ((token, 5, [b"out of order", 1]), ("late", 0, [b"fenced", 0])):
        assert cast.hostile.call("append", member, shown, index, *said) == outcome
        auditor.look().check()


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


async def test_its_junk_reports_are_a_line_each_look_at_most(cast: Cast, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(200):
        cast.hostile.call("pool", f"p{number}", "s", 60_000, b"junk", 1)
        cast.hostile.call("heartbeat", f"w{number}", "s", 60_000, b"junk", 1)
    for _ in range(2):
        status = await cast.learner.status.snapshot()
        assert (status.pools, status.workers) == ((), ())
    lines = [record.message for record in caplog.records if "cannot be read" in record.message]
    assert len(lines) == 2
    assert all("And so are 199 more." in line for line in lines)


async def test_it_takes_no_swap_turn_that_others_wait_for(cast: Cast, auditor: Auditor) -> None:
    """It gets none for an unknown worker, none again and again, and none for long."""
    verbs, share, call = cast.worker.swap_turns, 0.5, cast.hostile.call
    await cast.worker.status.heartbeat(WORKER, 30)
    assert call("turn", "nobody:1", "1", 600, share) == 1
    mine = f"{WORKER.worker}:1"
    assert await verbs.take(mine, share, 30)
    await verbs.give_back(mine)
    assert call("heartbeat", "evil", "s", 30_000, b"junk", 1)[0] == 1
    assert call("turn", "evil:1", "s", 600, share) == 1
    assert not await verbs.take(mine, share, 30)
    call("end_turn", "evil:1")
    assert call("turn", "evil:2", "s", 600, share) == 0, "the other one waits"
    assert await verbs.take(mine, share, 30)
    await verbs.give_back(mine)
    assert call("turn", "evil:3", "s", 600, share) == 1
    assert not await verbs.take(mine, share, 30)
    auditor.redis.zincrby(auditor.keys.hidden("turns:begun"), -61, "evil:3")
    assert call("turn", "evil:3", "s", 600) == 0, "a minute is over"
    assert await verbs.take(mine, share, 30)


class Fuzz:
    """Calls of every function with arguments that may do damage."""

    def __init__(self, hostile: Hostile) -> None:
        self._hostile = hostile
        self._random = random.Random(7)
        self._held: list[list[bytes]] = []
        self.refused = self.answered = 0

    def strike(self) -> None:
        verb = self._random.choice(script_names())
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
            "lose": [member, token, "reason", b"head"],
            "turn": [token, "1", 30, 0.5],
            "awake": ["evil", "s", 30, 1],
            "asleep": ["evil", "s"],
            "evaluation_lease": ["1.0", 2, 0.1, "abc", "evil 1", "", 0, "abc"],
            "evaluation_submit": ["1.0", self._random.randrange(4), "abc", "1.0", "1.0", 1, 0.5, 3, "evil 1"],
            "evaluation_release": ["1.0", self._random.randrange(4), "abc"],
            "heartbeat": ["evil", "s", 1000, b"junk", 1, 30, member, token],
            "score_ask": ["quality", "evil", "s", 30, 1, "abc", b"junk"],
            "score_collect": ["quality", 30, 1, "abc", "abd"],
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
    async with asyncio.timeout(60):
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
