"""Workers continue samples of other workers: a real server and embedded engine, and a learner moved by hand."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.broker.client.broker import Broker
from headway.broker.errors import WeightSyncError
from headway.broker.schema import Group, Trajectory, WeightVersion
from headway.rollout_workers.samples.recorder import MissingExpertsError
from headway.rollout_workers.worker import Worker

from .loop import CAPACITY, LONG, LONGER, Deliveries, Learner, make_engine, make_worker, until
from .models import forward_logprobs
from .test_routed_experts import chosen_by


async def work_a_while(worker: Worker) -> int:
    """Begin all samples, finish none, drain, and return the number of generated tokens."""
    task = asyncio.create_task(worker.run())
    await until(lambda: worker.info().generated_tokens > CAPACITY * 30)
    worker.request_drain()
    assert await task == "drained"
    assert worker.info().submitted == 0
    return worker.info().generated_tokens


def check_logprobs(learner: Learner, trajectory: Trajectory) -> None:
    prompt, response = trajectory.prompt_tokens.tolist(), trajectory.response_tokens.tolist()
    for span in trajectory.spans:
        expected = forward_logprobs(learner.models[span.version], prompt, response[: span.end])
        sampled = trajectory.behavior_logprobs[span.start : span.end]
        np.testing.assert_allclose(sampled, expected[span.start :].numpy(), atol=1e-4)


async def finish(learner: Learner, worker: Worker, step: int = 0) -> tuple[Group, ...]:
    """Return a step's batch. Raises the error that ends the worker before it is complete."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run())
        groups = await learner.take(step)
        worker.request_drain()
    return groups


async def test_what_a_drained_worker_generated_is_gone_on_with(
    three_brokers: tuple[Broker, Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(three_brokers[0], groups=2)
    first, second = Deliveries(), Deliveries()
    await learner.publish(0, first, second)
    drained = make_worker(three_brokers[1], make_engine(tmp_path / "1"), first, max_new_tokens=LONG)
    handed_over = await work_a_while(drained)

    heir = make_worker(three_brokers[2], make_engine(tmp_path / "2"), second, name="worker-2", max_new_tokens=LONG)
    groups = await finish(learner, heir)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert [len(trajectory.response_tokens) for trajectory in trajectories] == [LONG] * CAPACITY
    assert heir.resumed_tokens == handed_over
    assert heir.info().generated_tokens == CAPACITY * LONG - handed_over
    queues = (await three_brokers[0].status.snapshot()).queues
    assert (queues.resumed_tokens, queues.expired_leases) == (handed_over, 0)
    for trajectory in trajectories:
        check_logprobs(learner, trajectory)


async def test_an_heir_has_the_chosen_experts_of_the_whole_sample(
    three_brokers: tuple[Broker, Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(three_brokers[0], groups=2, architecture="moe")
    first, second = Deliveries(), Deliveries()
    await learner.publish(0, first, second)
    options: dict[str, Any] = {"max_new_tokens": LONG, "records_experts": True}
    drained = make_worker(three_brokers[1], make_engine(tmp_path / "1", architecture="moe"), first, **options)
    assert await work_a_while(drained) > 0
    engine = make_engine(tmp_path / "2", architecture="moe")
    groups = await finish(learner, make_worker(three_brokers[2], engine, second, name="worker-2", **options))
    (model,) = learner.models.values()
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        tokens = [*trajectory.prompt_tokens.tolist(), *trajectory.response_tokens.tolist()]
        assert trajectory.experts is not None
        np.testing.assert_array_equal(np.sort(trajectory.experts), chosen_by(model, tokens)[:-1])


async def test_a_sample_that_was_begun_without_experts_is_refused(
    three_brokers: tuple[Broker, Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(three_brokers[0], groups=2, architecture="moe")
    first, second = Deliveries(), Deliveries()
    await learner.publish(0, first, second)
    drained = make_worker(three_brokers[1], make_engine(tmp_path / "1", architecture="moe"), first, max_new_tokens=LONG)
    await work_a_while(drained)
    engine = make_engine(tmp_path / "2", architecture="moe")
    heir = make_worker(three_brokers[2], engine, second, name="worker-2", max_new_tokens=LONG, records_experts=True)
    with pytest.raises(MissingExpertsError, match="router_replay=true needs them"):
        await heir.run()


async def test_a_worker_goes_on_only_under_weights_as_new_as_the_segments(
    three_brokers: tuple[Broker, Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(three_brokers[0], groups=2)
    first, late = Deliveries(), Deliveries()
    await learner.publish(0, late)
    await learner.publish(1, first)
    drained = make_worker(three_brokers[1], make_engine(tmp_path / "1"), first, max_new_tokens=LONG)
    await work_a_while(drained)

    heir = make_worker(three_brokers[2], make_engine(tmp_path / "2"), late, name="worker-2", max_new_tokens=LONG)
    finishing = asyncio.create_task(finish(learner, heir, step=2))
    await until(lambda: heir.resumed_tokens > 0)
    await asyncio.sleep(0.1)
    assert heir.info().generated_tokens == 0
    await learner.publish(2, late)
    for group in await finishing:
        for trajectory in group.trajectories:
            assert [span.version.step for span in trajectory.spans] == [1, 2]
            check_logprobs(learner, trajectory)


async def test_segments_of_weights_that_fail_their_probe_are_not_stored(
    three_brokers: tuple[Broker, Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(three_brokers[0], groups=2)
    deliveries = Deliveries()
    engine = make_engine(tmp_path, max_model_len=1024)
    held: list[WeightVersion] = []

    async def score(token_ids: list[int]) -> list[float]:
        """Verify so slowly that the new weights generate meanwhile."""
        if len(held) > 0:
            so_far = worker.info().generated_tokens
            await until(lambda: worker.info().generated_tokens > so_far + CAPACITY * 20)
        held.append(learner.version(len(held)))
        return await verified(token_ids)

    verified, engine.score = engine.score, score
    worker = make_worker(three_brokers[1], engine, deliveries, max_new_tokens=LONGER, segment_tokens=1)
    await learner.publish(0, deliveries)
    task = asyncio.create_task(worker.run())
    await until(lambda: worker.info().generated_tokens > CAPACITY * 10)
    await learner.publish(1, deliveries, error=0.25)
    with pytest.raises(WeightSyncError):
        await task
    reply = await three_brokers[0].leases.lease("heir", learner.version(1), CAPACITY, 10)
    spans = [span for lease in reply.leases for segment in lease.segments for span in segment.spans]
    assert {span.version for span in spans} == {learner.version(0)}


async def test_a_fenced_segment_stops_its_sample_before_any_heartbeat(
    three_brokers: tuple[Broker, Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(three_brokers[0], groups=2)
    deliveries = Deliveries()
    await learner.publish(0, deliveries)
    engine = make_engine(tmp_path, max_model_len=1024)
    worker = make_worker(three_brokers[1], engine, deliveries, max_new_tokens=LONGER, heartbeat_s=3600)
    finishing = asyncio.create_task(finish(learner, worker))
    # A busy server may store a segment long after its tokens were sampled, and no worker goes on with what it lacks.
    await until(lambda: [len(held.segments._cuts) > 1 for held in worker._held._held.values()] == [True] * CAPACITY)
    await three_brokers[0].leases.release([held.lease for held in worker._held._held.values()])
    groups = await finishing
    assert worker._held.lost == CAPACITY
    assert worker.resumed_tokens > 0
    for group in groups:
        for trajectory in group.trajectories:
            assert len(trajectory.response_tokens) == LONGER
            check_logprobs(learner, trajectory)
