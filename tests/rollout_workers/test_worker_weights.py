"""A worker gets its weights and proves them: a real server and engine; the test moves the learner's side by hand."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.broker.client.broker import BlockingBroker, Broker
from headway.broker.errors import WeightSyncError
from headway.broker.schema import Trajectory, WeightVersion
from headway.broker.schema.status import WorkerInfo
from headway.broker.schema.weights import Probe
from headway.broker.server.embedded import EmbeddedServer
from headway.rollout_workers.engines.base import Chunk, GenerationRequest
from headway.rollout_workers.engines.weight_loading.shared_tensors import Handover
from headway.rollout_workers.weight_updates import engine_weights
from headway.rollout_workers.weight_updates.engine_weights import refuse_other_logprobs
from headway.weightsync.config import WeightsConfig
from headway.weightsync.publisher import Publisher, PublishReport
from headway.weightsync.subscriber import Subscriber
from tests.full_disk import no_files_over

from .loop import (
    CAPACITY,
    LONG,
    LONGER,
    Deliveries,
    Learner,
    delivery,
    make_engine,
    make_worker,
    running,
    until,
    until_a_group_forms,
)
from .models import forward_logprobs, make_model


def check_logprobs(learner: Learner, trajectories: Sequence[Trajectory]) -> None:
    """Assert that each token's logprob is that of a forward with the weights that its span names."""
    for trajectory in trajectories:
        for span in trajectory.spans:
            prompt, response = trajectory.prompt_tokens.tolist(), trajectory.response_tokens.tolist()
            expected = forward_logprobs(learner.models[span.version], prompt, response[: span.end])
            sampled = trajectory.behavior_logprobs[span.start : span.end]
            np.testing.assert_allclose(sampled, expected[span.start :].numpy(), atol=1e-4)


