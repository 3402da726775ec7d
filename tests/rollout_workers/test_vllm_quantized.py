"""A vLLM that quantizes computes, after a swap, as one does that never held other weights, and near the learner."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from headway.learner.stages.loop import TOLERANCE
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import Engine

from .generation import PROMPTS, difference, hold, run_all
from .marks import VLLM
from .models import Architecture, forward_logprobs, make_model, save_config

pytestmark = [
    *VLLM,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM quantizes to fp8 on GPUs only"),
]


PROBE = [token for prompt in PROMPTS for token in prompt]


def opened(directory: Path) -> Engine:
    config = EngineConfig(
        kind="vllm",
        max_concurrent=8,
        max_model_len=512,
        dtype="bfloat16",
        options={"gpu_memory_utilization": 0.3, "enforce_eager": True, "quantization": "fp8"},
    )
    return open_engine(config, directory, seed=0)


async def score_difference(engine: Engine, model: PreTrainedModel) -> float:
    """Return the mean absolute difference of a probe's logprobs."""
    expected = forward_logprobs(model, PROBE[:1], PROBE[1:])
    return float((torch.tensor(await engine.score(PROBE)) - expected).abs().mean())


@pytest.mark.parametrize("architecture", ["dense", "moe"])
async def test_after_swaps_in_flight_it_is_a_fresh_engine(architecture: Architecture, tmp_path: Path) -> None:
    old, new = make_model(architecture, 0, expert_width=64), make_model(architecture, 1, expert_width=64)
    directory = save_config(old, tmp_path)
    engine = opened(directory)
    try:
        for model in (old, new, old, new):
            await hold(engine, model)
            assert await score_difference(engine, model) < TOLERANCE["bfloat16"]
        assert await score_difference(engine, old) > TOLERANCE["bfloat16"]
        swapped, scored = await run_all(engine, PROMPTS), await engine.score(PROBE)
    finally:
        await engine.close()
    fresh = opened(directory)
    try:
        await hold(fresh, new)
        assert scored == pytest.approx(await fresh.score(PROBE), abs=1e-2)
    finally:
        await fresh.close()
    for response in swapped:
        assert float(difference(new, response).mean()) < TOLERANCE["bfloat16"]
