# mypy: disable-error-code="arg-type, comparison-overlap, type-var"
"""SGLang's routed experts in a chunk are those of a plain forward, before and after a swap, and of a continued sample.

On a GPU rounding changes a few of them, so nearly all have to agree there.
"""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from headway.broker.errors import HeadwayError
from headway.broker.schema import Experts
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import Engine
from headway.rollout_workers.engines.external_engine import RoutedLayers
from headway.rollout_workers.engines.sglang import sglang_requests as requests
from headway.rollout_workers.engines.sglang.sglang_requests import routed_expert_rows
from headway.rollout_workers.samples.recorder import Recorder

from .generation import PROMPTS, hold, request
from .marks import needs_sglang
from .models import make_model, save_config
from .sglang_settings import sglang_config
from .test_routed_experts import TID, chosen_by, experts_of, record
from .unpinned_sglang import unpin

CONFIG = sglang_config(max_concurrent=4, max_model_len=512)
AGREE = 0.95 if torch.cuda.is_available() else 1.0
OLD, NEW = (make_model("moe", seed, head_dim=64).to(getattr(torch, CONFIG.dtype)) for seed in (0, 1))
"""With heads of 64, the smallest for which SGLang has kernels on a GPU."""


def output(*experts: int) -> dict[str, object]:
    return {"meta_info": {"routed_experts": base64.b64encode(np.array(experts, np.int32).tobytes())}}


def test_rows_are_of_every_layer_and_those_with_experts_are_kept() -> None:
    found = routed_expert_rows(output(0, 0, 5, 2, 0, 0, 7, 1), RoutedLayers((1,), is_byte=True), 2, 2)
    assert found is not None
    np.testing.assert_array_equal(found, np.array([[[5, 2]], [[7, 1]]], np.uint8))
    assert found.dtype == np.uint8
    assert routed_expert_rows({"meta_info": {}}, RoutedLayers((1,), is_byte=True), 2, 2) is None
    with pytest.raises(HeadwayError, match="told 6 experts for 2 tokens of 2 layers"):
        routed_expert_rows(output(0, 0, 5, 2, 0, 0), RoutedLayers((1,), is_byte=True), 2, 2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    directory = save_config(OLD, tmp_path_factory.mktemp("moe"))
    with pytest.MonkeyPatch.context() as patch:
        unpin(patch)
        opened = open_engine(CONFIG, directory, seed=0, tells_experts=True)
    yield opened
    await opened.close()


def agree(found: Experts, expected: np.ndarray) -> bool:
    return bool((np.sort(found) == expected).mean() >= AGREE)


@needs_sglang
@pytest.mark.asyncio(loop_scope="module")
async def test_choices_are_those_of_a_plain_forward_and_a_sample_is_continued(engine: Engine) -> None:
    await hold(engine, OLD)
    asked = [request(prompt, temperature=1.0, stop_token_ids=[], max_new_tokens=40) for prompt in PROMPTS]
    for one, recorder in zip(asked, await asyncio.gather(*[record(engine, one) for one in asked]), strict=True):
        assert len(recorder.tokens) == 40
        assert agree(experts_of(recorder), chosen_by(OLD, one.prompt_tokens + recorder.tokens)[:-1])
        heir = Recorder([recorder.segment(TID, 0, 0)], prompt_length=len(one.prompt_tokens))
        await record(engine, request(one.prompt_tokens, temperature=1.0, stop_token_ids=[], max_new_tokens=60), heir)
        assert len(heir.tokens) == 60
        assert agree(experts_of(heir), chosen_by(OLD, one.prompt_tokens + heir.tokens)[:-1])


@needs_sglang
@pytest.mark.asyncio(loop_scope="module")
async def test_a_long_sample_takes_several_requests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    await hold(engine, OLD)
    monkeypatch.setattr(requests, "STRETCH", 16)
    asked = request(PROMPTS[0], temperature=1.0, stop_token_ids=[], max_new_tokens=40, experts_from=0)
    chunks = [chunk async for chunk in engine.generate(asked)]
    assert [len(chunk.token_ids) for chunk in chunks] == [16, 16, 8]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]
    recorder = await record(engine, asked)
    assert agree(experts_of(recorder), chosen_by(OLD, asked.prompt_tokens + recorder.tokens)[:-1])


@needs_sglang
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("keep_cache", [False, True])
async def test_a_swap_in_mid_sentence_keeps_what_sampled_each_token(engine: Engine, keep_cache: bool) -> None:
    first, prompt = await hold(engine, OLD), PROMPTS[3]
    recorder = Recorder(prompt_length=len(prompt))
    asked = request(prompt, temperature=1.0, stop_token_ids=[], max_new_tokens=400)
    running = asyncio.create_task(record(engine, asked, recorder))
    other = Recorder(prompt_length=1)
    await record(engine, request([9], temperature=1.0, stop_token_ids=[], max_new_tokens=30), other)
    second = await hold(engine, NEW, keep_cache=keep_cache)
    await running
    assert [span.version for span in recorder.spans] == [first, second], "the test needs a swap in mid-sentence"
    tokens, fed_to_old = prompt + recorder.tokens, len(prompt) - 1 + recorder.spans[0].end
    chosen = experts_of(recorder)
    before, after = chosen_by(OLD, tokens)[:-1], chosen_by(NEW, tokens)[:-1]
    assert agree(chosen[:fed_to_old], before[:fed_to_old])
    if not keep_cache:
        assert agree(chosen[fed_to_old:], after[fed_to_old:])
    assert (np.sort(chosen[fed_to_old:]) == before[fed_to_old:]).mean() < 0.9


@needs_sglang
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_a_cpu_is_refused_with_words(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="on GPUs only"):
        open_engine(CONFIG, save_config(OLD, tmp_path), seed=0, tells_experts=True)


@needs_sglang
async def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="no experts that routers choose"):
        open_engine(CONFIG, save_config(make_model("dense", 0), tmp_path), seed=0, tells_experts=True)
