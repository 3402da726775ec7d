"""Everything that crosses a process boundary: frozen structs without behaviour, one schema number.

Numpy arrays travel as raw little-endian buffers (see `broker.wire.codec`); everything else is msgpack. A change to
a field that older peers cannot read raises SCHEMA_VERSION; peers refuse frames of another number instead of
guessing.
"""

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 8

# Every struct that is part of one run carries its `identity`: 16 random hexadecimal digits, made when the run begins.
# Names, incarnations and steps of two runs may be equal; their identities never are. The broker's client writes it.

Experts = NDArray[np.uint8 | np.uint16]
"""[N, layers, experts per token] chosen experts of N tokens: uint8 where a layer has at most 256, else uint16."""


class WeightVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Which weights: compared by incarnation first, then step. Step k turns weights k into weights k + 1."""

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Response tokens [start, end) were sampled by `version`. What an environment said belongs to the version that
    sampled the token before."""

    start: int
    end: int
    version: WeightVersion


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """Response tokens [start, end) were sampled in one turn of an episode."""

    start: int
    end: int
    reward: float
    """What the environment gave for this turn alone."""


class TrajectoryId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """`group:round:sample`. A requeue starts the group's next round; earlier rounds are refused."""

    group: str
    round: int
    sample: int

    def __str__(self) -> str:
        return f"{self.group}:{self.round}:{self.sample}"


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `group` names it for good: the epoch and the position in the epoch's order."""

    group: str
    token_ids: list[int]
    """What the engine continues."""
    text: str
    """The same as text, for reward functions and people."""
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any] = {}
    num_samples: int
    """G, the trajectories wanted."""


