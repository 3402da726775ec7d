"""Direct loading puts real weights past vLLM's loader, and an engine tells the tensors that it holds."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import Probe, TensorSpec, WeightManifest
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import Engine, WeightFingerprints
from headway.rollout_workers.engines.weight_loading import direct_loading
from headway.rollout_workers.engines.weight_loading.direct_loading import DirectLoading
from headway.rollout_workers.weight_updates.engine_weights import covers_all_tensors, refuse_other_tensors
from headway.weightsync.limits import Deadline
from headway.weightsync.tensors.buckets import views
from headway.weightsync.tensors.deltas import encode, patch
from headway.weightsync.tensors.fingerprint import fingerprint
from headway.weightsync.tensors.staging import stage

from .generation import PROMPTS, difference, hold, hold_in_parts, run_all
from .marks import VLLM
from .models import Architecture, make_model, named_tensors, save_config
from .test_placement import Shard, version

TOLERANCE = 1e-4
EXTENSION = "tests.rollout_workers.unpacked_vllm.UnpackedExtension"


def published(tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
    """Return a manifest of which only the parts that `refuse_other_tensors` reads are true."""
    named = list(tensors)
    specs = tuple(TensorSpec(name, "float32", tuple(one.shape), 0, 0, one.nbytes) for name, one in named)
    return WeightManifest(
        version=WeightVersion(1, 0),
        tensors=specs,
        buckets=(0,),
        probe=Probe(token_ids=[], logprobs=[], tolerance=0.0),
        group_epoch=0,
        pull_url="",
        pull_token="",
        fingerprints=tuple(fingerprint(one) for _, one in named),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_second_version_is_copied_past_the_loader(dtype: torch.dtype) -> None:
    shard, expected = Shard(0, 2, dtype), Shard(0, 2, dtype)
    loads: list[object] = []

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        loads.append(tensors)
        shard.load(tensors)

    direct = DirectLoading(load, lambda: shard.parameters)
    for seed in (1, 2):
        before = len(loads)
        direct.load(version(dtype, seed))
        expected.load(version(dtype, seed).items())
        assert direct.is_direct
        assert (len(loads) > before) == (seed == 1)
        assert all(torch.equal(shard.parameters[name], one) for name, one in expected.parameters.items())


def test_other_tensors_are_traced_anew() -> None:
    shard = Shard(0, 1, torch.float32)
    direct = DirectLoading(shard.load, lambda: shard.parameters)
    direct.load(version(torch.float32, 1))
    some = {name: one for name, one in version(torch.float32, 2).items() if name != "embed"}
    untouched = shard.parameters["embed"].clone()
    direct.load(some)
    assert direct.is_direct
    assert torch.equal(shard.parameters["embed"], untouched)
    assert torch.equal(shard.parameters["norm"], some["norm"])


def test_a_loader_that_does_more_goes_on_loading() -> None:
    weight = torch.zeros(4, 6)

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            weight.copy_(tensor.roll(1, 1))

    direct = DirectLoading(load, lambda: {"weight": weight})
    for seed in (1, 2):
        given = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        direct.load({"a": given})
        assert torch.equal(weight, given.roll(1, 1))
    assert (direct.is_direct, direct.held()) == (False, None)


def test_a_loader_that_looks_at_values_is_found_out() -> None:
    """The loader copies the tracing numbers and scales all others, so only a comparison of bits can tell."""
    weight = torch.zeros(4, 6)

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            weight.copy_(tensor if tensor.abs().max() < 1e-30 else 2 * tensor)

    direct = DirectLoading(load, lambda: {"weight": weight})
    given = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    direct.load({"a": given})
    assert not direct.is_direct
    assert torch.equal(weight, 2 * given)


BLOCK = 4
"""The number of columns that share a scale."""


class QuantizedMatrix:
    """An engine's parameters, and its loader, which turns full precision into blocks of fp8 and their scales."""

    def __init__(self) -> None:
        self.parameters = {
            "weight": torch.zeros(6, 8, dtype=torch.float8_e4m3fn),
            "weight_scale": torch.zeros(6, 2),
            "norm": torch.zeros(8, dtype=torch.bfloat16),
        }

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name == "norm":
                self.parameters[name].copy_(tensor)
            else:
                blocks = tensor.float().view(6, 2, BLOCK)
                scales = blocks.abs().amax(2) / 448
                self.parameters["weight"].copy_((blocks / scales[..., None]).view(6, 8))
                self.parameters["weight_scale"].copy_(scales)


def test_an_engine_that_quantizes_gets_full_precision_by_deltas_and_every_version_through_its_loader() -> None:
    engine, expected, loads = QuantizedMatrix(), QuantizedMatrix(), 0

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        nonlocal loads
        loads += 1
        engine.load(tensors)

    direct = DirectLoading(load, lambda: engine.parameters)
    generator = torch.Generator().manual_seed(0)
    trained = {"weight": torch.randn(6, 8, generator=generator).bfloat16(), "norm": torch.ones(8).bfloat16()}
    pulled = stage(trained.items(), 1024)
    for _ in range(3):
        direct.load(dict(views(pulled.tensors, pulled.buckets)))
        expected.load(trained.items())
        assert all(
            torch.equal(engine.parameters[name].float(), one.float()) for name, one in expected.parameters.items()
        )
        trained["weight"].view(-1)[::7] *= 1.01  # some of it is less than fp8 can tell
        delta = encode(pulled, stage(trained.items(), 1024), Deadline(math.inf))
        assert delta is not None
        patch(dict(enumerate(pulled.buckets)), pulled.tensors, delta)
    assert (loads, direct.is_direct, direct.held()) == (3, False, None)


