"""The worker on a real server with the real embedded engine; the test moves the learner's side by hand."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.broker.client.broker import Broker
from headway.broker.errors import ServerRestartedError, UnhealthyWorkerError
from headway.broker.schema import Group, Prompt, WeightVersion
from headway.broker.schema.weights import ModelFiles
from headway.broker.server.embedded import EmbeddedServer
from headway.rollout_workers import worker as worker_module
from headway.rollout_workers.engines.base import Chunk, Engine, GenerationRequest
from headway.rollout_workers.model_download import ModelFilesError, fetch_model, write_model
from headway.rollout_workers.rewards.base import RewardError, Score, UnscoredError
from headway.rollout_workers.samples.episode import Episodes

from .loop import CAPACITY, GROUP_SIZE, LONG, Deliveries, Learner, OneReward, make_engine, make_worker, running, until


@pytest.fixture
def server(tmp_path: Path) -> Any:
    with EmbeddedServer(tmp_path / "server", appendfsync="always") as server:
        yield server


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
    release, started, most = asyncio.Event(), list[str](), Episodes.most_at_once * CAPACITY
    full = asyncio.Event()

    class HeldReward(OneReward):
        async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: object = ()) -> Score:
            started.append(prompt.group)
            if len(started) == most:
                full.set()
            await release.wait()
            return await super().score(prompt, response, finish_reason)

    learner = await Learner.start(brokers[0], groups=20)
    deliveries = Deliveries()
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, reward=HeldReward())
    await learner.publish(0, deliveries)
    async with running(worker), asyncio.timeout(240):
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
            await asyncio.sleep(0.005)  # the worker has this thread, too

    async with running(worker) as task:
        watching = asyncio.create_task(watch())
        groups = await take_all(learner, deliveries)
        await brokers[0].status.set_state(learner.owner, "finished")
        assert await task == "finished"
        watching.cancel()
    tids = [t.tid for group in groups for t in group.trajectories]
    assert len(set(tids)) == len(tids) == 20 * GROUP_SIZE
    assert CAPACITY <= max(leased) <= Episodes.most_at_once * CAPACITY
    assert worker.info().submitted == len(tids)
    assert worker.info().generated_tokens == 16 * len(tids)
    trajectory = groups[0].trajectories[0]
    assert (trajectory.reward, trajectory.rewards, trajectory.finish_reason) == (1.0, {"one": 1.0}, "length")
    assert await brokers[0].status.workers() == ()


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


async def test_a_worker_that_is_dismissed_drains(brokers: tuple[Broker, Broker], tmp_path: Path) -> None:
    learner = await Learner.start(brokers[0], groups=4)
    deliveries = Deliveries()
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, max_new_tokens=LONG)
    await learner.publish(0, deliveries)
    async with running(worker) as task:
        await until(lambda: worker.info().generated_tokens > 0)
        async with asyncio.timeout(240):
            while not await brokers[0].status.exclude(worker.info().worker, "drain"):  # noqa: ASYNC110 - not yet known
                await asyncio.sleep(0.01)
        assert await task == "drained"
    queues = (await brokers[0].status.snapshot()).queues
    assert (queues.leased, queues.retry) == (0, CAPACITY)


async def test_a_drain_waits_for_samples_that_are_being_scored(brokers: tuple[Broker, Broker], tmp_path: Path) -> None:
    class SlowReward(OneReward):
        scoring = 0

        async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: object = ()) -> Score:
            self.scoring += 1
            await asyncio.sleep(0.3)
            return await super().score(prompt, response, finish_reason)

    learner = await Learner.start(brokers[0], groups=2)
    deliveries, reward = Deliveries(), SlowReward()
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, reward=reward)
    await learner.publish(0, deliveries)
    async with running(worker) as task:
        await until(lambda: reward.scoring == CAPACITY)
        worker.request_drain()
        assert await task == "drained"
    assert worker.info().submitted == CAPACITY


async def test_a_drain_hands_back_whole_what_is_not_scored_in_time(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    class EndlessReward(OneReward):
        scoring = 0

        async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: object = ()) -> Score:
            self.scoring += 1
            await asyncio.Event().wait()
            raise AssertionError

    learner = await Learner.start(brokers[0], groups=2)
    deliveries, reward = Deliveries(), EndlessReward()
    worker = make_worker(
        brokers[1], make_engine(tmp_path), deliveries, reward=reward, segment_tokens=64, exit_step_s=0.5
    )
    await learner.publish(0, deliveries)
    async with running(worker) as task:
        await until(lambda: reward.scoring == CAPACITY)
        worker.request_drain()
        assert await task == "drained"
    queues = (await brokers[0].status.snapshot()).queues
    assert (queues.leased, queues.expired_leases, worker.info().submitted) == (0, 0, 0)
    again = await brokers[0].leases.lease("worker-2", learner.version(0), CAPACITY, 10)
    saved = [sum(len(segment.tokens) for segment in lease.segments) for lease in again.leases]
    assert saved == [worker.info().generated_tokens // CAPACITY] * CAPACITY


@pytest.mark.parametrize("state", ["scored", "generating"])
async def test_a_drain_ends_while_the_server_is_away(
    server: EmbeddedServer, brokers: tuple[Broker, Broker], tmp_path: Path, state: str
) -> None:
    class HeldReward(OneReward):
        scoring = 0
        may_end = asyncio.Event()

        async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: object = ()) -> Score:
            self.scoring += 1
            await self.may_end.wait()
            return await super().score(prompt, response, finish_reason)

    learner = await Learner.start(brokers[0], groups=2)
    deliveries, reward = Deliveries(), HeldReward()
    tokens = 16 if state == "scored" else LONG
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, reward=reward, max_new_tokens=tokens)
    await learner.publish(0, deliveries)
    task = asyncio.create_task(worker.run())
    await until(lambda: reward.scoring == CAPACITY if state == "scored" else worker.info().generated_tokens > 0)
    os.kill(server.pid, signal.SIGKILL)
    reward.may_end.set()
    worker.request_drain()
    await asyncio.wait([task], timeout=240)
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


async def test_a_heartbeat_makes_an_idle_worker_ask_once_for_leases(
    brokers: tuple[Broker, Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, deliveries, verbs = await Learner.start(brokers[0], groups=0), Deliveries(), list[str]()
    script = brokers[1]._connection.script

    def noted(name: str, *arguments: Any, **others: Any) -> Coroutine[Any, Any, Any]:
        verbs.append(name)
        return script(name, *arguments, **others)

    monkeypatch.setattr(brokers[1]._connection, "script", noted)
    monkeypatch.setattr(worker_module, "LONGEST_WAIT_S", 3600.0)
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, heartbeat_s=0.1)
    await learner.publish(0, deliveries)
    async with running(worker):
        await until(lambda: verbs.count("lease") > 10)
        verbs.clear()
        await until(lambda: verbs.count("heartbeat") == 10)
    assert verbs.count("lease") <= 14


async def test_a_failing_reward_ends_the_worker_and_hands_its_leases_back(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    class FailingReward(OneReward):
        async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: object = ()) -> Score:
            raise RewardError(f"no score for {prompt.text}")

    learner = await Learner.start(brokers[0], groups=2)
    deliveries = Deliveries()
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, reward=FailingReward())
    await learner.publish(0, deliveries)
    with pytest.raises(RewardError, match="no score for prompt"):
        await worker.run()
    queues = (await brokers[0].status.snapshot()).queues
    assert (queues.leased, queues.retry) == (0, CAPACITY)
    assert await brokers[0].status.workers() == ()


async def test_a_sample_that_cannot_be_scored_is_generated_anew_from_its_first_token(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    """The sample is generated anew each time; the others go on, and the dead letters name the reason."""
    refused: list[str] = []

    class PickyReward(OneReward):
        async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: object = ()) -> Score:
            if len(refused) < 3:
                refused.append(response)
                raise UnscoredError("reward mine:score failed twice")
            return await super().score(prompt, response, finish_reason)

    learner = await Learner.start(brokers[0], groups=8)
    deliveries = Deliveries()
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, reward=PickyReward(), segment_tokens=4)
    await learner.publish(0, deliveries)
    async with running(worker), asyncio.timeout(240):
        groups = await take_all(learner, deliveries)
        assert worker.info().last_error.startswith("3 samples could not be scored; the last one: reward mine:score")
    told = [t for group in groups for t in group.trajectories]
    assert len({t.tid for t in told}) == len(told) == 8 * GROUP_SIZE
    assert worker.unscored == 3
    connection = brokers[0].status._connection
    letters = await connection.execute("XRANGE", connection.keys.hidden("dead"), "-", "+")
    assert [fields[fields.index(b"reason") + 1] for _, fields in letters] == [b"reward mine:score failed twice"] * 3
    assert (await brokers[0].status.snapshot()).queues.resumed_tokens == 0


async def never(request: GenerationRequest) -> AsyncIterator[Chunk]:
    """Generate as an engine that hangs."""
    await asyncio.Event().wait()
    yield Chunk(token_ids=[], logprobs=[], version=WeightVersion(0, 0))


async def test_a_worker_reports_for_how_long_its_engine_has_been_silent(
    brokers: tuple[Broker, Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = await Learner.start(brokers[0], groups=2)
    deliveries, engine = Deliveries(), make_engine(tmp_path)
    monkeypatch.setattr(engine, "generate", never)
    worker = make_worker(brokers[1], engine, deliveries)
    assert worker.info().silent_s == 0
    async with running(worker):
        await learner.publish(0, deliveries)
        await until(lambda: worker.info().silent_s > 0)
        assert worker.info().tokens_per_s == 0


async def test_an_engine_that_hangs_ends_the_worker_and_hands_its_leases_back(
    brokers: tuple[Broker, Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = await Learner.start(brokers[0], groups=2)
    deliveries, engine = Deliveries(), make_engine(tmp_path)
    monkeypatch.setattr(engine, "generate", never)
    await learner.publish(0, deliveries)
    with pytest.raises(UnhealthyWorkerError, match=r"has sampled nothing for 0\.2 s \(workers\.stall_s\)"):
        await asyncio.wait_for(make_worker(brokers[1], engine, deliveries, stall_s=0.2).run(), 240)
    status = await brokers[0].status.snapshot()
    assert (status.queues.leased, status.queues.retry) == (0, CAPACITY)
    assert [(fault.worker, fault.rule) for fault in status.faults] == [("worker-1", "stalled")]


class FailingEngine:
    """Fails at some requests, each after a few tokens; the others go to the real engine."""

    def __init__(self, engine: Engine, failures: int) -> None:
        self._engine, self._left, self.failed = engine, failures, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        tokens = 0
        async for chunk in self._engine.generate(request):
            if self._left and tokens + len(chunk.token_ids) > 3:
                self._left -= 1
                self.failed.append(request.request_id)
                first = 3 - tokens
                yield msgspec.structs.replace(
                    chunk, token_ids=chunk.token_ids[:first], logprobs=chunk.logprobs[:first], finish_reason=None
                )
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            tokens += len(chunk.token_ids)
            yield chunk


async def test_a_sample_at_which_the_engine_fails_is_handed_back_with_its_tokens(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(brokers[0], groups=8)
    deliveries, engine = Deliveries(), FailingEngine(make_engine(tmp_path), 2)
    worker = make_worker(brokers[1], engine, deliveries, segment_tokens=1000)
    await learner.publish(0, deliveries)
    async with running(worker), asyncio.timeout(240):
        groups = await take_all(learner, deliveries)
    told = [t for group in groups for t in group.trajectories]
    assert len({t.tid for t in told}) == len(told) == 8 * GROUP_SIZE
    assert len(engine.failed) == 2
    assert worker.info().last_error.startswith("the engine failed: RuntimeError: CUDA error: an illegal memory access")
    status = await brokers[0].status.snapshot()
    assert status.queues.resumed_tokens > 0
    assert status.faults == ()


async def test_an_engine_that_fails_again_and_again_ends_the_worker_with_its_work_handed_back(
    brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    learner = await Learner.start(brokers[0], groups=8)
    deliveries, engine, told = Deliveries(), FailingEngine(make_engine(tmp_path), 10**6), list[str]()
    worker = make_worker(
        brokers[1], engine, deliveries, on_unhealthy=lambda: told.append("unhealthy"), segment_tokens=1000
    )
    await learner.publish(0, deliveries)
    with pytest.raises(UnhealthyWorkerError, match=r"the engine failed 3 times within 600 s.*RuntimeError: CUDA error"):
        await asyncio.wait_for(worker.run(), 240)
    assert told == ["unhealthy"]
    status = await brokers[0].status.snapshot()
    assert status.queues.leased == 0
    assert status.workers == ()
    (fault,) = status.faults
    assert (fault.worker, fault.rule) == ("worker-1", "failing")
    assert "and 3 set a worker aside (workers.engine_errors)" in fault.reason
    segments = [await brokers[0].status._connection.execute("LLEN", key) for key in await segment_keys(brokers[0])]
    assert segments, "the tokens before the failures are stored"


async def segment_keys(broker: Broker) -> list[str]:
    connection = broker.status._connection
    return await connection.scan(connection.keys.hidden("segments:*"))


@pytest.mark.slow
async def test_the_worker_outlives_a_killed_server(
    server: EmbeddedServer, brokers: tuple[Broker, Broker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = await Learner.start(brokers[0], groups=8)
    deliveries = Deliveries()
    # Leases granted in a reply that the crash swallowed must expire before a worker gets them.
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
    learner = await Learner.start(brokers[0], groups=2)
    async with running(worker):
        async with asyncio.timeout(240):
            while not (alive := await brokers[0].status.workers()):  # noqa: ASYNC110 - the broker is asked
                await asyncio.sleep(0.01)
        assert (alive[0].state, alive[0].version, alive[0].wants_broadcast) == ("starting", None, True)
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
    files = {"config.json": b"{}", "tokenizer.json": b"[]", "additional_chat_templates/tool_use.jinja": b"x"}
    await brokers[0].versions.put_model(learner.owner, ModelFiles(files=files, end_tokens=(3, 5)))
    directory, end_tokens = await fetching
    written = [path for path in directory.rglob("*") if path.is_file()]
    assert {str(path.relative_to(directory)): path.read_bytes() for path in written} == files
    assert end_tokens == (3, 5)
    assert directory.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/passwd", "a/b", "..", "", "a\\b", "a\0b", "additional_chat_templates/../../a.json"]
)
async def test_model_files_cannot_leave_their_directory(
    brokers: tuple[Broker, Broker], tmp_path: Path, name: str
) -> None:
    learner = await Learner.start(brokers[0], groups=1)
    await brokers[0].versions.put_model(learner.owner, ModelFiles(files={name: b""}))
    with pytest.raises(ModelFilesError, match="only plain names"):
        await fetch_model(brokers[1], tmp_path)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["modeling_evil.py", "pytorch_model.bin", "model.safetensors", "evil.so", "evil"])
def test_of_a_model_only_data_are_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFilesError, match="only configurations and tokenizers are written"):
        write_model(ModelFiles(files={"config.json": b"", name: b""}), tmp_path / "model")
    assert not (tmp_path / "model").exists()
