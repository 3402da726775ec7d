# mypy: disable-error-code="arg-type"
"""Behaviour of the embedded engine alone, and the opening of engines."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from headway.broker.errors import ConfigError, HeadwayError, WeightSyncError
from headway.broker.schema import WeightVersion
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.embedded import embedded_engine as embedded
from headway.rollout_workers.engines.embedded import model_layers as embedded_experts
from headway.rollout_workers.engines.embedded.embedded_engine import EmbeddedEngine
from headway.rollout_workers.engines.embedded.model_layers import EXPERTS
from headway.rollout_workers.engines.embedded.slot_cache import ATTENTION
from headway.rollout_workers.engines.weight_loading.named_tensors import load_tensors, one_by_one

from .generation import PROMPTS, difference, hold, request, run, run_all
from .models import make_model, named_tensors, save_config

SMALL = EngineConfig(max_concurrent=4, max_model_len=128)


async def test_weights_beside_the_config_are_loaded(tmp_path: Path) -> None:
    model = make_model("moe", 0, tied=False)
    model.save_pretrained(tmp_path)
    engine = open_engine(SMALL, tmp_path, seed=0)
    response = await run(engine, request(PROMPTS[0]))
    assert difference(model, response).max() < 1e-4
    assert set(response.versions) == {WeightVersion(0, 0)}
    await engine.close()


@pytest.mark.parametrize("device", ["gpu", "cuda:999"])
def test_a_device_that_torch_cannot_use_is_told_with_its_key(device: str) -> None:
    config = EngineConfig(max_concurrent=4, max_model_len=128, device=device)
    with pytest.raises(ConfigError, match=f"engine.device is {device}, which torch cannot use here: .*engine.device=c"):
        EmbeddedEngine(make_model("dense", 0), config, seed=0)


async def test_an_error_while_decoding_reaches_everyone_who_waits() -> None:
    model = make_model("dense", 0)
    model.set_attn_implementation(ATTENTION)
    engine = EmbeddedEngine(model, SMALL, seed=0, version=WeightVersion(1, 1))
    await run(engine, request(PROMPTS[0]))
    model.register_forward_hook(lambda *_: 1 / 0)
    ends = await asyncio.gather(
        *[run(engine, request(prompt)) for prompt in PROMPTS], engine.score([2, 3]), return_exceptions=True
    )
    for end in ends:
        assert isinstance(end, HeadwayError)
        assert "ZeroDivisionError" in str(end)
    with pytest.raises(HeadwayError, match="ZeroDivisionError"):
        await hold(engine, model)
    await engine.close()


async def test_an_error_while_decoding_reaches_who_asks_meanwhile() -> None:
    model = make_model("dense", 0)
    model.set_attn_implementation(ATTENTION)
    engine = EmbeddedEngine(model, SMALL, seed=0, version=WeightVersion(1, 1))
    is_decoding, goes_on = threading.Event(), threading.Event()

    def fail(*_: object) -> None:
        is_decoding.set()
        goes_on.wait()
        raise ZeroDivisionError

    model.register_forward_hook(fail)
    running = asyncio.create_task(run(engine, request(PROMPTS[0])))
    await asyncio.to_thread(is_decoding.wait)
    scoring = asyncio.create_task(engine.score([2, 3]))
    while engine._commands.empty():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    goes_on.set()
    for end in await asyncio.gather(running, scoring, return_exceptions=True):
        assert isinstance(end, HeadwayError)
        assert "ZeroDivisionError" in str(end)
    await engine.close()


async def test_a_thread_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEADLINE_S", "CLOSE_S"):
        monkeypatch.setattr(embedded, name, 0.1)
    model, may_end = make_model("dense", 0), threading.Event()
    engine = EmbeddedEngine(model, SMALL, seed=0)
    engine._post(lambda: may_end.wait() and None)
    try:
        with pytest.raises(WeightSyncError, match=r"no answer within 0\.1 s"):
            await hold(engine, model)
        await engine.close()
        assert engine._thread.is_alive()
    finally:
        may_end.set()
        engine._thread.join()


async def test_long_and_short_samples_share_the_cache(tmp_path: Path) -> None:
    """The cache grows, slots move when samples end, new samples fill them."""
    model = make_model("dense", 0)
    engine = open_engine(EngineConfig(max_concurrent=3, max_model_len=512), save_config(model, tmp_path), seed=0)
    await hold(engine, model)
    lengths = [3, 150, 7, 300, 1, 40, 90, 5]
    responses = await asyncio.gather(
        *[
            run(
                engine,
                request(prompt, temperature=1.0, stop_token_ids=[], max_new_tokens=length, seed=length),
            )
            for prompt, length in zip(PROMPTS * 2, lengths, strict=False)
        ]
    )
    assert [len(response.tokens) for response in responses] == lengths
    assert max(difference(model, response).max() for response in responses) < 1e-4
    await engine.close()


async def test_samples_that_begin_alike_are_computed_once(tmp_path: Path) -> None:
    """From the first token of its own on, each sample is fed alone."""
    model = make_model("dense", 0)
    engine = open_engine(SMALL, save_config(model, tmp_path), seed=0)
    assert isinstance(engine, EmbeddedEngine)
    fed = list[int]()
    engine._decoder.model.register_forward_pre_hook(
        lambda _module, _none, named: fed.append(named["input_ids"].numel()), with_kwargs=True
    )
    await hold(engine, model)
    prompt = [2 + i % 7 for i in range(40)]
    asked = [request(prompt, temperature=1.0, stop_token_ids=[], max_new_tokens=6, seed=seed) for seed in range(4)]
    engine._is_paused = True  # all four begin in one forward
    running = [asyncio.create_task(run(engine, one)) for one in asked]
    await asyncio.sleep(0.05)
    engine._post(lambda: setattr(engine, "_is_paused", False))
    responses = await asyncio.gather(*running)
    assert fed[-6:] == [39 + 4, 4, 4, 4, 4, 4]
    assert len({tuple(response.tokens) for response in responses}) == 4
    assert max(difference(model, response).max() for response in responses) < 1e-4
    await engine.close()


@pytest.mark.parametrize("experts", [4, 8])
def test_few_experts_and_many_give_the_same_as_transformers(experts: int) -> None:
    """With eight experts, two of them chosen, most would be wasted: transformers' own function gets them."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": experts, "num_experts_per_tok": 2}
    part = Qwen3MoeExperts(Qwen3MoeConfig(**shape)).requires_grad_(False)
    for parameter in part.parameters():
        parameter.normal_(std=0.3)
    tokens = torch.randn(50, 32)
    weights, chosen = torch.randn(50, experts).softmax(-1).topk(2)
    results = []
    for implementation in ("eager", EXPERTS):
        part.config._experts_implementation = implementation
        results.append(part(tokens, chosen, weights))
    assert (results[0] - results[1]).abs().max() < 1e-5
    del part._is_expert_parallel  # older versions of transformers have none
    assert embedded_experts._is_for(part, 2) == (experts <= embedded_experts.MOST_WASTED * 2)