async def test_spans_name_the_weights_that_sampled_each_token_across_a_swap(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(brokers[0], groups=4)
    deliveries = Deliveries()
    worker = make_worker(brokers[1], make_engine(tmp_path, max_model_len=1024), deliveries, max_new_tokens=LONGER)
    await learner.publish(0, deliveries)
    async with running(worker):
        await learner.take(0)
        await until(lambda: worker.info().generated_tokens > CAPACITY * LONGER)
        await learner.publish(1, deliveries)
        trajectories = [t for group in await learner.take(1) for t in group.trajectories]
        assert worker.info().swaps == 2
        assert worker.info().swap_s > worker.info().paused_s == 0
    assert any(len(trajectory.spans) == 2 for trajectory in trajectories)
    check_logprobs(learner, trajectories)


async def test_published_weights_reach_the_engine_by_pull_and_then_by_broadcast(
    server: EmbeddedServer, brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    config = WeightsConfig(broadcast_timeout_s=20)
    blocking = await asyncio.to_thread(BlockingBroker, server.url, "run")
    learner = await asyncio.to_thread(blocking.call, Learner.start(blocking.broker, groups=2))
    publisher = await asyncio.to_thread(Publisher, blocking, learner.owner, config)
    worker = make_worker(brokers[1], make_engine(tmp_path), Subscriber(brokers[1], "worker-1", config), heartbeat_s=0.2)

    async def publish(step: int) -> PublishReport:
        sent = delivery(learner.version(step), make_model("dense", step))
        gathering = publisher.gather(sent.tensors)
        return await asyncio.to_thread(publisher.publish, sent.manifest.version, gathering, sent.manifest.probe)

    try:
        async with running(worker):
            assert (await publish(0)).members == ()
            groups = await asyncio.to_thread(blocking.call, learner.take(0))
            assert {s.version for g in groups for t in g.trajectories for s in t.spans} == {learner.version(0)}
            step, members = await until_a_group_forms(publish)
            assert members == ("worker-1",)
            await until(lambda: worker.info().version == learner.version(step))
            assert worker.info().broadcast_epoch > 0
    finally:
        await asyncio.to_thread(publisher.close)
        await asyncio.to_thread(blocking.close)


async def test_a_worker_that_follows_by_pull_is_in_no_group(
    server: EmbeddedServer, brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    config = WeightsConfig(broadcast_timeout_s=20, follow="pull")
    blocking = await asyncio.to_thread(BlockingBroker, server.url, "run")
    learner = await asyncio.to_thread(blocking.call, Learner.start(blocking.broker, groups=2))
    publisher = await asyncio.to_thread(Publisher, blocking, learner.owner, config)
    worker = make_worker(brokers[1], make_engine(tmp_path), Subscriber(brokers[1], "worker-1", config), heartbeat_s=0.1)

    async def heartbeat(version: WeightVersion) -> WorkerInfo:
        await until(lambda: worker.info().version == version)
        while True:
            for info in await brokers[0].status.workers():
                if info.version == version:
                    return info
            await asyncio.sleep(0.05)

    try:
        async with running(worker):
            for step in range(2):
                sent = delivery(learner.version(step), make_model("dense", step))
                gathering = publisher.gather(sent.tensors)
                version, probe = sent.manifest.version, sent.manifest.probe
                report = await asyncio.to_thread(publisher.publish, version, gathering, probe)
                assert (report.members, report.failed) == ((), "")
                info = await heartbeat(version)
                assert (info.wants_broadcast, info.broadcast_epoch, info.last_error) == (False, 0, "")
    finally:
        await asyncio.to_thread(publisher.close)
        await asyncio.to_thread(blocking.close)


async def test_an_engine_that_fails_the_probe_ends_the_worker_with_numbers(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(brokers[0], groups=2)
    deliveries = Deliveries()
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries)
    await learner.publish(0, deliveries, error=0.25)
    with pytest.raises(WeightSyncError, match=r"differ from the learner's by a mean of 0.25 .* explains 0.001"):
        await worker.run()
    assert (await brokers[0].status.snapshot()).queues.admitted == 0


async def test_an_engine_that_rounds_weights_itself_is_given_more(
    brokers: tuple[Broker, Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = await Learner.start(brokers[0], groups=2)
    deliveries, engine = Deliveries(), make_engine(tmp_path)
    monkeypatch.setattr(engine, "rounding", 0.3, raising=False)
    worker = make_worker(brokers[1], engine, deliveries)
    await learner.publish(0, deliveries, error=0.25)
    async with running(worker) as run:
        await learner.take(0)
        await learner.publish(1, deliveries, error=0.35)
        with pytest.raises(WeightSyncError, match=r"by a mean of 0\.35 .* explains 0\.3"):
            await run


async def test_an_engine_that_never_answers_the_probe_ends_the_worker(
    brokers: tuple[Broker, Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = await Learner.start(brokers[0], groups=2)
    deliveries, engine = Deliveries(), make_engine(tmp_path)
    monkeypatch.setattr(engine, "score", lambda _: asyncio.Event().wait())
    monkeypatch.setattr(engine_weights, "PROBE_S", 0.1)
    await learner.publish(0, deliveries)
    with pytest.raises(WeightSyncError, match=r"did not answer the probe of .* within 0\.1 s"):
        await asyncio.wait_for(make_worker(brokers[1], engine, deliveries).run(), 240)


def test_one_unlikely_token_fails_no_probe() -> None:
    """In bfloat16 one logprob may deviate by more than its neighbours together, although the weights are right."""
    probe, version = (
        Probe(token_ids=[1] * 6, logprobs=[-1.0, -2.0, -17.0, -3.0, -1.0], tolerance=0.25),
        WeightVersion(1, 0),
    )
    refuse_other_logprobs(probe, [-1.0, -2.0, -16.0, -3.1, -1.0], version)
    refuse_other_logprobs(Probe(token_ids=[1], logprobs=[], tolerance=0.0), [], version)  # one token has no logprob
    with pytest.raises(WeightSyncError, match=r"by a mean of 0\.42 where rounding explains 0\.25"):
        refuse_other_logprobs(probe, [-1.0, -2.0, -16.0, -3.1, -2.0], version)
    with pytest.raises(WeightSyncError, match="by a mean of nan"):
        refuse_other_logprobs(probe, [-1.0, -2.0, -17.0, -3.0, float("nan")], version)


def flip_a_bit(tensor: torch.Tensor) -> None:
    """Change too little for any probe to see."""
    tensor.view(torch.int32).view(-1)[7] ^= 1


def spoil(engine: Any, how: Callable[[torch.Tensor], object], *spoiled: int) -> list[WeightVersion]:
    """Give the swaps of these numbers a wrong tensor, and return the versions of all swaps in order.

    They fail so late that tokens sampled meanwhile would show.
    """
    swap, swaps = engine.swap_weights, list[WeightVersion]()

    async def swap_spoiled(version: WeightVersion, tensors: Any, **options: Any) -> None:
        (name, tensor), *others = tensors
        changed = tensor.clone()
        if len(swaps) in spoiled:
            how(changed)
        swaps.append(version)
        try:
            await swap(version, [(name, changed), *others], **options)
        except WeightSyncError:
            await asyncio.sleep(0.2)
            raise

    engine.swap_weights = swap_spoiled
    return swaps


async def test_wrong_tensors_sample_nothing_and_end_the_worker(brokers: tuple[Broker, Broker], tmp_path: Path) -> None:
    learner = await Learner.start(brokers[0], groups=2)
    deliveries, engine = Deliveries(), make_engine(tmp_path)
    swaps, generate, sampled_by = spoil(engine, flip_a_bit, 1, 2), engine.generate, set[WeightVersion]()

    async def noted(asked: GenerationRequest) -> AsyncIterator[Chunk]:
        async with aclosing(generate(asked)) as chunks:
            async for chunk in chunks:
                sampled_by.add(chunk.version)
                yield chunk

    engine.generate = noted
    worker = make_worker(brokers[1], engine, deliveries, max_new_tokens=LONG)
    await learner.publish(0, deliveries)
    task = asyncio.create_task(worker.run())
    await until(lambda: worker.info().generated_tokens > 0)
    await learner.publish(1, deliveries)
    with pytest.raises(WeightSyncError, match=r"the engine holds another .* than was published"):
        await task
    assert swaps == [learner.version(0), learner.version(1), learner.version(1)]
    assert sampled_by == {learner.version(0)}


async def test_tensors_that_arrive_wrong_once_are_swapped_again_before_anything_is_sampled(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(brokers[0], groups=4)
    deliveries, engine = Deliveries(), make_engine(tmp_path, max_model_len=1024)
    swaps = spoil(engine, torch.Tensor.neg_, 1)
    worker = make_worker(brokers[1], engine, deliveries, max_new_tokens=LONGER)
    await learner.publish(0, deliveries)
    async with running(worker):
        await learner.take(0)
        await until(lambda: worker.info().generated_tokens > CAPACITY * LONGER)
        await learner.publish(1, deliveries)
        trajectories = [t for group in await learner.take(1) for t in group.trajectories]
        assert (worker.info().swaps, worker.info().last_error) == (2, "")
    assert swaps == [learner.version(0), learner.version(1), learner.version(1)]
    assert any(len(trajectory.spans) == 2 for trajectory in trajectories)
    check_logprobs(learner, trajectories)


async def test_samples_of_weights_that_fail_their_probe_are_not_submitted(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(brokers[0], groups=2)
    deliveries = Deliveries()
    worker = make_worker(brokers[1], make_engine(tmp_path, max_model_len=1024), deliveries, max_new_tokens=LONGER)
    await learner.publish(0, deliveries)
    running_worker = asyncio.create_task(worker.run())
    await until(lambda: worker.info().generated_tokens > 0)
    await learner.publish(1, deliveries, error=0.25)
    with pytest.raises(WeightSyncError):
        await running_worker
    queues = (await brokers[0].status.snapshot()).queues
    assert (queues.leased, queues.retry, queues.ready) == (0, CAPACITY, 0)


async def test_a_swap_that_fails_once_is_repeated(brokers: tuple[Broker, Broker], tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    swap, swaps = engine.swap_weights, 0

    async def stumble(version: WeightVersion, tensors: Any, **how: Any) -> None:
        nonlocal swaps
        swaps += 1
        if swaps == 1:
            raise WeightSyncError("busy")
        await swap(version, tensors, **how)

    engine.swap_weights = stumble
    learner = await Learner.start(brokers[0], groups=1)
    deliveries = Deliveries()
    worker = make_worker(brokers[1], engine, deliveries)
    await learner.publish(0, deliveries)
    async with running(worker):
        await until(lambda: worker.info().version == learner.version(0))
    assert (swaps, worker.info().swaps) == (2, 1)


async def test_a_swap_that_finds_no_room_waits_and_the_engine_goes_on(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    engine, handover = make_engine(tmp_path), Handover(lambda tensors: tensors)
    swap = engine.swap_weights

    async def share(version: WeightVersion, tensors: Any, **how: Any) -> None:
        with handover.of(tensors):  # an engine with processes of its own begins like this
            await swap(version, tensors, **how)

    engine.swap_weights = share
    learner = await Learner.start(brokers[0], groups=4)
    deliveries = Deliveries()
    worker = make_worker(brokers[1], engine, deliveries, max_new_tokens=LONG)
    await learner.publish(0, deliveries)
    async with running(worker):
        await until(lambda: worker.info().version == learner.version(0))
        with no_files_over(1000):
            await learner.publish(1, deliveries)
            await until(lambda: "no room for" in worker.info().last_error)
            generated = worker.info().generated_tokens
            await until(lambda: worker.info().generated_tokens > generated)
            assert worker.info().version == learner.version(0)
            await learner.publish(2, deliveries)
            await until(deliveries.queue.empty)  # the worker tries it in the place of version 1
        await until(lambda: worker.info().version == learner.version(2))
        assert (worker.info().swaps, worker.info().last_error) == (2, "")


@pytest.mark.parametrize("policy", ["recompute", "keep"])
async def test_the_policy_for_caches_reaches_the_engine(
    brokers: tuple[Broker, Broker], tmp_path: Path, policy: Any
) -> None:
    engine = make_engine(tmp_path)
    swap, kept = engine.swap_weights, []

    async def noted(version: WeightVersion, tensors: Any, *, keep_cache: bool, **how: Any) -> None:
        kept.append(keep_cache)
        await swap(version, tensors, keep_cache=keep_cache, **how)

    engine.swap_weights = noted
    learner = await Learner.start(brokers[0], groups=1)
    deliveries = Deliveries()
    worker = make_worker(brokers[1], engine, deliveries, weights=WeightsConfig(kv_policy=policy))
    await learner.publish(0, deliveries)
    async with running(worker):
        await until(lambda: worker.info().version == learner.version(0))
    assert kept == [policy == "keep"]


async def test_older_weights_are_ignored(
    brokers: tuple[Broker, Broker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deliveries = Deliveries()
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries)
    model = make_model("dense", 0)
    for version in (WeightVersion(2, 3), WeightVersion(1, 9), WeightVersion(2, 3), WeightVersion(3, 1)):
        deliveries.queue.put_nowait(delivery(version, model))
    async with running(worker):
        await until(lambda: worker.info().version == WeightVersion(3, 1))
    assert worker.info().swaps == 2
    assert sum("is held; it was ignored" in record.message for record in caplog.records) == 2
