"""A worker asks scorers on a real server: every sample gets its own scores, however server, scorers and leases fail."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.broker.client.broker import Broker, Outages
from headway.broker.client.scoring import Scores
from headway.broker.errors import BrokerError
from headway.broker.schema import ScoreRequest
from headway.broker.server.embedded import EmbeddedServer
from headway.rollout_workers.rewards.base import RewardError, UnscoredError
from headway.rollout_workers.samples.recorder import Recorder
from headway.rollout_workers.samples.teacher_client import TEACHER, TeacherClient
from headway.rollout_workers.scorers import ScoringError, pack_candidates
from headway.rollout_workers.scorers.scorer_client import ScorerClient

from .loop import GROUP_SIZE, HANGS_AFTER_S, Deliveries, Learner, make_engine, make_worker, prompts, running, until

QUALITY = "quality"


@pytest.fixture
def server(tmp_path: Path) -> Any:
    with EmbeddedServer(tmp_path / "server", appendfsync="always") as server:
        yield server


def total(request: ScoreRequest) -> Scores:
    """Return a reward model's answer that differs between requests."""
    return np.array([request.prompt_tokens.sum() + request.response_tokens.sum() / 1000], np.float32)


def per_token(request: ScoreRequest) -> Scores:
    """Return a teacher's answer, with candidates where the request asks for some."""
    logprobs = (-request.response_tokens / (1000 * request.temperature)).astype(np.float32)
    tokens = np.tile(np.arange(request.top_k), (len(logprobs), 1))
    return pack_candidates(logprobs, tokens, (-1 - tokens).astype(np.float32))


@asynccontextmanager
async def answering(
    broker: Broker, scorer: str, answer: Callable[[ScoreRequest], Scores | str]
) -> AsyncIterator[list[ScoreRequest]]:
    """Answer as a scorer process does, and yield the requests that it got.

    An answer that is text gives the reason why the scorer cannot score a request.
    """
    seen = list[ScoreRequest]()

    async def serve() -> None:
        while True:
            with suppress(BrokerError):
                for lease in (await broker.scoring.lease(scorer, ttl_s=30, most=7, most_bytes=1 << 20)).leases:
                    seen.append(lease.request)
                    given = answer(lease.request)
                    if isinstance(given, str):
                        await broker.scoring.release(scorer, [lease], given)
                    else:
                        await broker.scoring.answer(scorer, [(lease, given)])
            await asyncio.sleep(0.01)

    task = asyncio.create_task(serve())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def asked(brokers: tuple[Broker, Broker]) -> AsyncIterator[ScorerClient]:
    await Learner.start(brokers[0], groups=4)
    scorer = ScorerClient(brokers[1].scoring, Outages(brokers[1].url), QUALITY, hold_s=30)
    yield scorer
    await scorer.close()


async def test_many_samples_wait_at_once_and_each_gets_its_own_scores(
    brokers: tuple[Broker, Broker], asked: ScorerClient
) -> None:
    tokens = [([1, n], [n, n + 1, 3]) for n in range(200)]
    waiting = asyncio.gather(*(asked.score(prompt, response) for prompt, response in tokens))
    await asyncio.sleep(0.1)
    assert not waiting.done(), "no scorer is alive yet"
    async with answering(brokers[0], QUALITY, total) as seen, asyncio.timeout(HANGS_AFTER_S):
        found = await waiting
    assert [float(scores[0]) for scores in found] == pytest.approx(
        [sum(prompt) + sum(response) / 1000 for prompt, response in tokens]
    )
    assert len(seen) == 200


async def test_a_cancelled_sample_is_forgotten(brokers: tuple[Broker, Broker], asked: ScorerClient) -> None:
    waiting = asyncio.create_task(asked.score([1], [2]))
    async with asyncio.timeout(HANGS_AFTER_S):
        while await depth(brokers[0]) == 0:  # noqa: ASYNC110 - the server announces nothing
            await asyncio.sleep(0.01)
        waiting.cancel()
        while await depth(brokers[0]) > 0:  # noqa: ASYNC110 - the server announces nothing
            await asyncio.sleep(0.01)


async def depth(broker: Broker) -> int:
    """Return how many requests wait for a scorer; the server announces nothing."""
    (queue,) = (await broker.status.snapshot()).scoring or (None,)
    return 0 if queue is None else queue.waiting