def test_what_a_loader_derives_is_not_left_as_it_was() -> None:
    """Copying restores the parameter, and not the values that the loader derived from the tracing numbers."""
    weight, derived = torch.zeros(4, 6), torch.zeros(4, 6)

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            weight.copy_(tensor)
            derived.copy_(2 * tensor)

    direct = DirectLoading(load, lambda: {"weight": weight}, derived=lambda: {"derived": derived})
    for seed in (1, 2):
        given = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        direct.load({"a": given})
        assert torch.equal(derived, 2 * given)
    assert not direct.is_direct


def test_a_tensor_that_the_engine_does_not_hold_is_missed() -> None:
    manifest = published([("a", torch.ones(8)), ("layers.0.mlp.experts.down_proj", torch.ones(2, 3, 4))])
    refuse_other_tensors(manifest, WeightFingerprints.of({"a": (fingerprint(torch.ones(8)), 8)}))
    with pytest.raises(WeightSyncError, match="holds another a"):
        refuse_other_tensors(manifest, WeightFingerprints.of({}))


def test_an_engine_tells_all_only_under_the_names_that_were_published() -> None:
    experts = "layers.0.mlp.experts.down_proj"
    manifest = published([("a", torch.ones(8)), (experts, torch.ones(2, 3, 4))])
    assert covers_all_tensors(manifest, WeightFingerprints.of({"a": (1, 8), experts: (1, 24)}))
    assert not covers_all_tensors(
        manifest, WeightFingerprints.of({"a": (1, 8), "layers.0.mlp.experts.0.down_proj.weight": (1, 12)})
    )
    assert not covers_all_tensors(manifest, None)


def whole(loadings: Iterable[DirectLoading]) -> WeightFingerprints:
    shards = [loading.held() for loading in loadings]
    return WeightFingerprints.together(shard for shard in shards if shard is not None)


def elements(held: WeightFingerprints) -> dict[str, int]:
    return dict(zip(held.names, held.elements_N.tolist(), strict=True))


def test_shards_together_hold_what_was_published() -> None:
    shards = [Shard(rank, 2, torch.bfloat16) for rank in range(2)]
    loadings = [DirectLoading(shard.load, lambda shard=shard: shard.parameters) for shard in shards]  # type: ignore[misc]
    for loading in loadings:
        loading.load(version(torch.bfloat16, 1))
    held = whole(loadings)
    manifest = published(version(torch.bfloat16, 1).items())
    assert held.names == tuple(version(torch.bfloat16, 1))
    assert elements(held)["norm"] == 2 * 8
    refuse_other_tensors(manifest, held)
    loadings[1].load(version(torch.bfloat16, 2))
    with pytest.raises(WeightSyncError, match="the engine holds another embed than was published"):
        refuse_other_tensors(manifest, whole(loadings))


@pytest.mark.parametrize("rows_at_once", [1, 20, 1 << 21])
def test_it_does_not_matter_how_many_parameters_are_added_up_together(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    monkeypatch.setattr(direct_loading, "ROWS_AT_ONCE", rows_at_once)
    shard, sent = Shard(0, 1, torch.bfloat16), version(torch.bfloat16, 1)
    loading = DirectLoading(shard.load, lambda: shard.parameters)
    loading.load(sent)
    held = loading.held()
    assert held is not None
    assert held.fingerprints_N.tolist() == [fingerprint(tensor) for tensor in sent.values()]
    assert elements(held) == {name: tensor.numel() for name, tensor in sent.items()}


def test_half_a_tensor_is_not_the_tensor() -> None:
    tensor = torch.cat([torch.ones(4), torch.zeros(4)])
    manifest = published([("a", tensor)])
    refuse_other_tensors(manifest, WeightFingerprints.of({"a": (fingerprint(tensor), 8)}))
    for count in (0, 4, 12):
        with pytest.raises(WeightSyncError, match="holds another a"):
            refuse_other_tensors(manifest, WeightFingerprints.of({"a": (fingerprint(tensor), count)}))


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        ("embedded", "dense"),
        ("embedded", "moe"),
        pytest.param(("vllm", "dense"), marks=VLLM),
    ],
    ids="-".join,
)
async def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Engine, Path, list[PreTrainedModel]]]:
    caches = tmp_path_factory.mktemp("caches")
    architecture: Architecture
    kind, architecture = request.param
    models = [make_model(architecture, seed) for seed in range(3)]
    directory = save_config(models[0], tmp_path_factory.mktemp(architecture))
    options: dict[str, object] = {"worker_extension_cls": EXTENSION} if kind == "vllm" else {}
    config = EngineConfig(kind=kind, max_concurrent=8, max_model_len=512, options=options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(caches))
        engine = open_engine(config, directory, seed=0)
        yield engine, directory, models
    await engine.close()
    assert len(list(caches.glob("headway/placements/*"))) == (kind == "vllm"), "one model was traced"


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("give", [hold, hold_in_parts])
async def test_an_engine_holds_what_it_was_given(
    case: tuple[Engine, Path, list[PreTrainedModel]], give: Callable[..., Awaitable[WeightVersion]]
) -> None:
    engine, _, models = case
    for model in models:
        found: list[WeightFingerprints | None] = []
        await give(engine, model, check=found.append)
        (held,) = found
        assert held is not None
        assert set(held.names) >= {name for name, _ in named_tensors(model)}
        refuse_other_tensors(published(named_tensors(model)), held)
        for response in await run_all(engine, PROMPTS):
            assert difference(model, response, 1.0).max() < TOLERANCE
    with pytest.raises(WeightSyncError, match="than was published"):
        refuse_other_tensors(published(named_tensors(models[0])), held)
