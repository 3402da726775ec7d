"""The settings of the broker, with their defaults."""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_TOKENS = 1 << 21
"""The most tokens of a prompt and its response that a frame may hold."""


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server that the run uses, and how long its keys live there."""

    url: Annotated[
        str,
        Meta(
            description="embedded (a server of our own), redis://host:port, rediss://host:port (TLS; "
            "?ssl_ca_certs=FILE), redis+cluster://, rediss+cluster:// or unix:///path"
        ),
    ] = "embedded"
    lease_ttl_s: Annotated[float, Meta(gt=0, description="a lease not renewed for so long goes to another worker")] = (
        30.0
    )
    lease_hold_s: Annotated[
        float,
        Meta(
            gt=0,
            description="a lease whose sample gets no tokens for so long is not renewed, and goes to another worker",
        ),
    ] = 600.0
    payload_ttl_s: Annotated[
        float, Meta(gt=0, description="a payload whose submission never followed is forgotten")
    ] = 600.0
    max_bytes: Annotated[
        int,
        Meta(gt=0, description="stored bytes, archived weights included, above which no new group is admitted"),
    ] = 1 << 30
    max_leases_per_worker: Annotated[
        int, Meta(ge=0, description="samples that one worker may hold at once; 0: as many as its engine batches")
    ] = 0
    payload_shards: Annotated[
        int, Meta(ge=1, le=1024, description="on a cluster: spread payloads over so many slots; 1: all of a run in one")
    ] = 1
    replicas: Annotated[
        int, Meta(ge=0, description="replicas of the server that must have a write before it counts as durable")
    ] = 0

    @property
    def is_embedded(self) -> bool:
        """True if the run starts a server of its own."""
        return self.url == "embedded"


@dataclass
class BlobStorage:
    """See the settings of the same names in `BrokerConfig`; `payload_shards` is the same for all processes of a run."""

    payload_ttl_s: float = 600.0
    """The server forgets after so long a blob that no script has recorded."""
    payload_shards: int = 1
    replicas: int = 0


class StalenessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bound on lag, and what happens at it."""

    max_lag: Annotated[
        int, Meta(ge=0, description="no token older than this many steps is ever trained; 0: on-policy")
    ] = 2
    ahead: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="steps of samples that are begun beyond the next step's, at most max_lag; null: max_lag. Less "
            "keeps samples fresher, and slow ones still have max_lag"
        ),
    ] = None
    on_straggler: Annotated[
        Literal["wait", "trim", "requeue"],
        Meta(
            description="an unfinished group that the next step would push over the bound: wait for it, train it "
            "with the samples that are there (at least min_group_size, else requeue), or start it anew"
        ),
    ] = "wait"
    min_group_size: Annotated[int, Meta(ge=1, description="the fewest samples that trim leaves a group")] = 1
    on_over_bound: Annotated[
        Literal["requeue", "drop", "mask"],
        Meta(description="a finished group over the bound: generate it anew, drop it, or mask its old tokens"),
    ] = "requeue"
