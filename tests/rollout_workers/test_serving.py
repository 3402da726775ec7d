"""A scorer's process from within, on a real server with a runner that the test controls."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.broker.client.broker import Broker, Outages
from headway.broker.client.scoring import Scores
from headway.broker.schema import ScoreRequest
from headway.broker.server.embedded import EmbeddedServer
from headway.rollout_workers.scorers import ScoringError, serving
from headway.rollout_workers.scorers.scorer_client import ScorerClient
from headway.rollout_workers.scorers.serving import ModelFailedError, RequestLimits, ScorerContext, ScorerServer

from .loop import Learner

NAME = "quality"


@pytest.fixture
def server(tmp_path: Path) -> Any:
    with EmbeddedServer(tmp_path / "server") as server:
        yield server


class Lengths:
    """A runner whose scores are lengths; each token takes some time, and some tokens are too much for the model."""

    vocabulary, longest = 100, 60

    def __init__(self, *, token_s: float = 0.0, bad: tuple[int, ...] = ()) -> None:
        self.token_s, self.bad = token_s, bad
        self.batches = list[int]()

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        self.batches.append(len(requests))
        if any(token in self.bad for request in requests for token in request.response_tokens):
            raise ValueError("out of memory")
        time.sleep(self.token_s * sum(1 + len(request.response_tokens) for request in requests))
        return [np.array([len(request.response_tokens)], np.float32) for request in requests]


def serve(broker: Broker, runner: Lengths, *, hold_s: float = 30.0) -> ScorerServer:
    context = ScorerContext(
        scorer=NAME,
        kind="reward_model",
        process="p-1",
        device="cpu",
        limits=RequestLimits(most_response_tokens=40, most_tokens=50),
        batch_tokens=16384,
        hold_s=hold_s,
        lease_ttl_s=30,
        heartbeat_s=0.1,
        patience_s=0,
    )
    return ScorerServer(context, broker, runner)


async def test_a_scorer_slower_than_its_askers_takes_batches_that_it_answers_in_time(
    brokers: tuple[Broker, Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scorer that took all requests at once would hold them for longer than it may, and never answer."""
    monkeypatch.setattr(serving, "FIRST_BATCH_TOKENS", 40)
    await Learner.start(brokers[0], groups=1)
    runner, hold_s = Lengths(token_s=0.004), 1.5
    asked = ScorerClient(brokers[1].scoring, Outages(brokers[1].url), NAME, hold_s=hold_s)
    waiting = asyncio.gather(*(asked.score([1], [2] * 19) for _ in range(40)))
    scorer = serve(brokers[0], runner, hold_s=hold_s)
    running = asyncio.create_task(scorer.run())
    async with asyncio.timeout(240):
        assert {float(scores[0]) for scores in await waiting} == {19.0}
    (queue,) = (await brokers[0].status.snapshot()).scoring
    assert (queue.answered, queue.failed, queue.expired_leases) == (40, 0, 0)
    assert max(runner.batches) < 10
    scorer.request_drain()
    assert await running == "drained"
    await asked.close()


async def test_requests_that_the_model_cannot_score_cost_the_others_nothing_and_end_no_process(
    brokers: tuple[Broker, Broker],
) -> None:
    """Any program with a worker's password may ask, so the number of such requests has no limit."""
    await Learner.start(brokers[0], groups=1)
    asked = ScorerClient(brokers[1].scoring, Outages(brokers[1].url), NAME, hold_s=30)
    empty: list[int] = []
    told: list[tuple[list[int], list[int], float, int, str]] = [
        *(([1], [66, n], 1, 0, "the reward_model failed: ValueError: out of memory") for n in range(4)),
        *((empty, [n], 1, 0, "it has no prompt tokens") for n in range(4)),
        ([1], [2], 1e-300, 0, "its temperature is 1e-300, outside 0.001 to 1000"),
        ([1], [2], 1e30, 0, "its temperature is 1e+30, outside 0.001 to 1000"),
        ([1], [100], 1, 0, "it has token 100, and the vocabulary of the reward_model ends at 100"),
        ([1], [1] * 70, 1, 0, "it has 71 tokens, and the reward_model reads 60 at most"),
        ([1], [1] * 41, 1, 0, "its response has 41 tokens, and sampling.max_new_tokens is 40"),
        ([1] * 40, [1] * 15, 1, 0, "it has 55 tokens, and engine.max_model_len is 50"),
        ([1], [1], 1, 7, "it wants 7 candidates in each place; algorithm.distillation.top_k is 0"),
    ]
    scorer = serve(brokers[0], Lengths(bad=(66,)))
    running = asyncio.create_task(scorer.run())
    async with asyncio.timeout(240):
        bad = [asked.score(prompt, response, heat, top_k) for prompt, response, heat, top_k, _ in told]
        found = await asyncio.gather(*bad, *(asked.score([1], [8] * n) for n in (1, 2, 5)), return_exceptions=True)
    assert [float(one[0]) for one in found[len(told) :] if not isinstance(one, BaseException)] == [1, 2, 5]
    for error, (*_, reason) in zip(found, told, strict=False):
        assert isinstance(error, ScoringError)
        assert reason in str(error)
    assert not running.done()
    scorer.request_drain()
    assert await running == "drained"
    await asked.close()


async def test_a_model_that_fails_at_the_scorers_own_request_ends_its_process(
    brokers: tuple[Broker, Broker],
) -> None:
    await Learner.start(brokers[0], groups=1)
    asked = ScorerClient(brokers[1].scoring, Outages(brokers[1].url), NAME, hold_s=30)
    waiting = asyncio.ensure_future(asked.score([1], [66]))
    async with asyncio.timeout(240):
        with pytest.raises(ModelFailedError, match=r"failed at a request .*out of memory.* then at a probe"):
            await serve(brokers[0], Lengths(bad=(0, 66))).run()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asked.close()