async def test_a_server_that_is_killed_and_forgets_costs_no_sample(
    brokers: tuple[Broker, Broker], asked: ScorerClient, server: EmbeddedServer
) -> None:
    waiting = asyncio.gather(*(asked.score([1], [n]) for n in range(20)))
    while await depth(brokers[0]) < 20:  # noqa: ASYNC110 - the server announces nothing
        await asyncio.sleep(0.01)
    os.kill(server.pid, signal.SIGKILL)
    await asyncio.sleep(0.6)
    server.start()
    async with asyncio.timeout(HANGS_AFTER_S):
        keys = [key async for page in brokers[0]._connection.pages("*") for key in page.keys if b":scoring:" in key]
        assert keys
        await brokers[0]._connection.execute("UNLINK", *keys)
        async with answering(brokers[0], QUALITY, total):
            assert [round(float(scores[0]), 3) for scores in await waiting] == [1 + n / 1000 for n in range(20)]


async def test_what_no_scorer_can_answer_is_an_error_with_the_reason(
    brokers: tuple[Broker, Broker], asked: ScorerClient
) -> None:
    async with (
        answering(brokers[0], QUALITY, lambda request: "token 99 is none of its tokens"),
        asyncio.timeout(HANGS_AFTER_S),
    ):
        with pytest.raises(ScoringError, match="no scorer quality could answer: token 99 is none of its tokens"):
            await asked.score([1], [99])


@pytest.mark.parametrize("answer", [[1.0, 2.0], [float("nan")], []])
async def test_an_answer_that_no_score_can_be_is_refused(
    brokers: tuple[Broker, Broker], asked: ScorerClient, answer: list[float]
) -> None:
    async with (
        answering(brokers[0], QUALITY, lambda request: np.array(answer, np.float32)),
        asyncio.timeout(HANGS_AFTER_S),
    ):
        with pytest.raises(ScoringError, match="which no score can be"):
            await asked.score([1], [5, 6, 7])


@pytest.mark.parametrize("top_k", [0, 3])
async def test_a_trajectory_has_the_teachers_logprobs_of_its_own_tokens(
    brokers: tuple[Broker, Broker], tmp_path: Path, top_k: int
) -> None:
    learner = await Learner.start(brokers[0], groups=4)
    deliveries = Deliveries()
    scorer = ScorerClient(brokers[1].scoring, Outages(brokers[1].url), TEACHER, hold_s=30)
    teacher = TeacherClient(scorer, temperature=0.5, deadline_s=30, top_k=top_k)
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, teacher=teacher)
    await learner.publish(0, deliveries)
    async with running(worker), asyncio.timeout(HANGS_AFTER_S):
        await until(lambda: worker.info().active > 0 and worker.info().generated_tokens > 0)
        async with answering(brokers[0], TEACHER, per_token):
            taken = [trajectory for group in await learner.take(0) for trajectory in group.trajectories]
    assert len(taken) == 2 * GROUP_SIZE
    for trajectory in taken:
        assert trajectory.teacher_logprobs is not None
        np.testing.assert_allclose(trajectory.teacher_logprobs, -trajectory.response_tokens / 500, rtol=1e-6)
        if not top_k:
            assert trajectory.candidate_tokens is None
            continue
        assert trajectory.candidate_tokens is not None
        assert trajectory.candidate_logprobs is not None
        assert trajectory.candidate_tokens.tolist() == [[0, 1, 2]] * len(trajectory.response_tokens)
        assert trajectory.candidate_logprobs.tolist() == [[-1, -2, -3]] * len(trajectory.response_tokens)


async def test_a_teacher_tells_nothing_of_what_the_environment_said_and_gives_up_after_three(
    brokers: tuple[Broker, Broker], asked: ScorerClient
) -> None:
    recorder = Recorder()
    recorder.tokens, recorder.loss_mask = [5, 6, 7], [1, 0, 1]
    teacher, prompt = TeacherClient(asked, temperature=1.0, deadline_s=0.01), prompts(1)[0]
    async with answering(brokers[0], QUALITY, per_token), asyncio.timeout(HANGS_AFTER_S):
        found = (await teacher.logprobs(prompt, recorder)).teacher_logprobs
        naming = TeacherClient(asked, temperature=1.0, deadline_s=30, top_k=2)
        named = await naming.logprobs(prompt, recorder)
    np.testing.assert_allclose(found, np.array([-0.005, 0, -0.007], np.float32))
    np.testing.assert_allclose(named.teacher_logprobs, found)
    assert (named.candidate_tokens is None, named.candidate_logprobs is None) == (False, False)
    assert np.array_equal(named.candidate_tokens, [[0, 1], [0, 0], [0, 1]])  # type: ignore[arg-type]
    assert np.array_equal(named.candidate_logprobs, [[-1, -2], [0, 0], [-1, -2]])  # type: ignore[arg-type]
    async with answering(brokers[0], QUALITY, lambda request: -per_token(request)), asyncio.timeout(HANGS_AFTER_S):
        for kind in (UnscoredError, UnscoredError, RewardError):
            with pytest.raises(kind, match=r"the teacher was asked in vain on prompt .* logprobs of up to 0.00"):
                await teacher.logprobs(prompt, recorder)
