"""The frozen weights that adapters change: they are published beside the versions, and fetched once by each engine."""

import msgspec

from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import BaseWeights, WeightManifest

from .staging import StagedWeights

BASE = WeightVersion(0, 0)
"""Under which the learner serves them; a run's own versions have incarnations above 0."""


def described(staged: StagedWeights, digests: tuple[str, ...] = ()) -> BaseWeights:
    """Return what an announcement says of them."""
    return BaseWeights(tensors=staged.tensors, buckets=staged.sizes, fingerprints=staged.fingerprints, digests=digests)


def manifest_of_base(announced: WeightManifest) -> WeightManifest:
    """Return a manifest by which they are pulled and verified like a version. `announced` must describe them."""
    base = announced.base
    assert base is not None
    return msgspec.structs.replace(
        announced,
        version=BASE,
        tensors=base.tensors,
        buckets=base.buckets,
        fingerprints=base.fingerprints,
        digests=base.digests,
        deltas=(),
        archived=None,
        adapter_scale=0.0,
        base=None,
    )
