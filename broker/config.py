"""What the broker can be told, with defaults."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which server, and how long things live in it."""

    url: Annotated[
        str,
        Meta(description="embedded (a server of our own), redis://host:port, rediss://..., or unix:///path"),
    ] = "embedded"
    lease_ttl_s: Annotated[float, Meta(gt=0, description="a lease not renewed for so long goes to another worker")] = (
        30.0
    )
    payload_ttl_s: Annotated[
        float, Meta(gt=0, description="a payload whose submission never followed is forgotten")
    ] = 600.0
    max_bytes: Annotated[int, Meta(gt=0, description="stored payload bytes above which no new group is admitted")] = (
        1 << 30
    )


class StalenessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bound on lag, and what happens at it."""

    max_lag: Annotated[
        int, Meta(ge=0, description="no token older than this many steps is ever trained; 0: on-policy")
    ] = 2
    on_straggler: Annotated[
        Literal["wait", "requeue"],
        Meta(description="a group that the next step would push over the bound: wait for it, or start it anew"),
    ] = "wait"
    on_over_bound: Annotated[
        Literal["requeue", "drop", "mask"],
        Meta(description="a finished group over the bound: generate it anew, drop it, or mask its old tokens"),
    ] = "requeue"
