# mypy: disable-error-code="operator, type-var"
"""An engine that takes adapters computes with the one that it was given, and cannot do otherwise unnoticed."""

import asyncio
import functools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import AdaptedEngine, WeightFingerprints
from headway.rollout_workers.engines.embedded.model_layers import Adapter
from headway.rollout_workers.weight_updates.engine_weights import (
    refuse_other_logprobs,
    refuse_other_tensors,
    refuse_unused_adapter,
)

from .adapters import RANK, SCALE, NamedTensors, adapter_delivery, base_tensors, make_adapter, merged, of_attention
from .generation import PROMPTS, begin, difference, hold, run_all
from .loop import PROBE, Delivery, delivery
from .marks import SGLANG, VLLM
from .models import Architecture, make_model, named_tensors, save_config
from .unpinned_sglang import unpin

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOLERANCE = 1e-4
OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {"worker_extension_cls": "tests.rollout_workers.unpacked_vllm.UnpackedExtension"}
}
"""Options with which vLLM takes the base as on a GPU: by copies, whose places were traced."""
NAMES = {
    "vllm": "headway.rollout_workers.engines.vllm.vllm_engine.adapter_request",
    "sglang": "headway.rollout_workers.engines.sglang.sglang_requests.adapter_name",
}
"""Import paths of what engines name a request's adapter by."""


@dataclass
class Case:
    """An engine over the base of its architecture."""

    kind: str
    engine: Any
    architecture: Architecture

    def adapter(self, seed: int) -> NamedTensors:
        whole = make_adapter(make_model(self.architecture, 0), seed)
        return of_attention(whole) if (self.kind, self.architecture) == ("sglang", "moe") else whole

    async def swap(self, sent: Delivery, tensors: NamedTensors | None = None) -> None:
        """Swap a delivery in as a worker does; `tensors`: what reaches the engine instead of its own."""
        check = functools.partial(refuse_other_tensors, sent.manifest)
        given = sent.tensors if tensors is None else tensors
        await self.engine.swap_adapter(sent.manifest.version, given, SCALE, check=check)

    async def probe(self, sent: Delivery) -> None:
        scores = await self.engine.score(PROBE)
        refuse_other_logprobs(sent.manifest.probe, scores, sent.manifest.version)
        await self.probe_use(sent)

    async def probe_use(self, sent: Delivery) -> None:
        """Compare what the adapter changes alone, as if rounding explained any other difference."""
        scores, base = await self.engine.score(PROBE), await self.engine.score_base(PROBE)
        refuse_unused_adapter(sent.manifest.probe, scores, base, sent.manifest.version)

    def sent(self, step: int) -> Delivery:
        return adapter_delivery(WeightVersion(1, step), self.adapter(step), self.architecture)


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=[
        ("embedded", "dense"),
        ("embedded", "moe"),
        pytest.param(("vllm", "dense"), marks=VLLM),
        pytest.param(("sglang", "dense"), marks=SGLANG),
        pytest.param(("sglang", "moe"), marks=SGLANG),
    ],
    ids="-".join,
)
async def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Case]:
    kind, architecture = request.param
    directory = save_config(make_model(architecture, 0), tmp_path_factory.mktemp("model"))
    config = EngineConfig(kind=kind, max_concurrent=8, max_model_len=512, options=OPTIONS.get(kind, {}))
    with pytest.MonkeyPatch.context() as patch:
        unpin(patch)
        engine = open_engine(config, directory, seed=0, adapter_rank=RANK)
    assert isinstance(engine, AdaptedEngine)
    base = base_tensors(architecture)
    check = functools.partial(refuse_other_tensors, delivery(WeightVersion(1, 0), make_model(architecture, 0)).manifest)
    held: list[WeightFingerprints | None] = []
    await engine.load_base(base, check=held.append)
    assert held[0] is not None, "it does not know what it holds"
    check(held[0])
    yield Case(kind, engine, architecture)
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


@pytest.mark.slow
@pytest.mark.parametrize("base", ["stays", "comes again", "is another"])
async def test_a_cache_that_is_kept_is_of_the_same_base(base: str, case: Case) -> None:
    """Under `weights.kv_policy=keep` the keys of an older adapter stay, and those over an older base do not."""
    if case.kind in NAMES:
        pytest.skip("a base is loaded while nothing runs")
    await case.swap(case.sent(1))
    responses, tasks = await begin(case.engine, PROMPTS)
    sent, seed = case.sent(2), 5 if base == "is another" else 0
    if base != "stays":
        await case.engine.load_base(named_tensors(make_model(case.architecture, seed)))
    await case.engine.swap_adapter(sent.manifest.version, sent.tensors, SCALE, keep_cache=True)
    await asyncio.gather(*tasks)
    await case.engine.load_base(base_tensors(case.architecture))
    new = merged(case.architecture, sent.tensors, seed)
    for response in responses:
        switch = response.versions.index(sent.manifest.version)
        assert (difference(new, response)[switch:].max() < TOLERANCE) == (base != "stays")


async def test_whole_weights_and_other_targets_take_an_adapters_place(case: Case) -> None:
    await case.swap(case.sent(1))
    whole = make_model(case.architecture, 5)
    if case.kind in NAMES:  # its requests go on naming an adapter
        with pytest.raises(WeightSyncError, match="computed with an adapter: give it adapters alone"):
            await hold(case.engine, whole)
    else:
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
    if case.kind in NAMES:
        await case.swap(sent)
        with monkeypatch.context() as without:
            without.setattr(NAMES[case.kind], lambda place: None)  # requests name none: it is held, and not used
            with pytest.raises(WeightSyncError, match="the engine's logprobs differ from the learner's"):
                await case.probe(sent)
            with pytest.raises(WeightSyncError, match="computes without its adapter"):
                await case.probe_use(sent)
        await case.probe(sent)
        return
    fill = Adapter.fill

    def loaded_only(adapter: Adapter, tensors: NamedTensors, scale: float) -> None:
        fill(adapter, tensors, scale)
        module = adapter.modules["model.layers.1.self_attn.q_proj"]
        del module.forward  # its class's own computes again, without the adapter

    monkeypatch.setattr(Adapter, "fill", loaded_only)
    with pytest.raises(WeightSyncError, match=r"holds another model\.layers\.1\.self_attn\.q_proj\.lora_A"):
        await case.swap(sent)
    case.engine._adapter.drop()  # its modules compute as they should again from the next adapter on


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
