"""SGLang split over two processes (on CPUs, over gloo) swaps in flight, and proves what both hold."""

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch

from headway.broker.errors import WeightSyncError
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import WeightFingerprints
from headway.rollout_workers.weight_updates.engine_weights import refuse_other_tensors

from .generation import PROMPTS, begin, difference, hold
from .marks import SGLANG
from .models import make_model, named_tensors, save_config
from .sglang_settings import sglang_config
from .test_direct_loading import elements, published

pytestmark = [*SGLANG, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, perhaps not two")]

TOLERANCE = 1e-4


async def test_shards_are_swapped_in_flight_and_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # a machine need not have a NUMA node for each process
    models = [make_model("dense", seed) for seed in range(2)]
    config = msgspec.structs.replace(sglang_config(8, 512), options={"tp_size": 2})
    engine = open_engine(config, save_config(models[0], tmp_path), seed=0)
    try:
        held: list[WeightFingerprints | None] = []
        old = await hold(engine, models[0], check=held.append)
        responses, running = await begin(engine, PROMPTS)
        new = await hold(engine, models[1], check=held.append)
        await asyncio.gather(*running)
    finally:
        await engine.close()
    for response in responses:
        switch = response.versions.index(new)
        assert response.versions == [old] * switch + [new] * (200 - switch)
        assert difference(models[0], response)[:switch].max() < TOLERANCE
        assert difference(models[1], response)[switch:].max() < TOLERANCE
    norm, matrix = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
    for model, found in zip(models, held, strict=True):
        assert found is not None
        sent = dict(named_tensors(model))
        refuse_other_tensors(published(sent.items()), found)
        assert elements(found)[norm] == 2 * sent[norm].numel(), "each process holds it"
        assert elements(found)[matrix] == sent[matrix].numel(), "each holds a half"
    with pytest.raises(WeightSyncError, match="the engine holds"):
        refuse_other_tensors(published(named_tensors(models[0])), held[1])
