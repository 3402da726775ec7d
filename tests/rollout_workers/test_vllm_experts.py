# mypy: disable-error-code="arg-type, comparison-overlap, type-var"
"""vLLM's routed experts in a chunk have the right rows and layers.

They pass vLLM's real front end, with a core that makes them up; on a GPU they are those of a plain forward.
"""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headway.broker.errors import HeadwayError
from headway.broker.schema import Experts, WeightVersion
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import GenerationRequest
from headway.rollout_workers.engines.external_engine import RoutedLayers, routed_layers
from headway.rollout_workers.engines.vllm.fork_server import prepare_environment
from headway.rollout_workers.engines.vllm.open_vllm import open_vllm
from headway.rollout_workers.engines.vllm.vllm_engine import VllmEngine
from headway.rollout_workers.engines.vllm.vllm_requests import new_rows, split, take_rows
from headway.rollout_workers.samples.recorder import Recorder

from .generation import PROMPTS, hold, request
from .models import make_model, named_tensors, save_config
from .paced_core import PacedCore
from .test_routed_experts import TID, chosen_by, experts_of, record

OLD, NEW = WeightVersion(1, 1), WeightVersion(1, 2)
LAYERS, PER_TOKEN = 2, 2


def row(position: int) -> Experts:
    """Return [1, L, K] of the token at this place of prompt and response: no other has the same."""
    return np.array([[[position % 250, 255]] * LAYERS], np.uint8)


def rows(*positions: int) -> Experts:
    return np.concatenate([row(position) for position in positions])


def asked(prompt: int, experts_from: int) -> GenerationRequest:
    return request([5] * prompt, experts_from=experts_from)


def test_as_many_rows_as_tokens_were_fed() -> None:
    assert new_rows(asked(7, 0), 0, 1) == 7
    assert new_rows(asked(7, 0), 0, 4) == 10
    assert new_rows(asked(7, 6), 0, 1) == 1
    assert new_rows(asked(7, 0), 4, 3) == 3


def test_rows_are_taken_from_the_front_and_the_rest_stays() -> None:
    gathered = [rows(0, 1, 2), rows(3), rows(4)]
    np.testing.assert_array_equal(take_rows(gathered, 4), rows(0, 1, 2, 3))
    gathered.append(rows(5))
    np.testing.assert_array_equal(take_rows(gathered, 2), rows(4, 5))
    assert gathered == []
    with pytest.raises(HeadwayError, match="the experts of 1 tokens where it fed 2"):
        take_rows([rows(6)], 2)


@pytest.mark.parametrize("switch", [1, 2, 3])
def test_a_run_of_tokens_over_a_swap_is_taken_apart_with_its_rows(switch: int) -> None:
    """The runs are the first three tokens after a prompt of two, and a later run, which has a row for every token."""
    starts = [(OLD, 0), (NEW, switch)]
    first = list(split([1, 2, 3], [-1.0] * 3, 0, starts, None, rows(0, 1, 2, 3)))
    assert [len(chunk.token_ids) for chunk in first] == ([switch, 3 - switch] if switch < 3 else [3])
    np.testing.assert_array_equal(first[0].experts, rows(*range(1 + switch)))
    later = list(split([1, 2, 3], [-1.0] * 3, 10, [(OLD, 0), (NEW, 10 + switch)], None, rows(11, 12, 13)))
    np.testing.assert_array_equal(np.concatenate([chunk.experts for chunk in later]), rows(11, 12, 13))
    assert [len(chunk.experts) for chunk in later] == [len(chunk.token_ids) for chunk in later]


def test_only_layers_with_experts_have_rows() -> None:
    config = make_model("moe", 0).config
    config.mlp_only_layers, config.num_hidden_layers, config.layer_types = [1], 3, None
    config = AutoConfig.for_model(**{**config.to_dict(), "layer_types": ["full_attention"] * 3})
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config)
    found = routed_layers(shapes)
    assert found == RoutedLayers((0, 2), is_byte=True)
    every = np.arange(6, dtype=np.uint16).reshape(1, 3, 2)
    np.testing.assert_array_equal(found.rows(every), every[:, [0, 2]])
    assert (found.rows(every).dtype, RoutedLayers((0,), is_byte=False).rows(every).dtype) == (np.uint8, np.uint16)
    with pytest.raises(HeadwayError, match="no experts that routers choose"):
        routed_layers(make_model("dense", 0))


