"""An adapter that an engine holds and does not use is refused while it is small, too, and one that is used passes."""

import functools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import Probe
from headway.learner.stages.loop import TOLERANCE
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.weight_updates.engine_weights import (
    refuse_other_logprobs,
    refuse_other_tensors,
    refuse_unused_adapter,
)

from .adapters import RANK, SCALE, NamedTensors, base_tensors, make_adapter, merged
from .loop import manifest
from .marks import VLLM
from .models import Architecture, forward_logprobs, make_model, save_config

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = [int(token) for token in np.random.default_rng(1).integers(2, 60, 32)]
FIRST = WeightVersion(1, 1)
SMALLEST: dict[Architecture, float] = {"dense": 0.003, "moe": 0.02}
"""Sizes of B that change logprobs by means of 0.02 and over 0.1: rounding to bfloat16 changes routers' choices, too."""


@dataclass
class Case:
    """An engine over the base of its architecture, in a number format."""

    engine: Any
    architecture: Architecture
    dtype: str

    def adapter(self, size: float, seed: int = 1) -> NamedTensors:
        """Return one whose A is as large as W, as in training, and whose B has grown to `size`."""
        whole = make_adapter(make_model(self.architecture, 0), seed, 0.15)
        return [(name, tensor * (size / 0.15) if name.endswith("lora_B") else tensor) for name, tensor in whole]

    def probe(self, adapter: NamedTensors) -> Probe:
        """Return that of a learner which computes in float32."""
        models = merged(self.architecture, adapter), make_model(self.architecture, 0)
        logprobs, base = (forward_logprobs(model, TOKENS[:1], TOKENS[1:]).tolist() for model in models)
        return Probe(token_ids=TOKENS, logprobs=logprobs, tolerance=TOLERANCE[self.dtype], base_logprobs=base)

    async def swap(self, adapter: NamedTensors, scale: float = SCALE) -> None:
        given = [(name, tensor.to(self.torch_dtype)) for name, tensor in adapter]
        check = functools.partial(refuse_other_tensors, manifest(FIRST, self.probe(adapter), given))
        await self.engine.swap_adapter(FIRST, given, scale, check=check)

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=[
        ("embedded", "dense", "float32"),
        ("embedded", "dense", "bfloat16"),
        ("embedded", "moe", "bfloat16"),
        pytest.param(("vllm", "dense", "bfloat16"), marks=VLLM),
    ],
    ids="-".join,
)
async def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Case]:
    kind, architecture, dtype = request.param
    directory = save_config(make_model(architecture, 0), tmp_path_factory.mktemp("model"))
    config = EngineConfig(kind=kind, max_concurrent=8, max_model_len=128, dtype=dtype)
    engine: Any = open_engine(config, directory, seed=0, adapter_rank=RANK)
    found = Case(engine, architecture, dtype)
    await engine.load_base([(name, tensor.to(found.torch_dtype)) for name, tensor in base_tensors(architecture)])
    yield found
    await engine.close()


@pytest.mark.parametrize("times", [1, 5, 20])
async def test_an_adapter_that_is_not_used_is_refused_and_one_that_is_used_passes(case: Case, times: int) -> None:
    adapter = case.adapter(times * SMALLEST[case.architecture])
    probe = case.probe(adapter)
    await case.swap(adapter)
    scores, base = await case.engine.score(TOKENS), await case.engine.score_base(TOKENS)
    refuse_other_logprobs(probe, scores, FIRST)
    refuse_unused_adapter(probe, scores, base, FIRST)
    await case.swap(adapter, scale=0.0)
    unused, again = await case.engine.score(TOKENS), await case.engine.score_base(TOKENS)
    assert again == pytest.approx(base, abs=TOLERANCE[case.dtype] / 25)
    with pytest.raises(WeightSyncError, match="computes without its adapter"):
        refuse_unused_adapter(probe, unused, again, FIRST)


async def test_an_adapter_of_zeros_passes(case: Case) -> None:
    first = case.adapter(0.0)
    await case.swap(first)
    scores, base = await case.engine.score(TOKENS), await case.engine.score_base(TOKENS)
    refuse_unused_adapter(case.probe(first), scores, base, FIRST)
