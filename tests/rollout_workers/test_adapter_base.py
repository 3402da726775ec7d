"""The base below adapters is what the engine holds, also after a load that failed."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from headway.broker.client.broker import Outages
from headway.broker.errors import NoRoomError, WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import Probe, WeightManifest
from headway.rollout_workers.engines.base import Check, Engine, NamedTensors
from headway.rollout_workers.weight_updates.engine_weights import AdapterBaseWeights
from headway.weightsync.deliveries import BufferSet, Delivery
from headway.weightsync.subscriber import Subscriber
from headway.weightsync.tensors.staging import stage


def base_of(value: float) -> Delivery:
    staged = stage([("weight", torch.full((4, 4), value))], 1024)
    manifest = WeightManifest(
        version=WeightVersion(0, 0),
        tensors=staged.tensors,
        buckets=staged.sizes,
        probe=Probe(token_ids=[], logprobs=[], tolerance=0.0),
        group_epoch=0,
        pull_url="",
        pull_token="",
        fingerprints=staged.fingerprints,
    )
    return Delivery(manifest, BufferSet(staged.buckets), may_be_reused=False)


class Announced:
    """A subscriber whose announced base changes, and which may find another one in the model's files."""

    def __init__(self) -> None:
        self.base_now = base_of(1.0)
        self.in_files: Delivery | None = None
        self.verified = 0

    async def base(self, known: tuple[int, ...], *, attachable: bool, from_files: bool) -> Delivery | None:
        if known == self.base_now.manifest.fingerprints:
            return None
        return self.in_files if from_files and self.in_files is not None else self.base_now

    async def verify(self, base: Delivery) -> None:
        self.verified += 1


class Holding:
    """An engine that holds what it was given last, and may fail or say nothing of it."""

    def __init__(self) -> None:
        self.weight = torch.zeros(4, 4)
        self.loads = 0
        self.fails = False
        self.has_room = True

    async def load_base(self, tensors: NamedTensors, *, check: Check | None = None) -> None:
        self.loads += 1
        self.weight = tensors[0][1].clone()
        if not self.has_room:
            raise NoRoomError("no memory")
        if self.fails:
            raise WeightSyncError("the engine lost its way")

    async def swap_adapter(self) -> None: ...

    async def score_base(self) -> None: ...


@pytest.fixture
def subscriber() -> Announced:
    return Announced()


@pytest.fixture
def engine() -> Holding:
    return Holding()


@pytest.fixture
def base(engine: Holding, subscriber: Announced) -> AdapterBaseWeights:
    return AdapterBaseWeights(
        cast(Engine, engine), cast(Subscriber, cast(Any, subscriber)), Outages("redis://nowhere"), verify=True
    )


async def test_a_base_is_loaded_once_for_all_learners_that_have_it(
    base: AdapterBaseWeights, engine: Holding, subscriber: Announced
) -> None:
    for incarnation in (1, 1, 2):
        await base.engine_with_base(incarnation)
    assert engine.loads == 1
    subscriber.base_now = base_of(2.0)
    await base.engine_with_base(2)
    assert engine.loads == 1  # one learner's base never changes
    await base.engine_with_base(3)
    assert engine.loads == 2
    base.forget()
    await base.engine_with_base(3)
    assert engine.loads == 3


async def test_after_a_load_that_failed_the_base_before_counts_as_lost(
    base: AdapterBaseWeights, engine: Holding, subscriber: Announced
) -> None:
    await base.engine_with_base(1)
    subscriber.base_now, engine.fails = base_of(2.0), True
    with pytest.raises(WeightSyncError, match="lost its way"):
        await base.engine_with_base(2)
    subscriber.base_now, engine.fails = base_of(1.0), False
    await base.engine_with_base(3)
    assert engine.weight.tolist() == base_of(1.0).tensors[0][1].tolist()


async def test_files_that_the_engine_did_not_take_are_not_given_to_it_again(
    base: AdapterBaseWeights, engine: Holding, subscriber: Announced
) -> None:
    subscriber.in_files, engine.fails = replace(base_of(2.0), is_verified=False), True
    with pytest.raises(WeightSyncError, match="lost its way"):
        await base.engine_with_base(1)
    assert engine.weight.tolist() == base_of(1.0).tensors[0][1].tolist()
    engine.fails = False
    await base.engine_with_base(1)
    assert engine.loads == 3


async def test_a_lack_of_memory_is_no_fault_of_the_files(
    base: AdapterBaseWeights, engine: Holding, subscriber: Announced
) -> None:
    subscriber.in_files, engine.has_room = replace(base_of(1.0), is_verified=False), False
    with pytest.raises(NoRoomError):
        await base.engine_with_base(1)
    engine.has_room = True
    await base.engine_with_base(1)
    assert (engine.loads, subscriber.verified) == (2, 1)


async def test_files_are_verified_where_the_engine_says_nothing(
    base: AdapterBaseWeights, engine: Holding, subscriber: Announced
) -> None:
    subscriber.in_files = replace(base_of(1.0), is_verified=False)
    await base.engine_with_base(1)
    assert (engine.loads, subscriber.verified) == (1, 1)
