"""vLLM split over two processes (on CPUs, over gloo) swaps, tells its tensors and versions, and survives an error."""

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import AdaptedEngine, Engine, WeightFingerprints
from headway.rollout_workers.engines.vllm.fork_server import METHOD
from headway.rollout_workers.engines.vllm.open_vllm import STREAM_INTERVAL
from headway.rollout_workers.engines.vllm.vllm_engine import VllmEngine
from headway.rollout_workers.weight_updates.engine_weights import refuse_other_logprobs, refuse_other_tensors

from .adapters import RANK, SCALE, NamedTensors, adapter_delivery, base_tensors, make_adapter, merged
from .generation import PROMPTS, begin, difference, hold, run_all
from .loop import PROBE, Delivery
from .marks import VLLM
from .models import make_model, named_tensors, save_config
from .test_direct_loading import EXTENSION, elements, published

pytestmark = [*VLLM, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, perhaps not two")]

TOLERANCE = 1e-4


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("vllm_dist_*"))


@asynccontextmanager
async def opened(model: Any, directory: Path, adapter_rank: int = 0, **options: Any) -> AsyncIterator[Engine]:
    """Open an engine, and remove the shared memory that vLLM's processes leave behind on a CPU."""
    config = EngineConfig(kind="vllm", max_concurrent=8, max_model_len=512, options=options)
    before = shared_memory()
    engine = open_engine(config, save_config(model, directory), seed=0, adapter_rank=adapter_rank)
    try:
        yield engine
    finally:
        await engine.close()
        for left in shared_memory() - before:
            left.unlink()


async def test_shards_are_swapped_proved_and_named_by_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(METHOD, raising=False)
    models = [make_model("dense", seed) for seed in range(2)]
    options: dict[str, Any] = {"tensor_parallel_size": 2, "worker_extension_cls": EXTENSION}
    async with opened(models[0], tmp_path, **options) as engine:
        check_all_are_forked(engine)
        await check_swap_in_flight(engine, models)
        await check_tokens_come_together(engine)
        await check_what_is_held(engine, models)
        await check_an_error_in_one_process(engine, models)


async def test_adapters_are_split_as_the_layers_are(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2, "worker_extension_cls": EXTENSION, "adapter_rank": RANK}
    adapters = [make_adapter(make_model("dense", 0), seed) for seed in range(3)]
    sent = [adapter_delivery(WeightVersion(1, step), adapter) for step, adapter in enumerate(adapters)]
    async with opened(make_model("dense", 0), tmp_path, **options) as engine:
        assert isinstance(engine, AdaptedEngine)
        await engine.load_base(base_tensors("dense"))

        async def swap(delivery: Delivery, tensors: NamedTensors) -> None:
            check = functools.partial(refuse_other_tensors, delivery.manifest)
            await engine.swap_adapter(delivery.manifest.version, tensors, SCALE, check=check)
            refuse_other_logprobs(delivery.manifest.probe, await engine.score(PROBE), delivery.manifest.version)

        await swap(sent[0], adapters[0])
        responses, running = await begin(engine, PROMPTS)
        await swap(sent[1], adapters[1])
        await asyncio.gather(*running)
        old, new = (merged("dense", adapter) for adapter in adapters[:2])
        for response in responses:
            switch = response.versions.index(sent[1].manifest.version)
            assert difference(old, response)[:switch].max() < TOLERANCE
            assert difference(new, response)[switch:].max() < TOLERANCE
        with pytest.raises(WeightSyncError, match=r"the engine holds another .*lora_[AB] than was published"):
            await swap(sent[2], adapters[1])


def check_all_are_forked(engine: Engine) -> None:
    (process,) = engine._processes  # type: ignore[attr-defined]
    server = psutil.Process(process.pid).parent()
    assert server is not None
    assert len(server.children()) == 3, "the scheduler's process, and two that compute"


async def check_swap_in_flight(engine: Engine, models: list[Any]) -> None:
    old_version = await hold(engine, models[0])
    responses, running = await begin(engine, PROMPTS)
    new_version = await hold(engine, models[1])
    await asyncio.gather(*running)
    for response in responses:
        switch = response.versions.index(new_version)
        assert response.versions == [old_version] * switch + [new_version] * (200 - switch)
        assert difference(models[0], response)[:switch].max() < TOLERANCE
        assert difference(models[1], response)[switch:].max() < TOLERANCE


async def check_tokens_come_together(engine: Engine) -> None:
    llm = cast(VllmEngine, engine)._llm
    hand_over = llm.output_processor.process_outputs
    counts: list[int] = []

    def counted(outputs: Sequence[Any], *rest: Any, **options: Any) -> Any:
        counts.extend(len(output.new_token_ids) for output in outputs)
        return hand_over(outputs, *rest, **options)

    llm.output_processor.process_outputs = counted
    try:
        (response,) = await run_all(engine, PROMPTS[:1], max_new_tokens=3 * STREAM_INTERVAL, stop_token_ids=[])
    finally:
        llm.output_processor.process_outputs = hand_over
    assert len(response.tokens) == 3 * STREAM_INTERVAL
    assert counts == [1, STREAM_INTERVAL, STREAM_INTERVAL, STREAM_INTERVAL - 1], "a message of the core for each"


async def check_what_is_held(engine: Engine, models: list[Any]) -> None:
    for model in models:
        found: list[WeightFingerprints | None] = []
        await hold(engine, model, check=found.append)
        (held,) = found
        assert held is not None
        sent = dict(named_tensors(model))
        refuse_other_tensors(published(sent.items()), held)
        norm, matrix = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
        assert elements(held)[norm] == 2 * sent[norm].numel()
        assert elements(held)[matrix] == sent[matrix].numel()


async def check_an_error_in_one_process(engine: Any, models: list[Any]) -> None:
    """Assert that the engine reports the error, and that the other process's answer does not confuse the next swap."""
    await engine._llm.collective_rpc("fail_in_one_process")
    with pytest.raises(WeightSyncError, match="RuntimeError: told to fail"):
        await hold(engine, models[0])
    found: list[WeightFingerprints | None] = []
    version = await hold(engine, models[0], check=found.append)
    refuse_other_tensors(published(named_tensors(models[0])), found[0])
    for response in await run_all(engine, PROMPTS):
        assert set(response.versions) == {version}
        assert difference(models[0], response).max() < TOLERANCE


async def test_experts_that_are_split_are_swapped(tmp_path: Path) -> None:
    """vLLM for CPUs pads the halves of narrower experts, and cannot load them twice."""
    models = [make_model("moe", seed, expert_width=64) for seed in range(2)]
    async with opened(models[0], tmp_path, tensor_parallel_size=2) as engine:
        for model in models:
            await hold(engine, model)
            for response in await run_all(engine, PROMPTS):
                assert difference(model, response).max() < TOLERANCE


async def test_stages_together_hold_what_was_published(tmp_path: Path) -> None:
    """vLLM for CPUs 0.32 cannot generate in stages, so the test proves only that they load."""
    models = [make_model("dense", seed) for seed in range(2)]
    options: dict[str, Any] = {"pipeline_parallel_size": 2, "worker_extension_cls": EXTENSION}
    async with opened(models[0], tmp_path, **options) as engine:
        for model in models:
            found: list[WeightFingerprints | None] = []
            await hold(engine, model, check=found.append)
            (held,) = found
            assert held is not None
            assert set(held.names) >= {name for name, _ in named_tensors(model)}
            refuse_other_tensors(published(named_tensors(model)), held)
