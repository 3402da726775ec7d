"""What weight synchronisation can be told, with defaults."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class WeightsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights travel from the learner to the engines, and how long anybody waits for it."""

    transport: Annotated[
        Literal["gloo", "nccl", "ucc", "ipc"],
        Meta(
            description="what broadcasts run on: gloo on CPUs, nccl or ucc on GPUs; ipc: memory that all map, on one"
            " machine, also where learner and engines share a GPU"
        ),
    ] = "gloo"
    staging: Annotated[
        Literal["host", "device"],
        Meta(
            description="where a version is kept whole while it is sent and, beside the engine, until it is swapped in:"
            " host memory, or that of the learner's first GPU and of each engine's (nccl, ucc, ipc), which is faster"
        ),
    ] = "host"
    broadcast_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="deadline for forming a broadcast group and, again, for sending one version to it",
        ),
    ] = 30.0
    bucket_bytes: Annotated[int, Meta(ge=1024, description="tensors travel in flat buckets of at most this size")] = (
        64 << 20
    )
    host: Annotated[
        str | None,
        Meta(description="address at which workers reach the learner; default: that of its way to the broker"),
    ] = None
    poll_s: Annotated[float, Meta(gt=0, description="how often a worker looks for a new version or group")] = 0.05
    swaps_at_once: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share of the workers that may swap weights at the same time, rounded down but one at least,"
            " while the others generate; 1: each as soon as it has them (on-policy runs have nothing to generate then)",
        ),
    ] = 0.5
    kv_policy: Annotated[
        Literal["recompute", "keep"],
        Meta(
            description="the KV cache of running samples at a swap. recompute: it is computed anew, so every token is"
            " sampled by exactly the weights that its span names; keep: it stays, which saves a prefill of everything"
            " that runs, and later tokens, and their logprobs, are of the new weights over keys and values of older"
            " ones"
        ),
    ] = "recompute"
    follow: Annotated[
        Literal["broadcast", "pull"],
        Meta(
            description="broadcast: a worker joins broadcast groups; pull: for a slow line, it keeps a copy of the"
            " weights in host memory and fetches what changed (a worker may choose for itself)"
        ),
    ] = "broadcast"
    delta_chain: Annotated[
        int,
        Meta(ge=0, description="so many versions' changes the learner keeps for workers that follow by pull; 0: none"),
    ] = 8
    pull_bytes_per_s: Annotated[
        Annotated[int, Meta(ge=1 << 16)] | None,
        Meta(description="limit of one worker's pulls (it may choose for itself); default: none"),
    ] = None
