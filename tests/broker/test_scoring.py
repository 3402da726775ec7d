"""Each scoring request gets one answer, whichever process dies; nothing is kept for askers that are gone."""

import asyncio
from contextlib import suppress

import numpy as np
import pytest
from msgspec.structs import replace

from headway.broker import Broker, open_broker
from headway.broker.client.scoring import AnswerOutcome, ScoreLease, Scores, ScoringResult, new_request_name
from headway.broker.errors import BrokerError
from headway.broker.keys import Keys
from headway.broker.schema import ScoreRequest
from headway.broker.server.access import Role
from headway.broker.server.embedded import EmbeddedServer

from .audit import Auditor
from .scenario import FRESH, begin, rules
from .test_access import admit, url_of
from .test_codec import SCORER

LONG_S, A_MOMENT_S = 1000.0, 0.05
QUALITY = "quality"
MOST_TRIES = 5
SCORERS = f"{QUALITY} teacher strict"


@pytest.fixture
async def run(broker: Broker) -> Broker:
    await begin(broker, rules(1, scorers=SCORERS))
    return broker


def request(first: int = 5, length: int = 3) -> ScoreRequest:
    response = np.arange(first, first + length, dtype=np.int32)
    return ScoreRequest(prompt_tokens=np.array([1, 70_000], np.int32), response_tokens=response, temperature=0.7)


async def ask(
    broker: Broker,
    count: int,
    scorer: str = QUALITY,
    *,
    ttl_s: float = LONG_S,
    hold_s: float = LONG_S,
    worker: str = "",
) -> list[str]:
    names = [new_request_name() for _ in range(count)]
    for number, name in enumerate(names):  # the order matters
        asked = {name: request(number)}
        assert await broker.scoring.ask(scorer, asked, ttl_s=ttl_s, hold_s=hold_s, worker=worker) == {name}
    return names


async def lease(broker: Broker, most: int = 99, *, ttl_s: float = LONG_S, scorer: str = QUALITY) -> list[ScoreLease]:
    return list((await broker.scoring.lease(scorer, ttl_s=ttl_s, most=most, most_bytes=1 << 20)).leases)


async def collect(broker: Broker, *names: str, scorer: str = QUALITY) -> list[ScoringResult]:
    found = await broker.scoring.collect(scorer, names, ttl_s=LONG_S)
    return [found[name] for name in names]


def scores(*values: float) -> Scores:
    return np.array(values, np.float32)


def stored(auditor: Auditor, run: str) -> set[str]:
    prefix = Keys(run).prefix.encode()
    found = (key.removeprefix(prefix).partition(b":scoring:")[2].decode() for key in auditor.names())
    return {name for name in found if name.startswith(("request", "queue", "asked"))}


async def ask_and_answer(broker: Broker) -> None:
    """Ask and answer; all keys lie in one slot."""
    names = await ask(broker, 2)
    leases = await lease(broker)
    await broker.scoring.release(QUALITY, leases[1:])
    assert await broker.scoring.answer(QUALITY, [(leases[0], scores(1))]) == [AnswerOutcome.ACCEPTED]
    assert [one.state for one in await collect(broker, *names)] == ["answered", "waiting"]
    assert len((await broker.status.snapshot()).scoring) == 1


async def test_answers_come_back_bit_for_bit_and_are_forgotten_once_collected(run: Broker, auditor: Auditor) -> None:
    names = await ask(run, 3)
    assert [one.state for one in await collect(run, *names)] == ["waiting"] * 3
    leases = await lease(run)
    assert [one.name for one in leases] == names, "the longest asked first"
    for number, one in enumerate(leases):
        np.testing.assert_array_equal(one.request.response_tokens, request(number).response_tokens)
        np.testing.assert_array_equal(one.request.prompt_tokens, request().prompt_tokens)
        assert (one.request.temperature, one.request.identity) == (0.7, run._connection.identity)
    values = [scores(0.1), scores(-1e-30, 3.4e38), scores(*range(50))]
    assert await run.scoring.answer(QUALITY, list(zip(leases, values, strict=True))) == [AnswerOutcome.ACCEPTED] * 3
    for found, wanted in zip(await collect(run, *names), values, strict=True):
        assert found.state == "answered"
        np.testing.assert_array_equal(found.scores, wanted)
    assert await run.scoring.collect(QUALITY, [], ttl_s=LONG_S, forget=names) == {}
    assert [one.state for one in await collect(run, *names)] == ["unknown"] * 3
    assert stored(auditor, run.run) == set()
    (queue,) = (await run.status.snapshot()).scoring
    assert (queue.scorer, queue.waiting, queue.leased, queue.answered, queue.bytes) == (QUALITY, 0, 0, 3, 0)
    auditor.look().check()


