"""An engine takes what its KV cache holds, and any other engine 64, where `engine.max_concurrent` is left open."""

import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from headway.broker.errors import HeadwayError
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.abilities import REQUESTS
from headway.rollout_workers.engines.base import EngineOptionsError
from headway.rollout_workers.engines.external_engine import fitting_requests
from headway.rollout_workers.engines.sglang.open_sglang import MOST_FITTING, open_sglang
from headway.rollout_workers.engines.sglang.open_sglang import engine_arguments as sglang_arguments
from headway.rollout_workers.engines.vllm.open_vllm import GRAPHED, explained
from headway.rollout_workers.engines.vllm.open_vllm import engine_arguments as vllm_arguments
from tests import plugged

from .generation import PROMPTS, hold, run_all
from .marks import needs_sglang, needs_vllm
from .models import make_model, save_config
from .sglang_settings import sglang_config, sglang_model

LENGTH = 512
FITTING = 6
BLOCK = 32
"""Tokens of a block of vLLM's KV cache."""


@pytest.mark.parametrize(
    ("cache_tokens", "fitting"), [(None, 512), (1 << 30, 512), (512 * 1024, 512), (100 * 1024, 100), (1023, 1), (8, 1)]
)
def test_requests_of_half_the_longest_length_fit(cache_tokens: int | None, fitting: int) -> None:
    assert fitting_requests("an engine", 512, cache_tokens, 2048) == fitting