class Segment(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A piece of a sample that is being generated, kept so that another worker can go on after it."""

    tid: TrajectoryId
    identity: str = ""
    """Of the run; written when the segment is appended."""
    worker: str = ""
    """Who appended it; written then, too."""
    index: int
    """0, 1, 2 ... within the sample."""
    start: int
    """Response position of the first token: where the segment before ended."""
    tokens: NDArray[np.int32]
    """[N]"""
    behavior_logprobs: NDArray[np.float32]
    """[N], as in a trajectory."""
    loss_mask: NDArray[np.uint8]
    """[N], as in a trajectory. The last token was sampled: what an environment said is kept with what follows it."""
    spans: tuple[VersionSpan, ...]
    """Cover [start, start + N) in order without gaps."""
    turns: tuple[Turn, ...] = ()
    """Those that were gone on from in this segment, in order: what the environment said after each of them is here."""
    experts: Experts | None = None
    """As in a trajectory, its part: of the tokens that were fed to sample these, so [N], from the token before `start`
    on; segment 0 has all of the prompt, [P + N - 1]. None: not recorded."""


class Lease(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The right, until a deadline, to generate one sample. The random token fences late writers."""

    tid: TrajectoryId
    identity: str = ""
    """Of the run."""
    worker: str = ""
    """To whom it was granted."""
    token: str
    ttl_s: float
    prompt: Prompt
    segments: tuple[Segment, ...] = ()
    """What earlier holders have generated, from the first token on without gaps: go on after it."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One finished sample: an episode of one turn, or of several. R response tokens, P prompt tokens.

    The response of several turns has what the model sampled and what the environment said in between, as the model
    read it.
    """

    tid: TrajectoryId
    identity: str = ""
    """Of the run; written when the trajectory is submitted."""
    prompt_tokens: NDArray[np.int32]
    """[P]"""
    response_tokens: NDArray[np.int32]
    """[R]"""
    behavior_logprobs: NDArray[np.float32]
    """[R] natural logarithms, temperature applied, of the policy that sampled each token; 0 where none did."""
    loss_mask: NDArray[np.uint8]
    """[R] 1 where the token was sampled, and is trained; 0 where an environment said it."""
    spans: tuple[VersionSpan, ...]
    """Cover [0, R) in order without gaps."""
    reward: float
    """What the learner optimizes: the weighted sum of `rewards`."""
    rewards: dict[str, float]
    """Each reward function's own score, by name."""
    turns: tuple[Turn, ...] = ()
    """The turns of an episode of several, in order. Empty: the response is one turn."""
    finish_reason: Literal["stop", "length"]
    worker: str
    experts: Experts | None = None
    """[P + R - 1, layers, experts per token] for router replay: what each layer with experts, in order, chose for token
    t of prompt and response when it was fed, in the pass that sampled token t + 1. The last token was never fed. None:
    not recorded."""


class Group(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The trajectories of one prompt that are trained together."""

    prompt: Prompt
    round: int
    trajectories: tuple[Trajectory, ...]


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A token sequence and its logprobs under the published weights: verifies an engine after a swap."""

    token_ids: list[int]
    logprobs: list[float]
    """One for each token after the first, at temperature 1."""
    tolerance: float
    """The mean absolute difference that rounding explains."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Where one named tensor lies: `nbytes` at `offset` in `bucket`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int


class DeltaSpec(msgspec.Struct, frozen=True, array_like=True):
    """What turns the buckets of `base` into those of `version`, losslessly."""

    base: WeightVersion
    version: WeightVersion
    nbytes: int
    digest: str
    """blake2b of the encoded bytes, 16 bytes in hexadecimal."""


class Archived(msgspec.Struct, frozen=True, array_like=True):
    """What of a version lies in the archive too: all of its manifest's deltas, and an anchor, once there is one."""

    anchor: WeightVersion | None
    """A whole version that is the base of one of the deltas."""
    digests: tuple[str, ...]
    """Of each of the anchor's buckets, which are as large as the version's own: blake2b, 16 bytes in hexadecimal."""


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """All an engine needs to receive, verify and name one version of the weights."""

    identity: str = ""
    """Of the run whose version it is; written when it is offered or announced."""
    version: WeightVersion
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[int, ...]
    """Their sizes in bytes: flat runs of bytes on the wire."""
    probe: Probe
    group_epoch: int
    """The broadcast group that this version is sent to; 0: nobody, everyone pulls."""
    pull_url: str
    """Where late joiners fetch the buckets, on the learner's host."""
    pull_token: str
    """Sent back as a bearer token by those who pull."""
    pull_certificate: str = ""
    """The only one that whoever is at `pull_url` may show (PEM); empty: it speaks without TLS."""
    fingerprints: tuple[int, ...] = ()
    """Of each tensor (`weightsync.tensors.fingerprint`): what must arrive, and what an engine that took the version
    holds. An offer has none yet: they follow the last bucket."""
    like: WeightVersion | None = None
    """Of an offer whose `tensors` and `buckets` are those of this version, the announced one: they are left out."""
    deltas: tuple[DeltaSpec, ...] = ()
    """The chain that ends at this version, oldest first, each from the version of the one before; served beside it."""
    archived: Archived | None = None
    """None: it is at `pull_url` only, where all of it is in any case."""


class BroadcastGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Who receives broadcasts. Every change of members is a new epoch with process groups of its own.

    Members [0, at_once) receive first, then [at_once, 2 at_once) and so on: each such wave has a process group of its
    own, where the learner is rank 0 and they follow in order.
    """

    identity: str = ""
    """Of the run; written when the group is stored."""
    epoch: int
    incarnation: int
    transport: str
    """`weights.transport`."""
    meeting: str
    """Where its members and the learner hear of each other (`broker.client.meetings`)."""
    learner: str
    """The learner's address, for those who look for the interface that leads to it."""
    timeout_s: float
    members: tuple[str, ...]
    """Worker ids."""
    at_once: int
    """So many of them are a wave."""


class SampleLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a sample of the run can be at all. None: not known, so not checked."""

    vocabulary: int | None = None
    """Token ids are below it."""
    max_new_tokens: int | None = None
    """Of a response, what an environment said included."""
    experts: tuple[int, int, int] | None = None
    """Layers with experts, experts per token, experts of a layer: of a run that replays what routers chose."""


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model without its weights: config.json, the tokenizer's files. No shared file system is needed."""

    files: dict[str, bytes]
    limits: SampleLimits = SampleLimits()
    """What its samples can be."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself with every heartbeat."""

    identity: str = ""
    """Of the run that it works for; written when it is sent."""
    worker: str
    host: str
    pid: int
    engine: str
    state: Literal["starting", "generating", "idle", "paused", "asleep", "draining"]
    """paused: a version came only in part, over the one before, so it generates nothing until it has a whole one."""
    version: WeightVersion | None
    """The newest that its engine held, verified. One that is asleep or has just woken has lost these, and is given them
    again, or newer ones. None: none yet, or parts of several versions."""
    broadcast_epoch: int
    """The broadcast group that it has joined; 0 while it pulls."""
    wants_broadcast: bool
    """It takes part in broadcast groups as long as it has a version; False for one that follows by pull, or ends."""
    capacity: int
    """Leases that its engine can batch."""
    active: int
    """Leases that it holds now."""
    generated_tokens: int
    submitted: int
    tokens_per_s: float
    swaps: int
    last_error: str = ""


class PoolInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor of a pool of workers says of it."""

    pool: str
    host: str
    pid: int
    """The supervisor's."""
    running: int
    """Worker processes that run and were not asked to leave."""
    leaving: int = 0
    """Worker processes that were asked to hand their work back and leave."""
    restarting: int = 0
    """Workers that failed and are started again after a pause."""
    wanted: int = 0
    """Workers that `scale` asked for last; written when it is read."""


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One learner step, as written to metrics.jsonl and shown live."""

    incarnation: int
    """Of the learner that made the step."""
    step: int
    """0 turns the first weights into version 1."""
    total_steps: int
    """Of the run: `learner.steps`."""
    time_s: float
    """Since this learner started its loop."""
    reward_mean: float
    """Over the trained trajectories."""
    reward_std: float
    """The standard deviation of the same."""
    response_tokens_mean: float
    """Length of a trained response."""
    lag_mean: float
    """Over the trained trajectories: the lag of the oldest trained token."""
    lag_max: int
    """The largest lag of a trained token."""
    lag_histogram: dict[int, int]
    """Trained trajectories by the lag of their oldest trained token."""
    groups: int
    """Groups that the step trained."""
    trajectories: int
    """Samples that the step trained."""
    mixed_version_trajectories: int
    """Those that weights of several versions sampled."""
    trained_tokens: int
    """Response tokens in the loss."""
    packed_tokens: int
    """Prompt and response tokens that went through the model."""
    micro_batches: int
    """Forward and backward passes, over all ranks."""
    loss: float | None
    """None: not finite."""
    grad_norm: float | None
    """None: not finite, so the update was skipped."""
    learning_rate: float
    """The optimizer's, at this step."""
    algorithm: dict[str, float]
    """What the loss reports: ESS, clip and mask fractions, KL."""
    take_s: float
    """Waiting for the batch, and reading it."""
    train_s: float
    """Proximal logprobs, forward and backward passes, updates."""
    publish_s: float
    """Until the weights are gathered and those before are announced: sending them goes on beside the next step."""
    checkpoint_s: float
    """Holding up the loop for a checkpoint."""
    step_s: float
    """The whole step."""


class QueueDepths(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run's groups and samples are now."""

    pool: int
    """Groups fed and not yet admitted."""
    admitted: int
    """Groups admitted since the run began."""
    retry: int
    """Samples waiting for a lease."""
    leased: int
    """Samples that a worker holds."""
    open: int
    """Groups admitted and not yet ready."""
    ready: int
    """Groups whose samples are all there."""
    pinned: int
    """Groups taken and not yet committed."""
    dropped_stale: int
    """Groups dropped over the staleness bound."""
    requeued_stale: int
    """Groups sent back over the staleness bound."""
    expired_leases: int
    fenced: int
    """Late or duplicate submissions refused."""
    rejected: int
    """Samples, segments and prompts that could not be decoded, or that cannot be; see `RunStatus.dead_letters`."""
    payload_bytes: int
    generated_tokens: int = 0
    """Response tokens of all samples accepted since the run began."""
    wasted_tokens: int = 0
    """Response tokens of those refused."""
    resumed_tokens: int = 0
    """Response tokens that were handed on in segments instead of being generated again."""
    discarded_tokens: int = 0
    """Response tokens in segments that could not be used any more."""
    uninformative: int = 0
    """Groups dropped because all their samples got the same reward."""
    trimmed_samples: int = 0
    """Samples that their groups went without."""


class Tallies(msgspec.Struct, frozen=True, kw_only=True):
    """Groups begun against groups trained, since the run began: does training see what was asked for?"""

    dispatched_by_prompt_length: dict[int, int] = {}
    """Groups admitted; the key is the smallest power of two >= the prompt's tokens."""
    trained_by_prompt_length: dict[int, int] = {}
    """Groups committed."""
    dispatched_by_lag: dict[int, int] = {}
    """Leases, by how far the worker's weights were behind the announced ones."""
    trained_by_lag: dict[int, int] = {}
    """Groups committed, by the lag of their oldest token."""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """What was refused: it was not trained, and is generated anew."""

    tid: str
    """Of the sample, or the name of a group whose prompt was damaged."""
    worker: str
    """Who sent it, as far as that is known."""
    reason: str


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a run, for `headway status` and the live display."""

    run: str
    identity: str = ""
    state: str
    incarnation: int
    announced: WeightVersion | None
    queues: QueueDepths
    workers: tuple[WorkerInfo, ...]
    last_step: StepMetrics | None
    recent_steps: tuple[StepMetrics, ...]
    """Oldest first; at most the last 512."""
    tallies: Tallies = Tallies()
    quarantined: tuple[str, ...] = ()
    """Workers that get no more leases, as too many of their samples were refused."""
    dead_letters: tuple[DeadLetter, ...] = ()
    """The newest, oldest first."""
    refused_lately: int = 0
    """Samples refused in the last minute that no honest worker of this run sends; at most the last 1000."""
    refused_workers: int = 0
    """From so many worker processes."""
    pools: tuple[PoolInfo, ...] = ()
    """The pools whose supervisors live, by name."""


class RunRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the broker must know to admit, lease and take; written by the learner when it claims the run."""

    max_lag: int
    groups_per_step: int
    on_straggler: Literal["wait", "trim", "requeue"] = "wait"
    min_group_size: int = 1
    """A group is trimmed to no fewer samples than this."""
    on_over_bound: Literal["requeue", "drop", "mask"] = "requeue"
    max_bytes: int = 1 << 30
    max_leases_per_worker: int = 0
    """0: as many as it asks for."""
    replicas: int = 0
    """So many replicas must have a commit before the learner relies on it."""
    lease_ttl_s: float = 3600.0
    """No lease is given or renewed for longer, whatever a worker asks for."""
    lease_hold_s: float = 86400.0
    """A lease is not renewed any more so long after its sample has got on."""