async def test_an_answer_counts_once_and_only_under_the_newest_lease(run: Broker, other: Broker) -> None:
    (name,) = await ask(run, 1)
    (late,) = await lease(run, ttl_s=A_MOMENT_S)
    await asyncio.sleep(2 * A_MOMENT_S)
    (newest,) = await lease(other)
    assert newest.name == name
    assert await run.scoring.answer(QUALITY, [(late, scores(1))]) == [AnswerOutcome.FENCED]
    assert await other.scoring.answer(QUALITY, [(newest, scores(2))]) == [AnswerOutcome.ACCEPTED]
    assert await other.scoring.answer(QUALITY, [(newest, scores(3))]) == [AnswerOutcome.DUPLICATE]
    (found,) = await collect(run, name)
    np.testing.assert_array_equal(found.scores, scores(2))
    (queue,) = (await run.status.snapshot()).scoring
    assert (queue.answered, queue.expired_leases) == (1, 1)


async def test_an_expired_lease_that_nobody_took_still_counts(run: Broker) -> None:
    await ask(run, 1)
    (late,) = await lease(run, ttl_s=A_MOMENT_S)
    await asyncio.sleep(2 * A_MOMENT_S)
    assert await run.scoring.answer(QUALITY, [(late, scores(1))]) == [AnswerOutcome.ACCEPTED]


async def test_a_lease_that_is_renewed_lasts_until_its_hold_ends(run: Broker, other: Broker) -> None:
    await ask(run, 1)
    kept = await lease(run, ttl_s=A_MOMENT_S)
    assert not (await run.scoring.lease(QUALITY, ttl_s=LONG_S, most=0, most_bytes=0, held=kept)).lost
    await asyncio.sleep(2 * A_MOMENT_S)
    assert await lease(other) == []
    await run.scoring.release(QUALITY, kept)
    (name,) = await ask(run, 1, "strict", hold_s=A_MOMENT_S)
    held = await lease(run, scorer="strict")
    await asyncio.sleep(2 * A_MOMENT_S)
    reply = await run.scoring.lease("strict", ttl_s=LONG_S, most=0, most_bytes=0, held=held)
    assert reply.lost == {name}


async def test_a_scorer_that_obeys_another_recipe_keeps_its_requests_and_gets_no_more(
    run: Broker, other: Broker
) -> None:
    (name,) = await ask(run, 1)
    run.leases.obey(b"recipe")
    held = await lease(run)
    assert [one.name for one in held] == [name]
    await other.batches.claim(checkpoint=FRESH, rules=rules(1, scorers=SCORERS), config=b"another", resume=True)
    (later,) = await ask(other, 1)
    reply = await run.scoring.lease(QUALITY, ttl_s=LONG_S, most=9, most_bytes=1 << 20, held=held)
    assert (reply.lost, reply.leases) == (frozenset(), ())
    assert run.leases.recipe_changed.is_set()
    assert await run.scoring.answer(QUALITY, [(held[0], scores(1))]) == [AnswerOutcome.ACCEPTED]
    run.leases.obey(b"another")
    assert [one.name for one in await lease(run)] == [later]
    assert not run.leases.recipe_changed.is_set()


async def test_what_is_handed_back_goes_to_another_one_at_once_and_is_no_failure(run: Broker, other: Broker) -> None:
    names = await ask(run, 2)
    for _ in range(2 * MOST_TRIES):
        await run.scoring.release(QUALITY, await lease(run))
    leases = await lease(other)
    assert [one.name for one in leases] == names
    await run.scoring.release(QUALITY, [replace_token(leases[0])])
    assert await other.scoring.answer(QUALITY, [(leases[0], scores(1))]) == [AnswerOutcome.ACCEPTED]


def replace_token(lease: ScoreLease) -> ScoreLease:
    return ScoreLease(lease.name, "guessed", lease.request)