async def test_seeds_repeat(tmp_path: Path) -> None:
    model = make_model("dense", 0)
    engine = open_engine(SMALL, save_config(model, tmp_path), seed=0)
    await hold(engine, model)
    first = await run_all(engine, PROMPTS, temperature=1.0, seed=7)
    second = await run_all(engine, PROMPTS[::-1], temperature=1.0, seed=7)
    assert [response.tokens for response in first] == [response.tokens for response in second[::-1]]
    await engine.close()


async def test_other_architectures_need_nothing_of_ours(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, initializer_range=0.15)).eval()
    engine = open_engine(SMALL, save_config(model, tmp_path), seed=0)
    await hold(engine, model)
    for response in await run_all(engine, PROMPTS, temperature=1.0):
        assert difference(model, response).max() < 1e-4
    await engine.close()


def test_attention_that_it_lacks_is_refused(tmp_path: Path) -> None:
    Qwen3Config(use_sliding_window=True, sliding_window=8, max_window_layers=0).save_pretrained(tmp_path)
    with pytest.raises(HeadwayError, match="full attention only"):
        open_engine(SMALL, tmp_path, seed=0)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # vLLM's imports warn of its own dependencies
def test_heads_that_vllm_lacks_are_refused(tmp_path: Path) -> None:
    Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=16).save_pretrained(tmp_path)
    with pytest.raises(HeadwayError, match="head_dim=16"):
        open_engine(EngineConfig(kind="vllm"), tmp_path, seed=0)


@pytest.mark.parametrize("tied", [True, False])
def test_experts_load_fused_or_one_by_one(tied: bool) -> None:
    sent, fused, single = (make_model("moe", seed, tied=tied) for seed in range(3))
    load_tensors(fused, named_tensors(sent))
    load_tensors(single, list(one_by_one(named_tensors(sent))))
    for name, parameter in sent.named_parameters():
        assert torch.equal(fused.get_parameter(name), parameter)
        assert torch.equal(single.get_parameter(name), parameter)


def test_a_tied_head_may_be_sent_or_left_out() -> None:
    sent, received = make_model("dense", 0), make_model("dense", 1)
    head = ("lm_head.weight", sent.get_parameter("model.embed_tokens.weight").detach())
    load_tensors(received, [*named_tensors(sent), head])
    assert torch.equal(received.get_parameter("model.embed_tokens.weight"), head[1])


def test_unknown_engines_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'embedded'"):
        open_engine(EngineConfig(kind="embeded"), tmp_path, seed=0)
    with pytest.raises(ConfigError, match=r"no_such_module:Engine"):
        open_engine(EngineConfig(kind="no_such_module:Engine"), tmp_path, seed=0)


async def test_an_engine_of_the_users_own(tmp_path: Path) -> None:
    class_path = f"{EmbeddedEngine.__module__}:open_embedded"
    engine = open_engine(EngineConfig(kind=class_path), save_config(make_model("dense", 0), tmp_path), seed=0)
    await engine.close()