class RoutingCore(PacedCore):
    """Returns rows as vLLM's engine does: the prompt's with the first token, then those of the token before."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, step_s=0.001, mean_tokens=1e9)
        self._fed: dict[str, tuple[int, int]] = {}

    async def add_request_async(self, request: Any) -> None:
        first, length = request.sampling_params.routed_experts_prompt_start, len(request.prompt_token_ids)
        self._fed[request.request_id] = first, length
        await super().add_request_async(request)

    def routed_experts(self, request_id: str) -> Experts:
        first, length = self._fed[request_id]
        self._fed[request_id] = length, length + 1
        return rows(*range(first, length))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
async def test_rows_reach_the_recorder_through_vllms_front_end(tmp_path: Path) -> None:
    """The sample runs over a swap, an interruption that another request continues, and the end."""
    prepare_environment(1, spawns=False)
    from vllm.v1.engine.core_client import EngineCoreClient

    model = make_model("moe", 0)
    directory = save_config(model, tmp_path / "model")
    with patch.object(EngineCoreClient, "make_async_mp_client", lambda *_, **__: RoutingCore(4)):
        engine = open_vllm(EngineConfig(max_concurrent=4, max_model_len=400), directory, seed=0)
    await engine.swap_weights(OLD, named_tensors(model))
    with pytest.raises(HeadwayError, match="not opened to tell"):
        await record(engine, request(PROMPTS[0]))
    engine._routed = RoutedLayers(tuple(range(LAYERS)), is_byte=True)
    await check_spans_and_rows(engine, named_tensors(model))
    await engine.close()


async def check_spans_and_rows(engine: VllmEngine, tensors: Any) -> None:
    prompt = PROMPTS[0]
    recorders = [Recorder(prompt_length=len(prompt)) for _ in range(3)]
    lengths = [150, 1, 40]
    running = [
        asyncio.create_task(record(engine, request(prompt, stop_token_ids=[], max_new_tokens=length), recorder))
        for length, recorder in zip(lengths, recorders, strict=True)
    ]
    async with asyncio.timeout(240):
        while len(recorders[0].tokens) < 10:  # noqa: ASYNC110 - the recorder is the only one who knows
            await asyncio.sleep(0.001)
    await engine.swap_weights(NEW, tensors)
    await asyncio.gather(*running)
    assert [span.version for span in recorders[0].spans] == [OLD, NEW]
    for length, recorder in zip(lengths, recorders, strict=True):
        assert len(recorder.tokens) == length
        np.testing.assert_array_equal(experts_of(recorder), rows(*range(len(prompt) + length - 1)))
    heir = Recorder([recorders[2].segment(TID, 0, 0)], prompt_length=len(prompt))
    await record(engine, request(prompt, stop_token_ids=[], max_new_tokens=60), heir)
    np.testing.assert_array_equal(experts_of(heir), rows(*range(len(prompt) + 59)))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_a_cpu_is_refused_with_words(tmp_path: Path) -> None:
    directory = save_config(make_model("moe", 0), tmp_path)
    with pytest.raises(HeadwayError, match="on GPUs only"):
        open_engine(EngineConfig(kind="vllm"), directory, seed=0, tells_experts=True)


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's capture takes Triton")
async def test_choices_are_those_of_a_plain_forward_before_and_after_a_swap(tmp_path: Path) -> None:
    """In bfloat16 rounding changes a few of them, so nearly all have to agree."""
    old, new = make_model("moe", 0), make_model("moe", 1)
    config = EngineConfig(
        kind="vllm",
        max_concurrent=4,
        max_model_len=512,
        dtype="bfloat16",
        options={"gpu_memory_utilization": 0.3, "enforce_eager": True},
    )
    engine = open_engine(config, save_config(old, tmp_path), seed=0, tells_experts=True)
    first = await hold(engine, old)
    prompt, second = PROMPTS[3], None
    recorder = Recorder(prompt_length=len(prompt))
    wanted = request(prompt, temperature=1.0, stop_token_ids=[], max_new_tokens=400, experts_from=0)
    async with aclosing(engine.generate(wanted)) as chunks:
        async for chunk in chunks:
            recorder.add(chunk)
            if second is None:
                second = await hold(engine, new)
    assert [span.version for span in recorder.spans] == [first, second], "the test needs a swap in mid-sentence"
    tokens, fed_to_old = prompt + recorder.tokens, len(prompt) - 1 + recorder.spans[0].end
    chosen = np.sort(experts_of(recorder))
    before, after = chosen_by(old, tokens)[:-1], chosen_by(new, tokens)[:-1]
    assert (chosen[:fed_to_old] == before[:fed_to_old]).mean() > 0.95
    assert (chosen[fed_to_old:] == after[fed_to_old:]).mean() > 0.95
    assert (chosen[fed_to_old:] == before[fed_to_old:]).mean() < 0.9
    await engine.close()
