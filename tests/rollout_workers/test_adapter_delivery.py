"""Published adapters travel as versions do, and a worker pulls their base once: real server, transport and engine."""

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from headway.broker.client.broker import BlockingBroker, Broker
from headway.broker.errors import WeightSyncError
from headway.broker.schema import Group, WeightVersion
from headway.broker.server.embedded import EmbeddedServer
from headway.learner.stages.loop import TOLERANCE as ROUNDING
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import Check
from headway.rollout_workers.worker import Worker
from headway.weightsync.config import WeightsConfig
from headway.weightsync.publisher import Publisher, PublishReport
from headway.weightsync.subscriber import Subscriber
from headway.weightsync.tensors import shared_memory

from .adapters import RANK, SCALE, NamedTensors, adapter_delivery, base_tensors, make_adapter, merged
from .loop import CAPACITY, Learner, make_worker, running, until, until_a_group_forms
from .marks import SGLANG, VLLM
from .models import forward_logprobs, make_model, save_config
from .unpinned_sglang import unpin

TOLERANCE = 1e-4


@dataclass
class AdapterRun:
    """A learner moved by hand that publishes adapters, and a worker with an engine that has not run yet."""

    learner: Learner
    blocking: BlockingBroker
    publisher: Publisher
    worker: Worker
    engine: Any

    async def publish(self, step: int, size: float = 0.2, tolerance: float = 1e-3) -> PublishReport:
        sent = adapter_delivery(self.learner.version(step), make_adapter(make_model("dense", 0), step, size))
        self.learner.models[sent.manifest.version] = merged("dense", sent.tensors)
        gathering = self.publisher.gather(sent.tensors)
        probe = replace(sent.manifest.probe, tolerance=tolerance)
        return await asyncio.to_thread(self.publisher.publish, sent.manifest.version, gathering, probe)

    async def take(self, step: int) -> tuple[Group, ...]:
        return await asyncio.to_thread(self.blocking.call, self.learner.take(step))


