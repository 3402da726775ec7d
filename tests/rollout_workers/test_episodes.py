"""Episodes of several turns: recorder, worker and heir keep an environment's text apart from sampled tokens."""

import asyncio
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.broker.client.broker import Broker
from headway.broker.schema import Trajectory, WeightVersion
from headway.rollout_workers.config import SamplingConfig
from headway.rollout_workers.engines.base import Chunk
from headway.rollout_workers.environments import Episode, SingleTurn, Step
from headway.rollout_workers.evaluation import evaluate
from headway.rollout_workers.rewards.base import RewardError, UnscoredError
from headway.rollout_workers.samples.episode import Episodes
from headway.rollout_workers.samples.recorder import Recorder
from headway.rollout_workers.worker import Worker

from .generation import hold
from .loop import (
    CAPACITY,
    LONG,
    Deliveries,
    Learner,
    OneReward,
    decoding,
    make_engine,
    make_worker,
    prompts,
    running,
    until,
)
from .models import forward_logprobs, make_model
from .test_routed_experts import chosen_by

STOPS = range(0, 64, 8)
SAID = (5, 7, 9)
LEASE_TTL_S = 1.0


class AsksOn:
    """Says the same after every turn, as long as there is room."""

    max_turns = 1000

    def __init__(self, failures: int = 0) -> None:
        self._failures = failures

    async def step(self, episode: Episode) -> Step:
        if self._failures:
            self._failures -= 1
            raise UnscoredError("told to fail")
        says = SAID if episode.finish_reason == "stop" else ()
        return Step(reward=0.25 * episode.score, says=says, components={"turns": float(len(episode.answers))})

    async def close(self) -> None:
        """There is nothing to free."""


async def kill_in_a_later_turn(worker: Worker) -> None:
    """Kill the worker without a farewell: tokens outside of segments are lost, and leases run out."""

    async def vanish() -> None:
        """Leave without a word."""

    worker._leave = vanish  # type: ignore[method-assign]
    task = asyncio.create_task(worker.run())
    await until(lambda: worker.info().generated_tokens > CAPACITY * 40)
    task.cancel()
    await asyncio.wait([task])
    await worker._engine.close()


def check(learner: Learner, trajectory: Trajectory) -> None:
    """Assert structure, logprobs of sampled tokens given all tokens read before, and versions."""
    response, mask = trajectory.response_tokens, trajectory.loss_mask.astype(bool)
    assert len(trajectory.turns) > 1
    assert len(response) <= LONG
    for turn, following in pairwise(trajectory.turns):
        assert response[turn.end : following.start].tolist() == list(SAID)
        assert response[turn.end - 1] in STOPS
    for turn in trajectory.turns:
        assert not np.isin(response[turn.start : turn.end - 1], STOPS).any()
        assert turn.reward == 0.25
    assert trajectory.reward == 0.25 * len(trajectory.turns)
    assert trajectory.rewards == {"one": 1.0, "environment/turns": len(trajectory.turns)}
    assert not trajectory.behavior_logprobs[~mask].any()
    for span in trajectory.spans:
        model, where = learner.models[span.version], slice(span.start, span.end)
        expected = forward_logprobs(model, trajectory.prompt_tokens.tolist(), response[: span.end].tolist())
        differences = trajectory.behavior_logprobs[where] - expected[where].numpy()
        assert np.abs(differences[mask[where]]).max(initial=0) < 1e-4
    said_first = np.flatnonzero(~mask[1:] & mask[:-1]) + 1
    versions = [span.version for span in trajectory.spans for _ in range(span.start, span.end)]
    assert [versions[at] for at in said_first] == [versions[at - 1] for at in said_first]


