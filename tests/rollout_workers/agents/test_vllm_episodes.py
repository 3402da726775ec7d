"""Agents play with vLLM: what is trained of their episodes is what vLLM returned for that context, and the model's."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headway.broker.client.broker import Broker
from headway.broker.schema import Trajectory
from headway.broker.user_code.import_paths import ImportRoots
from headway.broker.wire.rows import rows_of
from headway.rollout_workers.agents.endpoint.server import Endpoint
from headway.rollout_workers.agents.hosted import AgentHosts
from headway.rollout_workers.agents.player import AgentPlayer, OpenSessions
from headway.rollout_workers.config import AgentConfig, EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import GenerationRequest
from tests.rollout_workers.loop import (
    CAPACITY,
    Deliveries,
    Learner,
    OneReward,
    decoding,
    make_worker,
    running,
)
from tests.rollout_workers.marks import VLLM
from tests.rollout_workers.models import forward_logprobs, make_model, save_config

from .numbers import TURNS, NumberFormat

pytestmark = [*VLLM, pytest.mark.timeout(900)]  # vLLM takes a minute to start, and a busy machine many more
HERE = "tests.rollout_workers.agents"
Sampled = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""What vLLM read, what it sampled, and the logprobs."""


def recorded(engine: Any) -> list[Sampled]:
    """Return a list to which all that the engine has answered is added."""
    record: list[Sampled] = []
    generate = engine.generate

    async def generating(request: GenerationRequest) -> AsyncIterator[Any]:
        tokens: list[int] = []
        logprobs: list[float] = []
        async for chunk in generate(request):
            tokens += chunk.token_ids
            logprobs += chunk.logprobs
            yield chunk
        record.append((tuple(request.prompt_tokens), tuple(tokens), tuple(logprobs)))

    engine.generate = generating
    return record


def check(trajectory: Trajectory, record: list[Sampled], learner: Learner) -> None:
    """Assert that each turn is what vLLM answered after its context, with the logprobs of the model."""
    (row,) = rows_of(trajectory)
    tokens, positions = row.token_ids.tolist(), row.positions.tolist()
    shift = {position: row.context_length + place for place, position in enumerate(positions)}
    expected = forward_logprobs(
        learner.models[trajectory.spans[0].version], tokens[: row.context_length], tokens[row.context_length :]
    )
    assert len(trajectory.turns) == TURNS
    for turn in trajectory.turns:
        own = [place for place in range(turn.start, turn.end) if trajectory.loss_mask[place]]
        first = shift[own[0]]
        sampled = tuple(trajectory.response_tokens[own].tolist())
        logprobs = trajectory.behavior_logprobs[own].tolist()
        found = [one for one in record if one[:2] == (tuple(tokens[:first]), sampled)]
        assert any(one[2] == pytest.approx(logprobs, abs=1e-6) for one in found)
        for place, logprob in zip(own, logprobs, strict=True):
            assert abs(float(expected[shift[place] - row.context_length]) - logprob) < 1e-3


@pytest.mark.parametrize("agent", [f"{HERE}.numbers:talk", f"{HERE}.number_clients:talk"])
async def test_what_is_trained_is_what_vllm_sampled(agent: str, brokers: tuple[Broker, Broker], tmp_path: Path) -> None:
    pytest.importorskip("openai")
    directory = save_config(make_model("dense", 0), tmp_path / "model")
    made = EngineConfig(kind="vllm", max_concurrent=CAPACITY, max_model_len=256)
    engine: Any = open_engine(made, directory, seed=0)  # in this thread, whose event loop takes its outputs
    record = recorded(engine)
    learner, deliveries = await Learner.start(brokers[0], groups=2), Deliveries()
    await learner.publish(0, deliveries)
    config = AgentConfig(kind=agent, max_turn_tokens=12)
    sessions = OpenSessions()
    endpoint = await Endpoint.start(sessions)
    hosts = await AgentHosts.open(config, ImportRoots(("tests",), Path.cwd()))
    player = AgentPlayer(config, hosts, endpoint, sessions, OneReward(), NumberFormat(), decoding(()), model="m")
    worker = make_worker(brokers[1], engine, deliveries, player=player, max_new_tokens=200)
    try:
        async with running(worker):
            groups = await learner.take(0)
    finally:
        await player.close()
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert trajectories
    for trajectory in trajectories:
        check(trajectory, record, learner)
