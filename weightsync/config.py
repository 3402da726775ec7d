"""The settings of weight synchronisation, with defaults."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class WeightsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way of weights from the learner to the engines, and how long learner and workers wait for them."""

    transport: Annotated[
        str,
        Meta(
            description="what broadcasts run on: gloo on CPUs, nccl or ucc on GPUs; ipc: memory that all map, on one"
            " machine, also where learner and engines share a GPU; or your own as package.module:Class"
        ),
    ] = "gloo"
    adapter: Annotated[
        Literal["auto", "alone", "merged"],
        Meta(
            description="what versions carry in a run with model.adapter. auto: the adapter alone, where all engines"
            " take it (embedded; vLLM and SGLang on one GPU for a model without experts, in bfloat16), with staging"
            " other than none and placement separated; alone: the adapter alone, also to your own engines, or the run"
            " is refused; merged: the weights that it makes of the model, whole"
        ),
    ] = "auto"
    staging: Annotated[
        Literal["host", "device", "none"],
        Meta(
            description="where a version is kept whole while it is sent and, beside the engine, until it is swapped in:"
            " host memory, or that of the learner's first GPU and of each engine's (nccl, ucc, ipc), which is faster;"
            " none: not beside the engine, which is paused and receives into its own weights, with two buckets beside"
            " it: engines take turns, swaps_at_once of them together, and one whose transfer fails stays paused until a"
            " pull, through host memory, has repaired it (the learner keeps a version on its GPU for nccl and ucc,"
            " else in host memory)"
        ),
    ] = "host"
    broadcast_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="deadline for forming a broadcast group and, again, for gathering and sending one version",
        ),
    ] = 30.0
    bucket_bytes: Annotated[int, Meta(ge=1024, description="tensors travel in flat buckets of at most this size")] = (
        64 << 20
    )
    host: Annotated[
        str | None,
        Meta(
            description="address of one of the learner's interfaces, at which it listens, and only there, and workers"
            " reach it; default: that of its way to the broker"
        ),
    ] = None
    ports: Annotated[
        tuple[int, int] | None,
        Meta(
            description="first and last port at which workers may pull from the learner, for a firewall; default: any"
        ),
    ] = None
    tls: Annotated[
        bool | None,
        Meta(
            description="encrypt what workers pull from the learner; default: unless it listens at a loopback address."
            " Broadcasts are never encrypted"
        ),
    ] = None
    trust: Annotated[
        Literal["members", "none"],
        Meta(
            description="members: workers that receive broadcasts can alter each other's weights, and end each other"
            " and the learner; none: for workers that you do not trust: they receive no broadcasts but follow by pull,"
            " over TLS, and take only buckets with the SHA-256 digest that the learner has stored in the broker, where"
            " its user alone may write"
        ),
    ] = "members"
    poll_s: Annotated[
        float,
        Meta(gt=0, description="seconds between two looks of a worker for a version or group that it was not told of"),
    ] = 1.0
    swaps_at_once: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share of the workers that may swap weights at the same time, rounded down but one at least,"
            " while the others generate; 1: each as soon as it has them (on-policy runs have nothing to generate then)."
            " With staging=none so many of a broadcast group receive together",
        ),
    ] = 0.5
    kv_policy: Annotated[
        Literal["recompute", "keep", "finish"],
        Meta(
            description="the KV cache of running samples at a swap. recompute: it is computed anew, so every token is"
            " sampled by exactly the weights that its span names; keep: it stays, which saves a prefill of everything"
            " that runs, and later tokens, and their logprobs, are of the new weights over keys and values of older"
            " ones; finish: samples go on with the adapter that they began with (versions that carry an adapter alone,"
            " engine.kind=vllm or sglang)"
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
    archive: Annotated[
        str,
        Meta(
            pattern=r"^(none|http|broker|file:///.+)$",
            description="where workers that pull find the weights: none (at the learner alone), file:///DIRECTORY"
            " (what they share with the learner, or is copied to them; each names it as it is called there) or broker"
            " (in the server's memory, up to half of broker.max_bytes); what is missing there is at the learner",
        ),
    ] = "none"
    pull_bytes_per_s: Annotated[
        Annotated[int, Meta(ge=1 << 16)] | None,
        Meta(description="limit of one worker's pulls (it may choose for itself); default: none"),
    ] = None
    pull_files: Annotated[
        bool,
        Meta(
            description="a worker that pulls the first version, or the base of adapters, takes it from the files in"
            " model.path, if it finds them and they have the published fingerprints; false: all of it comes from the"
            " learner (a worker may choose for itself)"
        ),
    ] = True

    @property
    def joins_groups(self) -> bool:
        """Whether a worker with these settings receives broadcasts; otherwise it follows by pull."""
        return self.follow == "broadcast" and self.trust == "members"

    def __post_init__(self) -> None:
        """Read `http`, the former name of `none`, in older recipes and in the configurations of older runs."""
        if self.archive == "http":
            msgspec.structs.force_setattr(self, "archive", "none")
