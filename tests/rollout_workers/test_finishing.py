"""Running samples finish with the adapter that they began with, as long as the engine has a place for it."""

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import AdaptedEngine
from headway.rollout_workers.engines.weight_loading.engine_adapters import AdapterPlaces
from headway.rollout_workers.weight_updates.engine_weights import refuse_other_logprobs, refuse_other_tensors

from .adapters import RANK, SCALE, NamedTensors, adapter_delivery, base_tensors, make_adapter, merged, of_attention
from .generation import PROMPTS, Response, begin, difference
from .loop import PROBE
from .marks import SGLANG, VLLM
from .models import Architecture, make_model, save_config
from .unpinned_sglang import unpin

TOLERANCE = 1e-4
TOKENS = 400
V1, V2, V3, V4 = (WeightVersion(1, step) for step in (1, 2, 3, 4))


@dataclass
class Case:
    """An engine over the base of its architecture. Of a model with experts, adapters change attention alone."""

    engine: Any
    architecture: Architecture

    def adapter(self, version: WeightVersion) -> NamedTensors:
        whole = make_adapter(make_model(self.architecture, 0), version.step)
        return whole if self.architecture == "dense" else of_attention(whole)

    async def swap(self, version: WeightVersion) -> None:
        """Swap the adapter of a version in, and prove it as a worker does."""
        sent = adapter_delivery(version, self.adapter(version), self.architecture)
        check = functools.partial(refuse_other_tensors, sent.manifest)
        await self.engine.swap_adapter(version, sent.tensors, SCALE, check=check)
        refuse_other_logprobs(sent.manifest.probe, await self.engine.score(PROBE), version)

    def check_spans(self, responses: Sequence[Response], versions: Sequence[WeightVersion]) -> None:
        """Assert that all tokens are of these versions, one after the other, by their logprobs too."""
        models = {version: merged(self.architecture, self.adapter(version)) for version in versions}
        for response in responses:
            assert len(response.tokens) == TOKENS
            assert list(dict.fromkeys(response.versions)) == list(versions)
            assert response.versions == sorted(response.versions)
            off = {version: difference(model, response) for version, model in models.items()}
            for version, wrong in off.items():
                of_it = [place for place, one in enumerate(response.versions) if one == version]
                assert wrong[of_it].max() < TOLERANCE
            if len(off) == 2:
                first, second = off.values()
                count = response.versions.count(versions[0])
                assert first[count:].max() > 0.1 < second[:count].max()


OF_SGLANG = [pytest.param(("sglang", one), marks=SGLANG, id=f"sglang-{one}") for one in ("dense", "moe")]


@pytest_asyncio.fixture(params=[pytest.param(("vllm", "dense"), marks=VLLM, id="vllm-dense"), *OF_SGLANG])
async def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Case]:
    kind, architecture = request.param
    directory = save_config(make_model(architecture, 0), tmp_path)
    config = EngineConfig(kind=kind, max_concurrent=16, max_model_len=512)
    unpin(monkeypatch)
    opened = open_engine(config, directory, seed=0, adapter_rank=RANK, adapters_held=2)
    assert isinstance(opened, AdaptedEngine)
    await opened.load_base(base_tensors(architecture))
    yield Case(opened, architecture)
    await opened.close()


async def test_samples_finish_with_their_adapter_until_its_place_is_needed(case: Case) -> None:
    engine = case.engine
    await case.swap(V1)
    first, running_first = await begin(engine, PROMPTS[:3], TOKENS)
    await case.swap(V2)
    second, running_second = await begin(engine, PROMPTS[3:], TOKENS)
    await asyncio.gather(*running_first)
    case.check_spans(first, [V1])

    third, running_third = await begin(engine, PROMPTS[:2], TOKENS)
    await case.swap(V3)  # takes the place that the first ones have left
    fourth, running_fourth = await begin(engine, PROMPTS[:2], TOKENS)
    with pytest.raises(WeightSyncError, match="another base has come while requests run that keep theirs"):
        await engine.load_base(base_tensors(case.architecture))
    await case.swap(V4)  # takes that of V2, which is the older one
    await asyncio.gather(*running_second, *running_third, *running_fourth)
    case.check_spans(fourth, [V3])
    case.check_spans(third, [V2, V4])
    for response in second:
        assert set(response.versions) <= {V2, V4}
        assert response.versions[0] == V2


@pytest.mark.parametrize("case", OF_SGLANG, indirect=True)
async def test_samples_of_a_place_that_stays_find_all_that_they_had_cached(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's samples are sent again at every swap, those too which finish with their adapter."""
    engine = case.engine
    await case.swap(V1)
    _, running = await begin(engine, PROMPTS[:3], TOKENS)
    outputs, cached = engine._outputs, dict[str, tuple[int, int]]()

    async def watched(request: Any) -> AsyncIterator[Any]:
        async for output in outputs(request):
            cached.setdefault(request.rid, (len(request.input_ids), output["meta_info"]["cached_tokens"]))
            yield output

    monkeypatch.setattr(engine, "_outputs", watched)
    await engine.swap_adapter(V2, case.adapter(V2), SCALE)
    await asyncio.gather(*running)
    assert len(cached) == 3
    for tokens, found in cached.values():
        assert found == tokens - 1, "the last one is computed, so that it is sampled from"


def test_a_version_takes_a_free_place_or_that_of_the_oldest() -> None:
    places = AdapterPlaces(2, "an engine")
    assert (places.newest, places.are_needed) == (0, False)
    taken = []
    for version in (V1, V2, V3):
        taken.append(places.next())
        places.hold(taken[-1], version)
    assert taken == [1, 2, 1], "the oldest of two that are free"
    assert [places.is_open(place) for place in (1, 2)] == [True, False], "a request may begin in the newest"
    with places.kept() as first:
        places.hold(places.next(), V4)
        assert (first, places.newest, places.version(first)) == (1, 2, V3)
        with places.kept() as second:
            assert (second, places.next()) == (2, 1), "both are needed, and this one is older"
        assert places.next() == 1, "nobody knows what a load that has failed left there"
        assert places.are_needed
    assert not places.are_needed
