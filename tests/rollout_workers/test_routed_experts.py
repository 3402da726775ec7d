# mypy: disable-error-code="type-var"
"""The experts of a sample's tokens are those of the engine's own passes, across swaps and several workers."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from headway.broker.errors import HeadwayError
from headway.broker.schema import Experts, Segment, TrajectoryId, WeightVersion
from headway.broker.wire.codec import decode_segment, encode_segment
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import Chunk, Engine, GenerationRequest
from headway.rollout_workers.samples.generation import generate
from headway.rollout_workers.samples.recorder import EngineOutputError, MissingExpertsError, Recorder

from .generation import PROMPTS, hold, request
from .models import make_model, save_config

TID = TrajectoryId("g", 0, 0)
SMALL = EngineConfig(max_concurrent=3, max_model_len=160)
SAMPLED = {"temperature": 1.0, "stop_token_ids": [], "max_new_tokens": 40}


@torch.no_grad()
def chosen_by(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """Return the sorted experts [T, L, K] of a plain transformers forward over all tokens."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
        for layer in model.model.layers
    ]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).sort(-1).values.numpy()


async def record(engine: Engine, asked: GenerationRequest, recorder: Recorder | None = None) -> Recorder:
    recorder = recorder or Recorder(prompt_length=len(asked.prompt_tokens))
    await generate(engine, asked, recorder)
    return recorder


def experts_of(recorder: Recorder) -> Experts:
    experts = recorder.segment(TID, 0, 0).experts
    assert experts is not None
    return experts


async def test_choices_are_those_of_a_plain_forward(tmp_path: Path) -> None:
    """Many samples run at once, whose slots move as others end."""
    model = make_model("moe", 0)
    engine = open_engine(SMALL, save_config(model, tmp_path), seed=0)
    await hold(engine, model)
    lengths = [3, 40, 1, 17, 25, 9]
    asked = [
        request(prompt, **(SAMPLED | {"max_new_tokens": length}))
        for prompt, length in zip(PROMPTS, lengths, strict=True)
    ]
    unrecorded = Recorder()
    *recorded, _ = await asyncio.gather(
        *[record(engine, one) for one in asked], record(engine, request([5], **SAMPLED), unrecorded)
    )
    for one, recorder in zip(asked, recorded, strict=True):
        tokens = one.prompt_tokens + recorder.tokens
        experts = experts_of(recorder)
        assert experts.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(experts), chosen_by(model, tokens)[:-1])
    assert unrecorded.segment(TID, 0, 0).experts is None
    await engine.close()


async def test_a_swap_in_mid_sentence_keeps_what_sampled_each_token(tmp_path: Path) -> None:
    old, new = make_model("moe", 0), make_model("moe", 1)
    engine = open_engine(SMALL, save_config(old, tmp_path), seed=0)
    first = await hold(engine, old)
    asked = request(PROMPTS[0], **(SAMPLED | {"max_new_tokens": 140}), experts_from=0)
    recorder, second = Recorder(prompt_length=len(asked.prompt_tokens)), None
    async with aclosing(engine.generate(asked)) as chunks:
        async for chunk in chunks:
            recorder.add(chunk)
            if second is None and len(recorder.tokens) >= 10:
                second = await hold(engine, new)
    assert [span.version for span in recorder.spans] == [first, second], "the test needs a swap in mid-sentence"
    tokens = asked.prompt_tokens + recorder.tokens
    fed_to_old = len(asked.prompt_tokens) - 1 + recorder.spans[0].end
    experts, before, after = np.sort(experts_of(recorder)), chosen_by(old, tokens), chosen_by(new, tokens)
    np.testing.assert_array_equal(experts[:fed_to_old], before[:fed_to_old])
    np.testing.assert_array_equal(experts[fed_to_old:], after[fed_to_old:-1])
    assert (before[:fed_to_old] != after[:fed_to_old]).any()
    await engine.close()


@pytest.mark.parametrize("cuts", [[1], [7, 20]])
async def test_another_worker_goes_on_and_asks_for_what_is_missing(cuts: list[int], tmp_path: Path) -> None:
    model = make_model("moe", 0)
    engine = open_engine(SMALL, save_config(model, tmp_path), seed=0)
    await hold(engine, model)
    asked = request(PROMPTS[3], **SAMPLED)
    whole = await record(engine, asked)
    segments: list[Segment] = []
    for index, (start, end) in enumerate(zip([0, *cuts], cuts, strict=False)):
        earlier = Recorder(prompt_length=len(asked.prompt_tokens))
        earlier.add(part_of(whole, len(asked.prompt_tokens), end))
        segments.append(decode_segment(encode_segment(earlier.segment(TID, index, start))))
    heir = Recorder(segments, prompt_length=len(asked.prompt_tokens))
    assert heir.experts_from == len(asked.prompt_tokens) + cuts[-1] - 1
    await record(engine, asked, heir)
    tokens = asked.prompt_tokens + heir.tokens
    np.testing.assert_array_equal(np.sort(experts_of(heir)), chosen_by(model, tokens)[:-1])
    await engine.close()


def part_of(whole: Recorder, prompt_length: int, end: int) -> Chunk:
    """Return the response's first tokens, as an engine would have sent them."""
    experts = experts_of(whole)[: prompt_length + end - 1]
    return Chunk(
        token_ids=whole.tokens[:end], logprobs=whole.logprobs[:end], version=whole.newest_version, experts=experts
    )


async def test_a_dense_model_has_no_choices(tmp_path: Path) -> None:
    model = make_model("dense", 0)
    engine = open_engine(SMALL, save_config(model, tmp_path), seed=0)
    await hold(engine, model)
    with pytest.raises(HeadwayError, match="no experts that routers choose"):
        await record(engine, request(PROMPTS[0]))
    await engine.close()


def rows(count: int, layers: int = 2) -> Experts:
    return np.tile(np.array([0, 3], np.uint8), (count, layers, 1))


def chunk(count: int, experts: Experts | None) -> Chunk:
    return Chunk(token_ids=[1] * count, logprobs=[-1.0] * count, version=WeightVersion(1, 1), experts=experts)


@pytest.mark.parametrize(
    ("experts", "complaint"),
    [
        (None, "the experts of no tokens where it fed 2"),
        (rows(3), "the experts of 3 tokens where it fed 2"),
        (rows(2, layers=1), "unlike those before"),
        (rows(2).astype(np.uint16), "unlike those before"),
        (np.zeros((2, 2, 2), np.uint8), "the same expert twice"),
    ],
)
def test_choices_that_cannot_be_are_refused(experts: Experts | None, complaint: str) -> None:
    recorder = Recorder(prompt_length=5)
    recorder.add(chunk(1, rows(5)))
    with pytest.raises(EngineOutputError, match=complaint):
        recorder.add(chunk(2, experts))


def test_segments_that_were_generated_without_are_refused() -> None:
    earlier = Recorder()
    earlier.add(chunk(3, None))
    with pytest.raises(MissingExpertsError, match="segment 0 has the experts of no tokens where it fed 7"):
        Recorder([earlier.segment(TID, 0, 0)], prompt_length=5)