@pytest.mark.parametrize("way", ["given up", "killed"])
async def test_a_request_that_nobody_can_score_fails_with_the_reason(run: Broker, way: str) -> None:
    (bad,) = await ask(run, 1)
    for _ in range(MOST_TRIES):
        (first,) = await lease(run, 1, ttl_s=A_MOMENT_S if way == "killed" else LONG_S)
        assert first.name == bad
        if way == "killed":
            await asyncio.sleep(2 * A_MOMENT_S)
        else:
            await run.scoring.release(QUALITY, [first], "token 99 is none of the model's")
    assert await lease(run) == []
    (found,) = await collect(run, bad)
    assert found.state == "failed"
    assert found.reason == (
        "token 99 is none of the model's"
        if way == "given up"
        else "5 scorers had it and none has answered within its deadline_s"
    )


async def test_the_request_of_an_asker_that_is_gone_is_forgotten(run: Broker, auditor: Auditor) -> None:
    await ask(run, 2, ttl_s=A_MOMENT_S)
    (leased,) = await lease(run, 1)
    await asyncio.sleep(2 * A_MOMENT_S)
    assert await lease(run) == []
    assert await run.scoring.answer(QUALITY, [(leased, scores(1))]) == [AnswerOutcome.FENCED]
    assert stored(auditor, run.run) == set()
    (queue,) = (await run.status.snapshot()).scoring
    assert (queue.waiting, queue.bytes) == (0, 0)


async def test_to_ask_again_changes_nothing_and_a_server_that_lost_all_says_so(run: Broker, auditor: Auditor) -> None:
    (name,) = await ask(run, 1)
    (leased,) = await lease(run)
    assert await run.scoring.ask(QUALITY, {name: request()}, ttl_s=LONG_S, hold_s=LONG_S) == {name}
    assert await lease(run) == []
    assert await run.scoring.answer(QUALITY, [(leased, scores(1))]) == [AnswerOutcome.ACCEPTED]
    for key in auditor.names():
        if b":scoring:" in key:
            auditor.redis.unlink(key)
    assert [one.state for one in await collect(run, name)] == ["unknown"]
    assert await run.scoring.ask(QUALITY, {name: request()}, ttl_s=LONG_S, hold_s=LONG_S) == {name}
    assert [one.name for one in await lease(run)] == [name]


async def test_what_a_dead_scorer_held_goes_to_another_at_once_and_nothing_else_does(
    run: Broker, other: Broker, auditor: Auditor
) -> None:
    names = await ask(run, 3)
    dead, mine = await lease(other, 2), await lease(run)
    for stranger in (run.session[:-1] + "x", "f" * 32, other.session[1:], ""):
        with suppress(BrokerError):
            assert await run.scoring.report_death(stranger) == 0
    assert await lease(run) == []
    assert await run.scoring.report_death(other.session) == 2
    assert [one.name for one in await lease(run)] == names[:2]
    assert await other.scoring.answer(QUALITY, [(dead[0], scores(1))]) == [AnswerOutcome.FENCED]
    assert await run.scoring.answer(QUALITY, [(mine[0], scores(1))]) == [AnswerOutcome.ACCEPTED]
    (queue,) = (await run.status.snapshot()).scoring
    assert (queue.leased, queue.expired_leases) == (2, 2)
    auditor.look().check()


async def test_a_request_that_kills_every_scorer_fails(run: Broker, other: Broker) -> None:
    (bad,) = await ask(run, 1)
    for _ in range(MOST_TRIES):
        assert [one.name for one in await lease(other)] == [bad]
        assert await run.scoring.report_death(other.session) == 1
    assert await lease(run) == []
    (found,) = await collect(run, bad)
    assert (found.state, found.reason) == ("failed", "5 scorers had it, and the last of them died")


async def test_scorers_of_several_names_get_their_own(run: Broker) -> None:
    (first,), (second,) = await ask(run, 1), await ask(run, 1, "teacher")
    assert [one.name for one in await lease(run, scorer="teacher")] == [second]
    assert [one.name for one in await lease(run)] == [first]
    assert [queue.scorer for queue in (await run.status.snapshot()).scoring] == [QUALITY, "teacher"]