async def test_an_episode_goes_on_after_its_worker_was_killed_in_a_later_turn(
    three_brokers: tuple[Broker, Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(three_brokers[0], groups=2, architecture="moe")
    first, second = Deliveries(), Deliveries()
    await learner.publish(0, first)
    options: dict[str, Any] = {
        "max_new_tokens": LONG,
        "stop_token_ids": STOPS,
        "environment": AsksOn(),
        "segment_tokens": 4,
        "records_experts": True,
        "lease_ttl_s": LEASE_TTL_S,
    }
    killed = make_worker(three_brokers[1], make_engine(tmp_path / "1", architecture="moe"), first, **options)
    await kill_in_a_later_turn(killed)
    await learner.publish(1, second)
    engine = make_engine(tmp_path / "2", architecture="moe")
    heir = make_worker(three_brokers[2], engine, second, name="worker-2", **options)
    async with running(heir):
        groups = await learner.take(1)
    assert heir.resumed_tokens > CAPACITY * 20
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert {span.version.step for trajectory in trajectories for span in trajectory.spans} == {0, 1}
    for trajectory in trajectories:
        check(learner, trajectory)
        assert trajectory.experts is not None
        if len(trajectory.spans) == 1:
            read = [*trajectory.prompt_tokens.tolist(), *trajectory.response_tokens.tolist()]
            chosen = chosen_by(learner.models[trajectory.spans[0].version], read)[:-1]
            np.testing.assert_array_equal(np.sort(trajectory.experts), chosen)


async def test_weights_change_in_mid_episode_and_a_turn_that_cannot_be_answered_is_handed_back(
    three_brokers: tuple[Broker, Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(three_brokers[0], groups=2)
    deliveries = Deliveries()
    await learner.publish(0, deliveries)
    worker = make_worker(
        three_brokers[1],
        make_engine(tmp_path),
        deliveries,
        max_new_tokens=LONG,
        stop_token_ids=STOPS,
        environment=AsksOn(failures=2),
    )
    async with running(worker):
        await until(lambda: worker.info().generated_tokens > CAPACITY * 30)
        await learner.publish(1, deliveries)
        groups = await learner.take(1)
    assert worker.unscored == 2
    for group in groups:
        for trajectory in group.trajectories:
            check(learner, trajectory)


async def test_an_evaluation_plays_whole_episodes(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    await hold(engine, make_model("dense", 0))
    sampling = SamplingConfig(max_new_tokens=60)
    single = Episodes(SingleTurn(), OneReward(), decoding(STOPS))
    several = Episodes(AsksOn(), OneReward(), decoding(STOPS))
    alone = await evaluate(engine, prompts(4), single, decoding(STOPS), sampling, 1.0)
    played = await evaluate(engine, prompts(4), several, decoding(STOPS), sampling, 1.0)
    assert (alone.reward_mean, alone.pass_rate) == (1.0, 1.0)
    assert played.response_tokens_mean > alone.response_tokens_mean
    assert played.reward_mean >= 0.5, "the sum over at least two turns"
    assert played == await evaluate(engine, prompts(4), several, decoding(STOPS), sampling, 1.0)
    await engine.close()


class Says:
    """Says one thing after every turn."""

    max_turns = 3
    kind = "my_env:Says"

    def __init__(self, says: str | tuple[int, ...]) -> None:
        self.says = says

    async def step(self, episode: Episode) -> Step:
        return Step(reward=0.0, says=self.says)

    async def close(self) -> None:
        """There is nothing to free."""


def a_turn() -> Recorder:
    recorder = Recorder()
    recorder.add(Chunk(token_ids=[1, 2], logprobs=[-0.5, -0.5], version=WeightVersion(1, 0), finish_reason="stop"))
    return recorder


@pytest.mark.parametrize("says", [(3, 10), (-1,), (2**40,), " "])
async def test_what_the_model_cannot_read_is_the_environments_fault_and_not_the_engines(
    says: str | tuple[int, ...],
) -> None:
    reader = decoding(STOPS)._replace(vocabulary=10)
    episodes = Episodes(Says(says), OneReward(), reader)
    for error in (UnscoredError, UnscoredError, RewardError):
        with pytest.raises(error, match="environment my_env:Says said what the model cannot read on prompt '"):
            await episodes.score_turn(prompts(1)[0], a_turn(), 100)
    possible = await Episodes(Says((3, 9)), OneReward(), reader).score_turn(prompts(1)[0], a_turn(), 100)
    assert possible.said == [3, 9]


async def test_a_text_is_tokenized_beside_the_event_loop() -> None:
    threads = []

    def encode(text: str, after: int | None) -> list[int]:
        threads.append(threading.current_thread())
        return [3]

    reader = decoding(STOPS)._replace(encode=encode)
    await Episodes(Says("more"), OneReward(), reader).score_turn(prompts(1)[0], a_turn(), 100)
    assert threads
    assert threading.main_thread() not in threads
