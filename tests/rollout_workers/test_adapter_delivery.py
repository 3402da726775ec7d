"""Published adapters travel as versions do, and a worker pulls their base once: real server, transport and engine."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from broker.client.broker import BlockingBroker, Broker
from broker.server.embedded import EmbeddedServer
from rollout_workers.config import EngineConfig
from rollout_workers.engines import open_engine
from weightsync.config import WeightsConfig
from weightsync.publish.publisher import Publisher, PublishReport
from weightsync.receive.subscriber import Subscriber

from .adapters import RANK, SCALE, NamedTensors, adapter_delivery, base_tensors, make_adapter, merged
from .loop import CAPACITY, Learner, make_worker, running, until, until_a_group_forms
from .marks import SGLANG
from .models import forward_logprobs, make_model, save_config
from .unpinned_sglang import unpin

TOLERANCE = 1e-4


@pytest.mark.parametrize("kind", ["embedded", pytest.param("sglang", marks=SGLANG)])
async def test_published_adapters_reach_an_engine_that_pulls_their_base_once(
    kind: str, server: EmbeddedServer, brokers: tuple[Broker, Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WeightsConfig(broadcast_timeout_s=20)
    blocking = await asyncio.to_thread(BlockingBroker, server.url, "run")
    learner = await asyncio.to_thread(blocking.call, Learner.start(blocking.broker, groups=4))
    publisher = await asyncio.to_thread(Publisher, blocking, learner.owner, config)
    base = base_tensors("dense")
    publisher.serve_base(iter(base), SCALE)
    unpin(monkeypatch)
    directory = save_config(make_model("dense", 0), tmp_path / "model")
    own = EngineConfig(kind=kind, max_concurrent=CAPACITY, max_model_len=256)
    engine: Any = open_engine(own, directory, seed=0, adapter_rank=RANK)
    subscriber = Subscriber(brokers[1], "worker-1", config)
    worker = make_worker(brokers[1], engine, subscriber, heartbeat_s=0.2)
    pulls = 0

    async def publish(step: int) -> PublishReport:
        sent = adapter_delivery(learner.version(step), make_adapter(make_model("dense", 0), step))
        learner.models[sent.manifest.version] = merged("dense", sent.tensors)
        gathering = publisher.gather(sent.tensors)
        return await asyncio.to_thread(publisher.publish, sent.manifest.version, gathering, sent.manifest.probe)

    async def counted(tensors: NamedTensors, **options: Any) -> None:
        nonlocal pulls
        pulls += 1
        await type(engine).load_base(engine, tensors, **options)

    engine.load_base = counted
    try:
        async with running(worker):
            report = await publish(0)
            assert report.nbytes < sum(tensor.nbytes for _, tensor in base)
            groups = await asyncio.to_thread(blocking.call, learner.take(0))
            step, members = await until_a_group_forms(publish)
            assert members == ("worker-1",)
            await until(lambda: worker.info().version == learner.version(step))
        assert pulls == 1
        for trajectory in (t for group in groups for t in group.trajectories):
            (span,) = {span.version for span in trajectory.spans}
            expected = forward_logprobs(
                learner.models[span], trajectory.prompt_tokens.tolist(), trajectory.response_tokens.tolist()
            )
            got = torch.tensor(trajectory.behavior_logprobs)
            torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
    finally:
        await asyncio.to_thread(publisher.close)
        await asyncio.to_thread(blocking.close)