@pytest.mark.parametrize("kind", ["embedded", plugged.ENGINE])
async def test_an_engine_that_cannot_say_what_fits_is_told_a_number(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugged.write(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "plugged", raising=False)
    config = EngineConfig(kind=kind, max_model_len=LENGTH)
    roots = ImportRoots((kind,) if ":" in kind else ())
    engine = open_engine(config, save_config(make_model("dense", 0), tmp_path), seed=0, roots=roots)
    assert engine.capacity == REQUESTS
    await engine.close()


@pytest.mark.parametrize(("has_gpu", "asked", "expected"), [(True, None, GRAPHED), (False, None, 64), (True, 7, 7)])
def test_vllm_is_started_for_as_many_as_it_decodes_by_graphs(
    has_gpu: bool, asked: int | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = EngineConfig(kind="vllm", max_concurrent=asked)
    assert vllm_arguments(config, tmp_path, "Qwen3ForCausalLM", 0)["max_num_seqs"] == expected + 1


@pytest.mark.parametrize(
    ("has_gpu", "asked", "expected"), [(True, None, MOST_FITTING), (False, None, 64), (True, 7, 7)]
)
def test_sglang_is_started_for_as_many_as_it_decodes_by_graphs(
    has_gpu: bool, asked: int | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = EngineConfig(kind="sglang", max_concurrent=asked)
    arguments = sglang_arguments(config, tmp_path, "Qwen3ForCausalLM", 0)
    assert arguments["max_running_requests"] == expected + 1
    graphs = MOST_FITTING if has_gpu and asked is None else None
    assert arguments.get("cuda_graph_max_bs_decode") == graphs, "SGLang chooses by the GPU's memory"


def test_a_number_of_requests_that_is_null_is_not_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for kind, arguments_of, option in (
        ("vllm", vllm_arguments, "max_num_seqs"),
        ("sglang", sglang_arguments, "max_running_requests"),
    ):
        for said, expected in ((None, REQUESTS + 1), (7, 7)):
            config = EngineConfig(kind=kind, options={option: said})
            assert arguments_of(config, tmp_path, "Qwen3ForCausalLM", 0)[option] == expected


def test_a_share_that_is_null_is_not_said(tmp_path: Path) -> None:
    config = EngineConfig(kind="vllm", options={"gpu_memory_utilization": None, "seed": None})
    arguments = vllm_arguments(config, tmp_path, "Qwen3ForCausalLM", 3)
    assert "gpu_memory_utilization" not in arguments
    assert arguments["seed"] is None


@needs_vllm
async def test_vllm_whose_process_cannot_start_says_where_the_reason_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1000000")  # GiB
    model, config = save_config(make_model("dense", 0), tmp_path), EngineConfig(kind="vllm", max_model_len=LENGTH)
    with pytest.raises(HeadwayError, match=r"ended before it had started; its reason stands above in this log\.$"):
        open_engine(config, model, seed=0)


@needs_vllm
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_num_seq": 4}, "engine.options.max_num_seq: vLLM .* has no such argument; did you mean 'max_num_seqs'"),
        ({"tensor_parallel_size": 3}, "vLLM .* refuses what it is started with: .*attention heads"),
        ({"max_num_seqs": "four"}, "vLLM .* refuses what it is started with: "),
    ],
)
async def test_vllm_refuses_options_before_it_starts(
    options: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    model, config = (
        save_config(make_model("dense", 0), tmp_path),
        EngineConfig(kind="vllm", max_model_len=LENGTH, options=options),
    )
    with pytest.raises(EngineOptionsError, match=complaint):
        open_engine(config, model, seed=0)


def test_vllm_that_measures_a_gpu_names_the_option_that_spares_it() -> None:
    complaint = "takes or gives back some.*engine.options.kv_cache_memory_bytes"
    with pytest.raises(HeadwayError, match=complaint), explained(["GPU-0"]):
        raise RuntimeError("Engine core initialization failed. See root cause above.")
    with pytest.raises(RuntimeError, match="another"), explained(["GPU-0"]):
        raise RuntimeError("another error")


@needs_vllm
async def test_vllm_takes_what_its_cache_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, object] = {"block_size": BLOCK, "num_gpu_blocks_override": FITTING * LENGTH // 2 // BLOCK}
    config = EngineConfig(kind="vllm", max_model_len=LENGTH, options=options)
    await check_cache_decides(config, make_model("dense", 0), tmp_path, caplog)


@needs_sglang
async def test_sglang_refuses_an_option_before_it_starts(tmp_path: Path) -> None:
    config = replace(sglang_config(1, LENGTH), options={"tp_sise": 2})
    complaint = r"engine\.options\.tp_sise: SGLang 0\..* has no such argument; did you mean 'tp_size'\?"
    with pytest.raises(EngineOptionsError, match=complaint):
        open_engine(config, save_config(sglang_model("dense", 0), tmp_path), seed=0)


async def test_an_option_is_looked_for_among_the_arguments_that_sglang_says_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arguments(model_path: str, tp_size: int = 1) -> None:
        raise AssertionError("SGLang is started")

    monkeypatch.setattr("headway.rollout_workers.engines.sglang.open_sglang.prepare_environment", lambda threads: None)
    for name in ("sglang", "sglang.srt", "sglang.srt.server_args"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["sglang.srt.server_args"], "ServerArgs", arguments, raising=False)
    config = EngineConfig(kind="sglang", dtype="bfloat16", options={"tp_size": 1, "tp_sise": 2})
    with pytest.raises(EngineOptionsError, match=r"engine\.options\.tp_sise: SGLang .*; did you mean 'tp_size'\?"):
        open_sglang(config, tmp_path, seed=0)


@needs_sglang
async def test_sglang_takes_what_its_cache_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = sglang_config(1, LENGTH)
    config = replace(config, max_concurrent=None, options={**config.options, "max_total_tokens": FITTING * LENGTH // 2})
    await check_cache_decides(config, sglang_model("dense", 0), tmp_path, caplog)


async def check_cache_decides(
    config: EngineConfig, model: PreTrainedModel, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Open the engine: it takes FITTING requests, says why, and serves them and one more that waits."""
    with caplog.at_level(logging.INFO, logger="headway.rollout_workers.engines.external_engine"):
        engine = open_engine(config, save_config(model, directory), seed=0)
    try:
        assert engine.capacity == FITTING
        assert f"takes {FITTING} requests at a time: its KV cache holds {FITTING * LENGTH // 2} tokens" in caplog.text
        await hold(engine, model)
        responses = await run_all(engine, [*PROMPTS, [3, 1]], max_new_tokens=LENGTH - 40, stop_token_ids=[])
        assert [len(response.tokens) for response in responses] == [LENGTH - 40] * (FITTING + 1)
    finally:
        await engine.close()
