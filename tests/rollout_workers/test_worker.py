"""The worker against a real server with the real embedded engine; the learner's side is moved by hand."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from broker.client import BlockingBroker, Broker
from broker.errors import ServerRestartedError, WeightSyncError
from broker.schema import Group, ModelFiles, Probe, Prompt, WeightVersion, WorkerInfo
from broker.server import EmbeddedServer
from rollout_workers.engines.shared_tensors import Handover
from rollout_workers.model_files import ModelFilesError, fetch_model
from rollout_workers.rewards.base import RewardError, Score
from rollout_workers.weights import refuse_other_logprobs
from rollout_workers.worker import MOST_UNSUBMITTED, Worker
from tests.full_disk import no_files_over
from weightsync.config import WeightsConfig
from weightsync.publisher import Publisher, PublishReport
from weightsync.subscriber import Subscriber

from .loop import CAPACITY, GROUP_SIZE, Deliveries, Learner, OneScorer, delivery, make_engine, make_worker
from .models import forward_logprobs, make_model

LONG = 240


@pytest.fixture
def server(tmp_path: Path) -> Any:
    with EmbeddedServer(tmp_path / "server", appendfsync="always") as server:
        yield server


@pytest.fixture
async def brokers(server: EmbeddedServer) -> AsyncIterator[tuple[Broker, Broker]]:
    """The learner's and the worker's."""
    pair = Broker(server.url, "run", timeout_s=20), Broker(server.url, "run", timeout_s=0.5)
    yield pair
    for broker in pair:
        await broker.close()


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not claim():  # noqa: ASYNC110 - watches parts that announce nothing
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[asyncio.Task[str]]:
    """Drained at the end, if it still runs then."""
    task = asyncio.create_task(worker.run())
    try:
        yield task
    finally:
        worker.request_drain()
        await asyncio.wait([task])


async def take_all(learner: Learner, worker: Deliveries) -> list[Group]:
    """Train the whole run, publishing after every step."""
    taken: list[Group] = []
    for step in range(10_000):
        groups = await learner.take(step)
        if not groups:
            break
        taken += groups
        await learner.publish(step + 1, worker)
    return taken


async def test_the_engine_goes_on_while_samples_are_scored_up_to_a_bound(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    release, started, most = asyncio.Event(), list[str](), MOST_UNSUBMITTED * CAPACITY
    full = asyncio.Event()

    class HeldScorer(OneScorer):
        async def score(self, prompt: Prompt, response: str, finish_reason: str) -> Score:
            started.append(prompt.group)
            if len(started) == most:
                full.set()
            await release.wait()
            return await super().score(prompt, response, finish_reason)

    learner = await Learner.start(brokers[0], groups=20)
    deliveries = Deliveries()
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, scorer=HeldScorer())
    await learner.publish(0, deliveries)
    async with running(worker), asyncio.timeout(60):
        await full.wait()
        beats = worker.info().generated_tokens
        for _ in range(5):  # further requests for leases would be answered meanwhile
            await brokers[0].status.snapshot()
            worker._wake.set()
        assert (worker.info().active, worker.info().generated_tokens, len(started)) == (most, beats, most)
        release.set()
        await learner.take(0)


async def test_every_sample_is_generated_once_and_leases_stay_bounded(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(brokers[0], groups=20)
    deliveries = Deliveries()
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries)
    await learner.publish(0, deliveries)
    leased: list[int] = []

    async def watch() -> None:
        while True:
            leased.append((await brokers[0].status.snapshot()).queues.leased)

    async with running(worker) as task:
        watching = asyncio.create_task(watch())
        groups = await take_all(learner, deliveries)
        await brokers[0].status.set_state(learner.owner, "finished")
        assert await task == "finished"
        watching.cancel()
    tids = [t.tid for group in groups for t in group.trajectories]
    assert len(set(tids)) == len(tids) == 20 * GROUP_SIZE
    assert CAPACITY <= max(leased) <= MOST_UNSUBMITTED * CAPACITY
    assert worker.info().submitted == len(tids)
    assert worker.info().generated_tokens == 16 * len(tids)
    trajectory = groups[0].trajectories[0]
    assert (trajectory.reward, trajectory.rewards, trajectory.finish_reason) == (1.0, {"one": 1.0}, "length")
    assert await brokers[0].status.workers() == ()


async def test_spans_name_the_weights_that_sampled_each_token_across_a_swap(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(brokers[0], groups=4)
    deliveries = Deliveries()
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, max_new_tokens=LONG)
    await learner.publish(0, deliveries)
    async with running(worker):
        await learner.take(0)
        await until(lambda: worker.info().generated_tokens > CAPACITY * LONG)
        await learner.publish(1, deliveries)
        trajectories = [t for group in await learner.take(1) for t in group.trajectories]
        assert worker.info().swaps == 2
    assert any(len(trajectory.spans) == 2 for trajectory in trajectories)
    for trajectory in trajectories:
        for span in trajectory.spans:
            prompt, response = trajectory.prompt_tokens.tolist(), trajectory.response_tokens.tolist()
            expected = forward_logprobs(learner.models[span.version], prompt, response[: span.end])
            sampled = trajectory.behavior_logprobs[span.start : span.end]
            np.testing.assert_allclose(sampled, expected[span.start :].numpy(), atol=1e-4)


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
        staged = publisher.stage(sent.tensors)
        return await asyncio.to_thread(publisher.publish, sent.manifest.version, staged, sent.manifest.probe)

    try:
        async with running(worker):
            assert (await publish(0)).members == ()
            groups = await asyncio.to_thread(blocking.call, learner.take(0))
            assert {s.version for g in groups for t in g.trajectories for s in t.spans} == {learner.version(0)}
            step, members = 0, ()
            async with asyncio.timeout(60):
                while not members:
                    step += 1
                    members = (await publish(step)).members
                    await asyncio.sleep(0.2)
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
                staged = publisher.stage(sent.tensors)
                version, probe = sent.manifest.version, sent.manifest.probe
                report = await asyncio.to_thread(publisher.publish, version, staged, probe)
                assert (report.members, report.failed) == ((), "")
                info = await heartbeat(version)
                assert (info.wants_broadcast, info.broadcast_epoch, info.last_error) == (False, 0, "")
    finally:
        await asyncio.to_thread(publisher.close)
        await asyncio.to_thread(blocking.close)


async def test_a_drain_hands_the_leases_back_at_once(brokers: tuple[Broker, Broker], tmp_path: Path) -> None:
    learner = await Learner.start(brokers[0], groups=4)
    deliveries = Deliveries()
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, max_new_tokens=LONG)
    await learner.publish(0, deliveries)
    async with running(worker) as task:
        await until(lambda: worker.info().generated_tokens > 0)
        worker.request_drain()
        assert await task == "drained"
    queues = (await brokers[0].status.snapshot()).queues
    assert (queues.leased, queues.retry) == (0, CAPACITY)
    assert await brokers[0].status.workers() == ()
    again = await brokers[0].leases.lease("worker-2", learner.version(0), CAPACITY, 10)
    assert len(again.leases) == CAPACITY


async def test_a_drain_waits_for_samples_that_are_being_scored(brokers: tuple[Broker, Broker], tmp_path: Path) -> None:
    class SlowScorer(OneScorer):
        scoring = 0

        async def score(self, prompt: Prompt, response: str, finish_reason: str) -> Score:
            self.scoring += 1
            await asyncio.sleep(0.3)
            return await super().score(prompt, response, finish_reason)

    learner = await Learner.start(brokers[0], groups=2)
    deliveries, scorer = Deliveries(), SlowScorer()
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, scorer=scorer)
    await learner.publish(0, deliveries)
    async with running(worker) as task:
        await until(lambda: scorer.scoring == CAPACITY)
        worker.request_drain()
        assert await task == "drained"
    assert worker.info().submitted == CAPACITY


@pytest.mark.parametrize("state", ["scored", "generating"])
async def test_a_drain_ends_while_the_server_is_away(
    server: EmbeddedServer, brokers: tuple[Broker, Broker], tmp_path: Path, state: str
) -> None:
    class HeldScorer(OneScorer):
        scoring = 0
        may_end = asyncio.Event()

        async def score(self, prompt: Prompt, response: str, finish_reason: str) -> Score:
            self.scoring += 1
            await self.may_end.wait()
            return await super().score(prompt, response, finish_reason)

    learner = await Learner.start(brokers[0], groups=2)
    deliveries, scorer = Deliveries(), HeldScorer()
    tokens = 16 if state == "scored" else LONG
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, scorer=scorer, max_new_tokens=tokens)
    await learner.publish(0, deliveries)
    task = asyncio.create_task(worker.run())
    await until(lambda: scorer.scoring == CAPACITY if state == "scored" else worker.info().generated_tokens > 0)
    os.kill(server.pid, signal.SIGKILL)
    scorer.may_end.set()
    worker.request_drain()
    await asyncio.wait([task], timeout=60)
    assert task.done()
    assert task.result() == "drained"
    assert worker.info().submitted == 0


async def test_a_lost_lease_stops_its_generation(brokers: tuple[Broker, Broker], tmp_path: Path) -> None:
    learner = await Learner.start(brokers[0], groups=1)
    deliveries = Deliveries()
    engine = make_engine(tmp_path, max_model_len=256)
    # The lease expires long before the first heartbeat that would renew it, and the thief takes it.
    worker = make_worker(brokers[1], engine, deliveries, max_new_tokens=LONG, lease_ttl_s=0.05, heartbeat_s=0.4)
    await learner.publish(0, deliveries)
    async with running(worker):
        stolen = 0
        while stolen < GROUP_SIZE:
            reply = await brokers[0].leases.lease("thief", learner.version(0), GROUP_SIZE - stolen, 1000)
            stolen += len(reply.leases)
        await until(lambda: worker.info().active == 0)
        generated = worker.info().generated_tokens
        await asyncio.sleep(0.2)
        assert worker.info().generated_tokens == generated
        assert worker.info().submitted == 0


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


def test_one_unlikely_token_fails_no_probe() -> None:
    """In bfloat16 it is off by more than its neighbours together, where the engine holds what was published."""
    probe, version = (
        Probe(token_ids=[1] * 6, logprobs=[-1.0, -2.0, -17.0, -3.0, -1.0], tolerance=0.25),
        WeightVersion(1, 0),
    )
    refuse_other_logprobs(probe, [-1.0, -2.0, -16.0, -3.1, -1.0], version)
    with pytest.raises(WeightSyncError, match=r"by a mean of 0\.42 where rounding explains 0\.25"):
        refuse_other_logprobs(probe, [-1.0, -2.0, -16.0, -3.1, -2.0], version)
    with pytest.raises(WeightSyncError, match="by a mean of nan"):
        refuse_other_logprobs(probe, [-1.0, -2.0, -17.0, -3.0, float("nan")], version)


async def test_a_bit_that_no_probe_can_see_is_told_from_what_was_published(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(brokers[0], groups=2)
    deliveries = Deliveries()
    engine = make_engine(tmp_path)
    swap, swaps = engine.swap_weights, 0

    async def flip_a_bit(version: WeightVersion, tensors: Any, *, keep_cache: bool) -> None:
        nonlocal swaps
        swaps += 1  # the second would be right, and what the first sampled would pass as of this version
        (name, tensor), *others = tensors
        changed = tensor.clone()
        changed.view(torch.int32).view(-1)[7] ^= swaps == 1
        await swap(version, [(name, changed), *others])

    engine.swap_weights = flip_a_bit  # type: ignore[method-assign]
    worker = make_worker(brokers[1], engine, deliveries)
    await learner.publish(0, deliveries)
    with pytest.raises(WeightSyncError, match=r"the engine holds another .* than was published"):
        await worker.run()


async def test_samples_of_weights_that_fail_their_probe_are_not_submitted(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(brokers[0], groups=2)
    deliveries = Deliveries()
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, max_new_tokens=LONG)
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

    async def stumble(version: WeightVersion, tensors: Any, *, keep_cache: bool) -> None:
        nonlocal swaps
        swaps += 1
        if swaps == 1:
            raise WeightSyncError("busy")
        await swap(version, tensors)

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

    async def share(version: WeightVersion, tensors: Any, *, keep_cache: bool) -> None:
        with handover.of(tensors):  # as an engine with processes of its own begins
            await swap(version, tensors, keep_cache=keep_cache)

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
        await until(lambda: worker.info().version == learner.version(2))
        assert (worker.info().swaps, worker.info().last_error) == (2, "")


@pytest.mark.parametrize("policy", ["recompute", "keep"])
async def test_the_policy_for_caches_reaches_the_engine(
    brokers: tuple[Broker, Broker], tmp_path: Path, policy: Any
) -> None:
    engine = make_engine(tmp_path)
    swap, kept = engine.swap_weights, []

    async def noted(version: WeightVersion, tensors: Any, *, keep_cache: bool) -> None:
        kept.append(keep_cache)
        await swap(version, tensors, keep_cache=keep_cache)

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


async def test_a_failing_reward_ends_the_worker_and_hands_its_leases_back(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    class FailingScorer(OneScorer):
        async def score(self, prompt: Prompt, response: str, finish_reason: str) -> Score:
            raise RewardError(f"no score for {prompt.text}")

    learner = await Learner.start(brokers[0], groups=2)
    deliveries = Deliveries()
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, scorer=FailingScorer())
    await learner.publish(0, deliveries)
    with pytest.raises(RewardError, match="no score for prompt"):
        await worker.run()
    queues = (await brokers[0].status.snapshot()).queues
    assert (queues.leased, queues.retry) == (0, CAPACITY)
    assert await brokers[0].status.workers() == ()


@pytest.mark.slow
async def test_the_worker_outlives_a_killed_server(
    server: EmbeddedServer, brokers: tuple[Broker, Broker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = await Learner.start(brokers[0], groups=8)
    deliveries = Deliveries()
    # Leases granted in a reply that the crash swallowed must expire before anybody gets them.
    engine = make_engine(tmp_path)
    worker = make_worker(brokers[1], engine, deliveries, max_new_tokens=LONG, lease_ttl_s=1.0)
    await learner.publish(0, deliveries)
    async with running(worker) as task:
        await learner.take(0)
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: "No answer from the broker" in caplog.text)
        await asyncio.to_thread(server.start)
        with pytest.raises(ServerRestartedError):
            await learner.take(1)
        await learner.reassert(8)
        groups = await take_all(learner, deliveries)
        await brokers[0].status.set_state(learner.owner, "finished")
        assert await task == "finished"
    tids = [t.tid for group in groups for t in group.trajectories]
    assert len(set(tids)) == len(tids) == 8 * GROUP_SIZE
    assert "answers again" in caplog.text


async def test_a_worker_waits_for_its_learner_and_reports_all_the_while(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    deliveries = Deliveries()
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries)
    async with running(worker):
        async with asyncio.timeout(60):
            while not (alive := await brokers[0].status.workers()):  # noqa: ASYNC110 - the broker is asked
                await asyncio.sleep(0.01)
        assert (alive[0].state, alive[0].version, alive[0].wants_broadcast) == ("starting", None, False)
        learner = await Learner.start(brokers[0], groups=2)
        await learner.publish(0, deliveries)
        assert len(await learner.take(0)) == 2


async def test_a_run_that_is_over_ends_a_worker_once_its_patience_is(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(brokers[0], groups=1)
    await brokers[0].status.set_state(learner.owner, "stopped")
    worker = make_worker(brokers[1], make_engine(tmp_path), Deliveries(), patience_s=0.2)
    assert await worker.run() == "stopped"


async def test_model_files_are_fetched_once_the_learner_has_stored_them(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(brokers[0], groups=1)
    fetching = asyncio.create_task(fetch_model(brokers[1], tmp_path / "worker"))
    await asyncio.sleep(0.05)
    assert not fetching.done()
    files = {"config.json": b"{}", "tokenizer.json": b"[]"}
    await brokers[0].versions.put_model(learner.owner, ModelFiles(files=files))
    directory = await fetching
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == files
    assert directory.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/b", "..", "", "a\\b", "a\0b"])
async def test_model_files_cannot_leave_their_directory(
    brokers: tuple[Broker, Broker], tmp_path: Path, name: str
) -> None:
    learner = await Learner.start(brokers[0], groups=1)
    await brokers[0].versions.put_model(learner.owner, ModelFiles(files={name: b""}))
    with pytest.raises(ModelFilesError, match="only plain names"):
        await fetch_model(brokers[1], tmp_path)
    assert not (tmp_path / "model").exists()