async def test_a_scorer_gets_what_it_has_room_for(run: Broker) -> None:
    names = await ask(run, 4)
    reply = await run.scoring.lease(QUALITY, ttl_s=LONG_S, most=9, most_bytes=1)
    assert [one.name for one in reply.leases] == names[:1], "always one, however large"
    assert [one.name for one in await lease(run, 2)] == names[1:3]
    assert await lease(run, 0) == []


async def test_requests_take_so_many_bytes_and_the_rest_waits_with_its_asker(run: Broker) -> None:
    rng = np.random.default_rng(0)
    large = replace(request(), response_tokens=rng.integers(0, 1 << 24, 1_500_000, np.int32))
    names = [new_request_name() for _ in range(10)]
    held = await run.scoring.ask(QUALITY, dict.fromkeys(names, large), ttl_s=LONG_S, hold_s=LONG_S)
    (queue,) = (await run.status.snapshot()).scoring
    assert 0 < len(held) < 10
    assert queue.bytes <= 1 << 25
    await run.scoring.collect(QUALITY, [], ttl_s=LONG_S, forget=list(held))
    rest = {name: large for name in names if name not in held}
    assert await run.scoring.ask(QUALITY, rest, ttl_s=LONG_S, hold_s=LONG_S) == set(rest)


async def test_a_damaged_request_is_given_up(run: Broker, auditor: Auditor) -> None:
    (name,) = await ask(run, 1)
    (key,) = [key for key in auditor.names() if key.endswith(name.encode())]
    auditor.redis.hset(key, "frame", b"junk")
    for _ in range(MOST_TRIES):
        assert await lease(run) == []
    (found,) = await collect(run, name)
    assert found.state == "failed"
    assert found.reason.startswith("the request cannot be read")


async def test_a_scorers_user_does_its_work_and_a_workers_user_does_not(
    server: EmbeddedServer, run_name: str, auditor: Auditor
) -> None:
    made = admit(server, None)
    learner, worker, observer, scorer = [await open_broker(url_of(server, made[role]), run_name) for role in Role]
    await begin(learner, rules(1, scorers=SCORERS))
    assert await scorer.status.config() == b"recipe"
    assert await scorer.status.state() == "claimed"
    await scorer.versions.model()
    (name,) = await ask(worker, 1, worker="w")
    held = await lease(scorer)
    await scorer.scoring.release(QUALITY, held)
    (leased,) = await lease(scorer)
    await scorer.scoring.report(SCORER, LONG_S)
    assert (await observer.status.snapshot()).scorers == (SCORER,)
    for refused in (
        lease(worker),
        worker.scoring.answer(QUALITY, [(leased, scores(9))]),
        worker.scoring.release(QUALITY, [leased], "spite"),
        worker.scoring.report(SCORER, LONG_S),
        scorer.status.snapshot(),
        scorer.swap_turns.take("t", 0.5, 30),
    ):
        with pytest.raises(BrokerError, match="may not do this"):
            await refused
    for supervisor in (worker, scorer):  # with a worker's user in `headway run`, a scorer's in `headway scorers`
        assert await supervisor.scoring.report_death(scorer.session) == 1
        (leased,) = await lease(scorer)
    assert await scorer.scoring.answer(QUALITY, [(leased, scores(1))]) == [AnswerOutcome.ACCEPTED]
    assert [one.state for one in await collect(worker, name)] == ["answered"]
    await scorer.scoring.leave(SCORER.process)
    assert (await observer.status.snapshot()).scorers == ()
    auditor.look().check()
    for broker in (learner, worker, observer, scorer):
        await broker.close()


async def test_what_a_scorers_password_stores_under_a_guessed_secret_is_swept(
    server: EmbeddedServer, run_name: str
) -> None:
    made = admit(server, None)
    learner, scorer = [await open_broker(url_of(server, made[role]), run_name) for role in (Role.LEARNER, Role.SCORER)]
    run = await begin(learner, rules(1, scorers=SCORERS))
    key = scorer._connection.keys("hidden:guess:scoring:request:a:b")
    await scorer._connection.execute("SET", key, "x" * 1000)
    (name,) = await ask(learner, 1)
    swept = await learner.garbage.collect(run.owner)
    assert (swept.keys, swept.foreign) == (1, 1)
    assert [one.name for one in await lease(scorer)] == [name]
    for broker in (learner, scorer):
        await broker.close()