@pytest_asyncio.fixture
async def run(
    request: pytest.FixtureRequest,
    server: EmbeddedServer,
    brokers: tuple[Broker, Broker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[AdapterRun]:
    config = WeightsConfig(broadcast_timeout_s=20)
    blocking = await asyncio.to_thread(BlockingBroker, server.url, "run")
    learner = await asyncio.to_thread(blocking.call, Learner.start(blocking.broker, groups=4))
    publisher = await asyncio.to_thread(Publisher, blocking, learner.owner, config)
    publisher.serve_base(iter(base_tensors("dense")), SCALE)
    unpin(monkeypatch)
    directory = save_config(make_model("dense", 0), tmp_path / "model")
    own = EngineConfig(kind=request.param, max_concurrent=CAPACITY, max_model_len=256)
    engine: Any = open_engine(own, directory, seed=0, adapter_rank=RANK)
    subscriber = Subscriber(brokers[1], "worker-1", config, model=directory)
    worker = make_worker(brokers[1], engine, subscriber, heartbeat_s=0.2)
    yield AdapterRun(learner, blocking, publisher, worker, engine)
    await engine.close()  # a worker that has run has closed it
    await asyncio.to_thread(publisher.close)
    await asyncio.to_thread(blocking.close)


@pytest.mark.parametrize("run", ["embedded", pytest.param("sglang", marks=SGLANG)], indirect=True)
async def test_published_adapters_reach_an_engine_that_pulls_their_base_once(run: AdapterRun) -> None:
    pulls = 0

    async def counted(tensors: NamedTensors, **options: Any) -> None:
        nonlocal pulls
        pulls += 1
        await type(run.engine).load_base(run.engine, tensors, **options)

    run.engine.load_base = counted
    async with running(run.worker):
        report = await run.publish(0)
        assert report.nbytes < sum(tensor.nbytes for _, tensor in base_tensors("dense"))
        groups = await run.take(0)
        step, members = await until_a_group_forms(run.publish)
        assert members == ("worker-1",)
        await until(lambda: run.worker.info().version == run.learner.version(step))
    assert pulls == 1
    for trajectory in (t for group in groups for t in group.trajectories):
        (span,) = {span.version for span in trajectory.spans}
        expected = forward_logprobs(
            run.learner.models[span], trajectory.prompt_tokens.tolist(), trajectory.response_tokens.tolist()
        )
        got = torch.tensor(trajectory.behavior_logprobs)
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("is_told", [True, False], ids=["the engine says what it holds", "it does not"])
@pytest.mark.parametrize("is_right", [True, False], ids=["the run's base", "another one"])
@pytest.mark.parametrize(
    "run",
    ["embedded", pytest.param("vllm", marks=VLLM), pytest.param("sglang", marks=SGLANG)],
    indirect=True,
)
async def test_an_engine_loads_the_base_from_the_models_files_if_they_hold_it(
    run: AdapterRun, tmp_path: Path, is_right: bool, is_told: bool
) -> None:
    tensors = dict(base_tensors("dense"))
    if not is_right:
        tensors["model.layers.0.self_attn.q_proj.weight"].add_(1)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    served, find = list[str](), run.publisher._pull_server.find
    run.publisher._pull_server.find = lambda path: served.append(path) or find(path)  # type: ignore[func-returns-value, method-assign]
    are_mapped = list[bool]()

    async def noted(tensors: NamedTensors, *, check: Check | None) -> None:
        assert check is not None
        are_mapped.append(all(shared_memory.handle_of(tensor) for _, tensor in tensors))
        await type(run.engine).load_base(run.engine, tensors, check=check if is_told else lambda held: check(None))

    run.engine.load_base = noted
    async with running(run.worker):
        await run.publish(0)
        groups = await run.take(0)
    assert are_mapped[0]
    assert len(are_mapped) == (1 if is_right else 2)
    assert any(path.startswith("/0/0/") for path in served) is not is_right
    for trajectory in (t for group in groups for t in group.trajectories):
        tokens = trajectory.prompt_tokens.tolist(), trajectory.response_tokens.tolist()
        expected = forward_logprobs(run.learner.models[run.learner.version(0)], *tokens)
        got = torch.tensor(trajectory.behavior_logprobs)
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("run", ["embedded"], indirect=True)
async def test_a_base_whose_pulls_fail_lies_in_memory_once(run: AdapterRun, brokers: tuple[Broker, Broker]) -> None:
    failures, find = 3, run.publisher._pull_server.find

    def failing(path: str) -> Any:
        nonlocal failures
        failures -= 1
        return find(path) if failures < 0 else None

    run.publisher._pull_server.find = failing  # type: ignore[method-assign]
    await run.publish(0)
    subscriber = Subscriber(brokers[1], "worker-2", WeightsConfig(poll_s=0.05))
    before = set(shared_memory._attachable)
    gc.disable()
    try:
        found = await subscriber.base((), attachable=True)
        assert found is not None
        assert failures < 0
        assert len(shared_memory._attachable.keys() - before) == 1
        assert all(shared_memory.handle_of(tensor) for _, tensor in found.tensors)
        del found
        # the event loop and the thread that has reserved it let go of it
        await until(lambda: not shared_memory._attachable.keys() - before)
    finally:
        gc.enable()
    await subscriber.close()


@pytest.mark.parametrize(
    "run",
    ["embedded", pytest.param("vllm", marks=VLLM), pytest.param("sglang", marks=SGLANG)],
    indirect=True,
)
async def test_a_worker_whose_engine_keeps_an_older_adapter_ends_and_samples_nothing_as_the_newer_one(
    run: AdapterRun,
) -> None:
    kept = make_adapter(make_model("dense", 0), 0)

    async def undelivered(version: WeightVersion, tensors: NamedTensors, scale: float, **options: Any) -> None:
        await type(run.engine).swap_adapter(run.engine, version, kept, scale, **options)

    run.engine.swap_adapter = undelivered
    async with running(run.worker) as task:
        await run.publish(0)
        groups = await run.take(0)
        await run.publish(1)
        await asyncio.wait([task], timeout=240)
    with pytest.raises(WeightSyncError, match=r"the engine holds another .*lora_[AB] than was published"):
        task.result()
    assert run.worker.info().version == run.learner.version(0)
    spans = {span.version for group in groups for t in group.trajectories for span in t.spans}
    assert spans == {run.learner.version(0)}


@pytest.mark.slow
@pytest.mark.parametrize("run", ["embedded"], indirect=True)
async def test_a_worker_whose_engine_loads_a_small_adapter_and_does_not_use_it_ends(run: AdapterRun) -> None:
    """Its fingerprints are right, and its logprobs are the learner's but for less than bfloat16 rounds."""

    async def of_no_effect(version: WeightVersion, tensors: NamedTensors, scale: float, **options: Any) -> None:
        used = 0.0 if version == run.learner.version(1) else scale
        await type(run.engine).swap_adapter(run.engine, version, tensors, used, **options)

    run.engine.swap_adapter = of_no_effect
    async with running(run.worker) as task:
        await run.publish(0, 0.05, ROUNDING["bfloat16"])
        await run.take(0)
        await run.publish(1, 0.05, ROUNDING["bfloat16"])
        await asyncio.wait([task], timeout=240)
    with pytest.raises(WeightSyncError, match="the engine computes without its adapter"):
        task.result()
    assert run.worker.info().version == run.learner.version(0)
