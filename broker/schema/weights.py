"""A version of the weights on its way: its tensors, deltas, probe and receivers, and the model's files."""

import msgspec

from . import SampleLimits, WeightVersion


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A token sequence and its logprobs under the published weights: verifies an engine after a swap."""

    token_ids: list[int]
    logprobs: list[float]
    """One for each token after the first, at temperature 1."""
    tolerance: float
    """The mean absolute difference that rounding explains."""
    base_logprobs: list[float] = []
    """Those of the weights without the adapter, where the version carries an adapter alone; else empty."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """The place of one named tensor: `nbytes` at `offset` in `bucket`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int


class DeltaSpec(msgspec.Struct, frozen=True, array_like=True):
    """A delta, which turns the buckets of `base` into those of `version`, losslessly."""

    base: WeightVersion
    version: WeightVersion
    nbytes: int
    digest: str
    """blake2b of the encoded bytes, 16 bytes in hexadecimal."""


class Archived(msgspec.Struct, frozen=True, array_like=True):
    """The archived part of a version: all of its manifest's deltas, and an anchor, once there is one."""

    anchor: WeightVersion | None
    """A whole version that is the base of one of the deltas."""
    digests: tuple[str, ...]
    """Digests of the anchor's buckets, which are as large as the version's own: blake2b, 16 bytes in hexadecimal."""


class BaseWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The frozen weights that an adapter changes; an engine fetches them once."""

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[int, ...]
    fingerprints: tuple[int, ...]
    digests: tuple[str, ...] = ()
    """Both as of a WeightManifest."""


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine needs to receive, verify and name one version of the weights."""

    identity: str = ""
    """The run's identity, written when the version is offered or announced."""
    version: WeightVersion
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[int, ...]
    """The sizes of the buckets in bytes; a bucket is sent as one flat run of bytes."""
    probe: Probe
    group_epoch: int
    """The epoch of the broadcast group to which this version is sent; 0: there is no group, and all workers pull."""
    pull_url: str
    """The learner's URL from which workers pull the buckets."""
    pull_token: str
    """The bearer token by which workers prove there that they belong to the run."""
    pull_certificate: str = ""
    """The only certificate (PEM) that workers accept from the server at `pull_url`; empty: it speaks without TLS."""
    fingerprints: tuple[int, ...] = ()
    """The fingerprint of each tensor (`weightsync.tensors.fingerprint`), both of the bytes that must arrive and of an
    engine that holds the version. An offer has none yet: they follow the last bucket."""
    digests: tuple[str, ...] = ()
    """The SHA-256 digest of each bucket, in hexadecimal, where workers are not trusted (`weights.trust`); else empty:
    fingerprints are sums, and no defence against forgery."""
    like: WeightVersion | None = None
    """In an offer: the announced version that has the same `tensors` and `buckets`, which are left out here."""
    deltas: tuple[DeltaSpec, ...] = ()
    """The chain of deltas that ends at this version, oldest first, each from the version of the one before."""
    adapter_scale: float = 0.0
    """The factor by which B A is added to a weight, where the version carries an adapter alone; 0: whole weights."""
    base: BaseWeights | None = None
    """In an announcement of an adapter: the weights that it changes, which are at `pull_url` as version 0.0."""
    archived: Archived | None = None
    """The part of the version that is archived, too; None: all of it is at `pull_url` only."""


class BroadcastGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that receive broadcasts. Every change of members begins a new epoch with new process groups.

    Members [0, at_once) receive first, then [at_once, 2 at_once) and so on. Each such wave has a process group of its
    own, in which the learner is rank 0 and the members follow in order.
    """

    identity: str = ""
    """The run's identity, written when the group is stored."""
    epoch: int
    incarnation: int
    transport: str
    """`weights.transport`."""
    meeting: str
    """The name of the meeting of its members and the learner (`broker.client.weights`)."""
    learner: str
    """The learner's address, by which a member finds the network interface that leads to it."""
    timeout_s: float
    members: tuple[str, ...]
    """The names of the workers."""
    at_once: int
    """Members of one wave."""


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model without its weights: config.json, the tokenizer's files. No shared file system is needed."""

    files: dict[str, bytes]
    end_tokens: tuple[int, ...] = ()
    """The tokens at which a response ends, as the learner tells them."""
    limits: SampleLimits = SampleLimits()
    """The bounds of its samples."""
