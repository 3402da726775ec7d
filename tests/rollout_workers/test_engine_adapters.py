# mypy: disable-error-code="operator, type-var"
"""An engine that takes adapters computes with the one that it was given, and cannot do otherwise unnoticed."""

import asyncio
import functools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from broker.client.broker import BlockingBroker, Broker
from broker.errors import WeightSyncError
from broker.schema import WeightVersion
from broker.server.embedded import EmbeddedServer
from rollout_workers.engines.base import AdaptedEngine
from rollout_workers.engines.embedded.adapters import Adapter
from rollout_workers.swaps.weights import refuse_other_logprobs, refuse_other_tensors
from weightsync.config import WeightsConfig
from weightsync.publish.publisher import Publisher, PublishReport
from weightsync.receive.subscriber import Subscriber

from .adapters import SCALE, NamedTensors, adapter_delivery, base_tensors, make_adapter, merged
from .generation import PROMPTS, begin, difference, hold, run_all
from .loop import PROBE, Delivery, Learner, make_engine, make_worker, running, until, until_a_group_forms
from .models import Architecture, forward_logprobs, make_model

TOLERANCE = 1e-4


@dataclass
class Case:
    """An engine over the base of its architecture."""

    engine: Any
    architecture: Architecture

    def adapter(self, seed: int) -> NamedTensors:
        return make_adapter(make_model(self.architecture, 0), seed)

    async def swap(self, sent: Delivery, tensors: NamedTensors | None = None) -> None:
        """Swap a delivery in as a worker does; `tensors`: what reaches the engine instead of its own."""
        check = functools.partial(refuse_other_tensors, sent.manifest)
        given = sent.tensors if tensors is None else tensors
        await self.engine.swap_adapter(sent.manifest.version, given, SCALE, check=check)

    async def probe(self, sent: Delivery) -> None:
        scores = await self.engine.score(PROBE)
        refuse_other_logprobs(sent.manifest.probe, scores, sent.manifest.version)

    def sent(self, step: int) -> Delivery:
        return adapter_delivery(WeightVersion(1, step), self.adapter(step), self.architecture)


@pytest_asyncio.fixture(params=["dense", "moe"])
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    engine = make_engine(tmp_path, capacity=8, max_model_len=512, architecture=request.param)
    assert isinstance(engine, AdaptedEngine)
    await engine.load_base(base_tensors(request.param))
    yield Case(engine, request.param)
    await engine.close()


async def test_adapters_swapped_in_flight_are_exact_and_drop_nothing(case: Case) -> None:
    first, second = case.sent(1), case.sent(2)
    await case.swap(first)
    await case.probe(first)
    responses, tasks = await begin(case.engine, PROMPTS)
    await case.swap(second)
    await case.probe(second)
    await asyncio.gather(*tasks)
    old, new = (merged(case.architecture, sent.tensors) for sent in (first, second))
    for response in responses:
        switch = response.versions.index(second.manifest.version)
        assert response.versions == [first.manifest.version] * switch + [second.manifest.version] * (200 - switch)
        from_old, from_new = difference(old, response), difference(new, response)
        assert from_old[:switch].max() < TOLERANCE
        assert from_new[switch:].max() < TOLERANCE
        assert from_old[switch:].max() > 0.1
    assert difference(make_model(case.architecture, 0), responses[0]).max() > 0.1


async def test_whole_weights_and_other_targets_take_an_adapters_place(case: Case) -> None:
    await case.swap(case.sent(1))
    whole = make_model(case.architecture, 5)
    await hold(case.engine, whole)
    for response in await run_all(case.engine, PROMPTS):
        assert difference(whole, response).max() < TOLERANCE
    await case.engine.load_base(base_tensors(case.architecture))
    few = [(name, tensor) for name, tensor in case.adapter(3) if "q_proj" in name or "down_proj" in name]
    await case.swap(adapter_delivery(WeightVersion(1, 3), few, case.architecture))
    for response in await run_all(case.engine, PROMPTS):
        assert difference(merged(case.architecture, few), response).max() < TOLERANCE


async def test_an_adapter_that_is_not_delivered_samples_nothing(case: Case) -> None:
    await case.swap(case.sent(1))
    undelivered = case.sent(2)
    for tensors in (case.adapter(1), case.adapter(2)[2:]):
        with pytest.raises(WeightSyncError, match=r"the engine holds another .*lora_[AB] than was published"):
            await case.swap(undelivered, tensors)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await run_all(case.engine, PROMPTS[:1])
    await case.swap(undelivered)
    for response in await run_all(case.engine, PROMPTS):
        assert difference(merged(case.architecture, undelivered.tensors), response).max() < TOLERANCE


async def test_an_adapter_that_is_loaded_and_not_used_is_no_version(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = case.sent(1)
    fill = Adapter.fill

    def loaded_only(adapter: Adapter, tensors: NamedTensors, scale: float) -> None:
        fill(adapter, tensors, scale)
        module = adapter._modules["model.layers.1.self_attn.q_proj"]
        del module.forward  # its class's own computes again, without the adapter

    monkeypatch.setattr(Adapter, "fill", loaded_only)
    with pytest.raises(WeightSyncError, match=r"holds another model\.layers\.1\.self_attn\.q_proj\.lora_A"):
        await case.swap(sent)


@pytest.mark.parametrize("scale", [0.0, SCALE / 2])
async def test_the_probe_sees_an_adapter_that_has_no_effect_or_another_one(case: Case, scale: float) -> None:
    """Fingerprints are of A and B, and say nothing of how an engine computes with them."""
    sent = case.sent(1)
    check = functools.partial(refuse_other_tensors, sent.manifest)
    await case.engine.swap_adapter(sent.manifest.version, sent.tensors, scale, check=check)
    with pytest.raises(WeightSyncError, match="the engine's logprobs differ from the learner's"):
        await case.probe(sent)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda name, tensor: (name.replace("q_proj", "qq_proj"), tensor), "no place for .*qq_proj"),
        (lambda name, tensor: (name, tensor[..., :-1] if "q_proj.lora_B" in name else tensor), "fits no change"),
        (lambda name, tensor: (name.replace("v_proj.lora_B", "v_proj.lora_C"), tensor), "no place for|is half"),
    ],
)
async def test_what_is_no_adapter_of_the_model_is_refused_and_the_old_one_stays(
    case: Case, change: Any, told: str
) -> None:
    await case.swap(case.sent(1))
    with pytest.raises(WeightSyncError, match=told):
        await case.swap(case.sent(2), [change(name, tensor) for name, tensor in case.adapter(2)])
    for response in await run_all(case.engine, PROMPTS):
        assert difference(merged(case.architecture, case.adapter(1)), response).max() < TOLERANCE


async def test_published_adapters_reach_an_engine_that_pulls_their_base_once(
    server: EmbeddedServer, brokers: tuple[Broker, Broker], tmp_path: Path
) -> None:
    config = WeightsConfig(broadcast_timeout_s=20)
    blocking = await asyncio.to_thread(BlockingBroker, server.url, "run")
    learner = await asyncio.to_thread(blocking.call, Learner.start(blocking.broker, groups=4))
    publisher = await asyncio.to_thread(Publisher, blocking, learner.owner, config)
    base = base_tensors("dense")
    publisher.serve_base(iter(base), SCALE)
    subscriber, engine = Subscriber(brokers[1], "worker-1", config), make_engine(tmp_path)
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
