"""Everything that crosses a process boundary: frozen structs without behaviour, one schema number.

Numpy arrays travel as raw little-endian buffers (see `broker.wire.codec`); everything else is msgpack. A change to
a field that older peers cannot read raises SCHEMA_VERSION; peers refuse frames of another number instead of
guessing.
"""

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 11

# Every struct that is part of one run carries its `identity`: 16 random hexadecimal digits, made when the run begins.
# Names, incarnations and steps of two runs may be equal; their identities never are. The broker's client writes it.

Experts = NDArray[np.uint8 | np.uint16]
"""[N, layers, experts per token] chosen experts of N tokens: uint8 where a layer has at most 256, else uint16."""


class WeightVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A version of the weights: compared by incarnation first, then step. Step k turns weights k into weights k + 1."""

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Response tokens [start, end) were sampled by `version`. Tokens of an environment's answer belong to the version
    that sampled the token before."""

    start: int
    end: int
    version: WeightVersion


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One turn of an episode: the model sampled response tokens [start, end) without an answer in between. (The right
    to swap weights is a swap turn: `broker.client.turns`.)"""

    start: int
    end: int
    reward: float
    """The environment's reward for this turn alone."""


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
    """The tokens that the engine continues."""
    text: str
    """The same as text, for reward functions and people."""
    ground_truth: str
    """The right answer, as reward functions read it."""
    data_source: str
    """The data set that it comes from."""
    extra_info: dict[str, Any] = {}
    """The other fields of its row."""
    num_samples: int
    """G, the trajectories wanted."""


class Segment(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A piece of a sample that is being generated, kept so that another worker can go on after it."""

    tid: TrajectoryId
    identity: str = ""
    """The run's identity, written when the segment is appended."""
    worker: str = ""
    """The worker that appended it, written at the same time."""
    index: int
    """The segment's number within the sample, from 0."""
    start: int
    """Response position of the first token: where the previous segment ended."""
    tokens: NDArray[np.int32]
    """[N]"""
    behavior_logprobs: NDArray[np.float32]
    """[N], as in a trajectory."""
    loss_mask: NDArray[np.uint8]
    """[N], as in a trajectory. The last token was sampled: an environment's answer goes into the next segment, with the
    tokens that follow it."""
    spans: tuple[VersionSpan, ...]
    """Cover [start, start + N) in order without gaps."""
    turns: tuple[Turn, ...] = ()
    """The turns after which the episode went on in this segment, in order: it contains the environment's answer to
    each."""
    experts: Experts | None = None
    """The segment's part of a trajectory's `experts`: of the tokens that were fed to sample these, so [N], from the
    token before `start` on; segment 0 has all of the prompt, [P + N - 1]. None: not recorded."""


class Lease(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The right, until a deadline, to generate one sample. The random token fences late writers."""

    tid: TrajectoryId
    identity: str = ""
    """The run's identity."""
    worker: str = ""
    """The worker to which it was granted."""
    token: str
    ttl_s: float
    prompt: Prompt
    segments: tuple[Segment, ...] = ()
    """The segments of earlier holders, from the first token on without gaps: the worker goes on after them."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One finished sample: an episode of one turn, or of several. R response tokens, P prompt tokens.

    The response of several turns contains the sampled tokens and, between them, the environment's answers as the model
    read them.
    """

    tid: TrajectoryId
    identity: str = ""
    """The run's identity, written when the trajectory is submitted."""
    prompt_tokens: NDArray[np.int32]
    """[P]"""
    response_tokens: NDArray[np.int32]
    """[R]"""
    behavior_logprobs: NDArray[np.float32]
    """[R] natural logarithms, temperature applied, of the policy that sampled each token; 0 for an environment's
    tokens."""
    loss_mask: NDArray[np.uint8]
    """[R] 1 where the token was sampled, and is trained; 0 for an environment's tokens."""
    spans: tuple[VersionSpan, ...]
    """Cover [0, R) in order without gaps."""
    reward: float
    """The reward that the learner optimizes: the weighted sum of `rewards`."""
    rewards: dict[str, float]
    """Each reward function's own score, by name."""
    turns: tuple[Turn, ...] = ()
    """The turns of an episode that has several, in order. Empty: the whole response is one turn."""
    finish_reason: Literal["stop", "length"]
    worker: str
    experts: Experts | None = None
    """[P + R - 1, layers, experts per token] for router replay: the experts that each layer with experts, in order,
    chose for token t of prompt and response when it was fed, in the pass that sampled token t + 1. The last token was
    never fed. None: not recorded."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """[R] natural logarithms, at the sampling temperature, of the probability that a teacher gives each sampled token;
    0 for an environment's tokens. None: no teacher was asked."""
    candidate_tokens: NDArray[np.int32] | None = None
    """[R, K] the K tokens of the policy's vocabulary that the teacher finds likeliest in the place of each sampled
    token, the likeliest first; 0 in the place of an environment's tokens. None: the teacher was asked for none."""
    candidate_logprobs: NDArray[np.float32] | None = None
    """[R, K] the teacher's logprobs of these, as `teacher_logprobs`."""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Tokens that a scorer is to score. P prompt tokens, R response tokens.

    A reward model answers with one float32, a teacher with [R] float32: the natural logarithm of each response token's
    probability at `temperature`. Where a teacher is asked for K = `top_k` candidates, it answers with [R, 1 + 2K]
    float32: that logarithm, the K likeliest tokens in this place, the likeliest first, and their logarithms. Token ids
    are below 2^24, which float32 holds exactly.
    """

    identity: str = ""
    """The run's identity, written when the request is sent."""
    prompt_tokens: NDArray[np.int32]
    """[P]"""
    response_tokens: NDArray[np.int32]
    """[R] every token after the prompt, as the policy sampled or read it."""
    temperature: float = 1.0
    """The divisor of the logits at which the response was sampled."""
    top_k: int = 0
    """K, the candidates that a teacher is to name in each place."""


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
    """As of a WeightManifest."""


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
    """The name of the meeting of its members and the learner (`broker.client.meetings`)."""
    learner: str
    """The learner's address, by which a member finds the network interface that leads to it."""
    timeout_s: float
    members: tuple[str, ...]
    """The names of the workers."""
    at_once: int
    """Members of one wave."""


class SampleLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of a possible sample of the run. None: not known, so not checked."""

    vocabulary: int | None = None
    """The number of token ids."""
    max_new_tokens: int | None = None
    """The most tokens of a response, those of an environment included."""
    experts: tuple[int, int, int] | None = None
    """(layers with experts, experts per token, experts of a layer) where the run replays routers' choices."""
    has_teacher: bool = False
    """Whether the run learns from a teacher, whose logprobs every sample then has."""
    candidates: int | None = None
    """Candidates of the teacher that every sample has in each place; 0: none."""


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model without its weights: config.json, the tokenizer's files. No shared file system is needed."""

    files: dict[str, bytes]
    limits: SampleLimits = SampleLimits()
    """The bounds of its samples."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's report of itself, sent with every heartbeat."""

    identity: str = ""
    """The identity of the run that it works for, written when the report is sent."""
    worker: str
    host: str
    pid: int
    engine: str
    state: Literal["starting", "generating", "idle", "paused", "asleep", "draining"]
    """`paused`: a version has overwritten the previous one and came only in part, so the worker generates nothing until
    it has a whole one."""
    version: WeightVersion | None
    """The newest verified version that its engine held. An engine that is asleep or has just woken has lost it, and
    gets it again, or a newer one. None: no version yet, or parts of several."""
    broadcast_epoch: int
    """The broadcast group that it has joined; 0 while it pulls."""
    wants_broadcast: bool
    """Whether it joins broadcast groups as long as it has a version; False if it follows by pull, or is about to
    end."""
    capacity: int
    """Leases that its engine can batch."""
    active: int
    """Leases that it holds now."""
    generated_tokens: int
    submitted: int
    tokens_per_s: float
    swaps: int
    last_error: str = ""
    silent_s: float = 0.0
    """For how long its engine has had requests and made no token."""
    busy_s: float = 0.0
    """Seconds in which its engine has had requests, and weights to sample them with."""
    slot_s: float = 0.0
    """The sum of these seconds over all requests."""
    broker_calls: int = 0
    """Calls to the broker that were answered since the worker began."""
    broker_s: float = 0.0
    """The sum of the times until they were answered, of which some overlap."""
    swap_s: float = 0.0
    """The time of its swaps so far, with their checks; of a version that arrives in parts, until it is there."""
    paused_s: float = 0.0
    """The time for which it has been `paused` so far."""


class ScorerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A scorer process's report of itself."""

    process: str
    """Its name, new for every process."""
    scorer: str
    """The scorer whose requests it answers: the name of a reward, or `teacher`."""
    kind: str
    host: str
    pid: int
    state: Literal["loading", "ready", "draining"]
    device: str
    held: int = 0
    """Requests that it has leased."""
    scored: int = 0
    """Requests that it has answered."""
    tokens_per_s: float = 0.0
    """Prompt and response tokens that it scored in each second in which it had some to score."""
    last_error: str = ""


class PoolInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A supervisor's report of its pool of workers."""

    pool: str
    host: str
    pid: int
    """The supervisor's process id."""
    running: int
    """Worker processes that run and were not asked to leave."""
    leaving: int = 0
    """Worker processes that were asked to hand their work back and leave."""
    restarting: int = 0
    """Workers that failed and are started again after a pause."""
    given_up: int = 0
    """Workers that are not started again, because their version of Headway is not the learner's."""
    ended_s: dict[str, float] = {}
    """The processes that ended last, and the seconds since; each by the tag at the end of its worker's name."""
    wanted: int = 0
    """Workers that `scale` asked for last; written when the report is read."""


class LagFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures of one bucket of lag in one step; a figure is None where nothing of that lag has it."""

    trajectories: int
    """Trajectories whose oldest trained token is of this lag."""
    tokens: int
    """Trained tokens of this lag."""
    reward_mean: float | None = None
    """The mean reward of these trajectories."""
    ratio_mean: float | None = None
    """The mean ratio of the learner's policy to the sampler's, over these tokens."""
    ess: float | None = None
    """The effective sample size of these tokens as a share of them: 1 where the policies agree."""
    clip_fraction: float | None = None
    """The share of these tokens that the objective clipped; None: it clips nothing."""
    mask_fraction: float | None = None
    """The share of these tokens that corrections masked."""
    reverse_kl: float | None = None
    """The mean of log policy - log teacher over these tokens, of distillation."""


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one learner step, as written to metrics.jsonl and shown live."""

    incarnation: int
    """The incarnation of the learner that made the step."""
    step: int
    """The step's number: step 0 turns the first weights into version 1."""
    total_steps: int
    """The steps of the run: `learner.steps`."""
    time_s: float
    """The time since this learner started its loop."""
    reward_mean: float
    """The mean reward of all trajectories of the step's groups."""
    reward_std: float
    """The standard deviation of the same rewards."""
    flat_groups: float | None = None
    """The share of the step's groups whose samples all got the same reward; None: an earlier version of Headway wrote
    the line."""
    response_tokens_mean: float
    """The mean length of a trained response."""
    lag_mean: float
    """The lag of a trained trajectory's oldest trained token, averaged over the trajectories."""
    lag_max: int
    """The largest lag of a trained token."""
    lag_histogram: dict[int, int]
    """Trained trajectories by the lag of their oldest trained token."""
    token_lag_histogram: dict[int, int] = {}
    """Trained tokens by their lag."""
    response_length_histogram: dict[int, int] = {}
    """Trained samples by the tokens of their response, up to a power of two."""
    by_lag: dict[int, LagFigures] = {}
    """Figures of each lag that was trained: rewards, ESS, shares clipped and masked. The key is the largest lag of a
    bucket: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512 or 1000. Only buckets that occur are there."""
    groups: int
    """Groups that the step trained."""
    trajectories: int
    """Samples that the step trained."""
    untrained_trajectories: int = 0
    """Further samples of the step's groups, which a loss of pairs leaves out."""
    mixed_version_trajectories: int
    """Trained samples that weights of several versions sampled."""
    trained_tokens: int
    """Response tokens in the loss."""
    packed_tokens: int
    """Prompt and response tokens that went through the model."""
    micro_batches: int
    """Forward and backward passes, over all replicas of the model."""
    packing_efficiency: float | None = None
    """The share of `learner.micro_batch_tokens` that the mean micro-batch filled; tokens that are computed once count
    once. It is above 1 where sequences are longer than that."""
    loss: float | None
    """The loss; None: it was not finite."""
    grad_norm: float | None
    """The norm of the gradient; None: it was not finite, so the update was skipped."""
    learning_rate: float
    """The optimizer's learning rate at this step."""
    algorithm: dict[str, float]
    """The metrics of the loss: ESS, clip and mask fractions, KL."""
    waited_mean_s: float | None = None
    """For how long the step's groups waited for the learner once they were ready, in the mean; None: the batch came
    from the log."""
    waited_max_s: float | None = None
    """The longest of these times."""
    broker_calls: int = 0
    """Calls of the learner to the broker that were answered since the step before."""
    broker_s: float = 0.0
    """The sum of the times until they were answered."""
    take_s: float
    """The time to wait for the batch and read it."""
    train_s: float
    """The time for packing, proximal logprobs, forward and backward passes, and updates."""
    publish_s: float
    """The time until the weights are gathered and the previous ones announced; they are sent beside the next step."""
    checkpoint_s: float
    """The time for which a checkpoint held up the loop."""
    step_s: float
    """The time of the whole step."""


class QueueDepths(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the run's groups and samples in each state."""

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
    """Samples, segments and prompts that could not be decoded or are impossible; see `RunStatus.dead_letters`."""
    payload_bytes: int
    generated_tokens: int = 0
    """Response tokens of all samples accepted since the run began."""
    wasted_tokens: int = 0
    """Response tokens of refused samples."""
    resumed_tokens: int = 0
    """Response tokens that were handed on in segments instead of being generated again."""
    discarded_tokens: int = 0
    """Response tokens in segments that could not be used any more."""
    uninformative: int = 0
    """Groups dropped because all their samples got the same reward."""
    trimmed_samples: int = 0
    """Samples that their groups went without."""
    copied_leases: int = 0
    """Leases of samples beside another worker's, which did not get on with them."""
    skipped_evaluations: int = 0
    """Evaluations by workers that gave no result, as no worker kept their version until all samples were done."""


class QueueAges(msgspec.Struct, frozen=True, kw_only=True):
    """For how long groups and samples have been in their state, by the server's clock; None where there is none."""

    oldest_ready_s: float | None = None
    """The longest time for which a ready group has waited for the learner."""
    mean_ready_s: float | None = None
    """The mean of that time over the ready groups, or over an even sample of more than 512 of them."""
    oldest_lease_s: float | None = None
    """The longest time since a leased sample was leased, or was saved as a segment."""
    next_sample_s: float | None = None
    """For how long the group of the sample that is leased next has been offered to workers."""


class ScoringQueue(msgspec.Struct, frozen=True, kw_only=True):
    """The requests for one scorer."""

    scorer: str
    waiting: int
    """Requests that are not answered, and that no scorer has leased."""
    leased: int
    """Requests that a scorer has leased and not answered."""
    oldest_s: float
    """For how long the oldest of all these has waited; 0: there is none."""
    answered: int
    failed: int
    """Requests that several scorers could not answer."""
    expired_leases: int
    bytes: int
    """Bytes of requests and answers that the server holds, with those that were not collected."""


class Tallies(msgspec.Struct, frozen=True, kw_only=True):
    """Groups begun and trained, and samples ended, since the run began, by length and lag, to see whether training
    favours some. A length is the smallest power of two that is at least the number of tokens."""

    dispatched_by_prompt_length: dict[int, int] = {}
    """Groups admitted, by the prompt's tokens."""
    trained_by_prompt_length: dict[int, int] = {}
    """Groups committed."""
    dispatched_by_lag: dict[int, int] = {}
    """Leases, by how far the worker's weights were behind the announced ones."""
    resumed_by_lag: dict[int, int] = {}
    """Tokens of samples that a worker continued, by the lag that each token had when the sample was leased."""
    trained_by_lag: dict[int, int] = {}
    """Groups committed, by the lag of their oldest token."""
    finished_by_response_length: dict[int, int] = {}
    """Samples that workers finished, by the response's tokens: those that were refused as late or too old, too."""
    cut_by_response_length: dict[int, int] = {}
    """Samples whose segments were given up before they were finished, by the tokens that were saved until then."""


class Silence(msgspec.Struct, frozen=True):
    """Seconds since a living worker was last heard of, by the server's clock."""

    heard_s: float
    """The time since its last heartbeat."""
    is_late: bool
    """Whether it missed heartbeats: it is dead, stands still or is cut off, and counts as alive a little longer."""
    has_ended: bool = False
    """Whether its supervisor says that its process ended, and nothing was heard of it since: it is dead."""


class VersionGroups(msgspec.Struct, frozen=True):
    """Groups of one weight version: it is the oldest one that has sampled a token of them."""

    step: int
    """The step of the version's weights."""
    generating: int
    ready: int
    dropped: int
    """Groups that were dropped: over the bound on lag, or because all their rewards were the same."""
    ready_samples: int = 0
    """Samples of ready groups whose oldest token this version sampled; of more than 512 ready groups an estimate."""
    ready_tokens: int = 0
    """Response tokens of ready groups that this version sampled; of more than 512 ready groups an estimate."""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A sample, segment or prompt that was refused: it was not trained, and is generated anew."""

    tid: str
    """The sample's id, or the name of a group whose prompt was damaged."""
    worker: str
    """The worker that sent it, if that is known."""
    reason: str


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker was set aside, as it or its supervisor says: words for people, on which no decision rests.

    Processes of other versions write and read it, so its fields never change their meaning.
    """

    worker: str
    host: str
    rule: str
    """The rule that it broke, such as `version`."""
    reason: str
    """The figures and their limits, and what mends it."""
    at: float
    """Seconds since 1970, by the clock of its host."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a run, for `headway status` and the live display."""

    run: str
    identity: str = ""
    state: str
    incarnation: int
    announced: WeightVersion | None
    queues: QueueDepths
    ages: QueueAges = QueueAges()
    workers: tuple[WorkerInfo, ...]
    last_step: StepMetrics | None
    recent_steps: tuple[StepMetrics, ...]
    """Oldest first; at most the last 512."""
    tallies: Tallies = Tallies()
    quarantined: tuple[str, ...] = ()
    """Workers that get no more leases, as too many of their samples were refused."""
    dead_letters: tuple[DeadLetter, ...] = ()
    """The newest dead letters, the oldest of them first."""
    refused_lately: int = 0
    """Samples refused in the last minute that no honest worker of this run sends; at most the last 1000 are counted."""
    refused_workers: int = 0
    """Worker processes that sent them."""
    pools: tuple[PoolInfo, ...] = ()
    """The pools whose supervisors are alive, sorted by name."""
    faults: tuple[Fault, ...] = ()
    """The newest faults of workers in the last hour, the oldest of them first."""
    silences: dict[str, Silence] = {}
    """By worker."""
    scorers: tuple[ScorerInfo, ...] = ()
    """The scorer processes that are alive."""
    scoring: tuple[ScoringQueue, ...] = ()
    """The requests of each scorer that workers ask."""
    versions: tuple[VersionGroups, ...] = ()
    """Those of the last 32 weight versions that have groups, the newest first."""


class RunRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules by which the broker admits, leases and takes; the learner writes them when it claims the run."""

    max_lag: int
    groups_per_step: int
    ahead: float | None = None
    """Steps of groups that are admitted beyond those of the next step; None: `max_lag`."""
    on_straggler: Literal["wait", "trim", "requeue"] = "wait"
    min_group_size: int = 1
    """A group is trimmed to no fewer samples than this."""
    on_over_bound: Literal["requeue", "drop", "mask"] = "requeue"
    max_bytes: int = 1 << 30
    max_leases_per_worker: int = 0
    """The most leases of one worker; 0: as many as it asks for."""
    replicas: int = 0
    """Replicas that must have a commit before the learner relies on it."""
    lease_ttl_s: float = 3600.0
    """The longest time for which a lease is given or renewed, even if a worker asks for more."""
    lease_hold_s: float = 86400.0
    """A lease without a new segment for so long is not renewed any more."""
    scorers: str = ""
    """The names of the run's scorers, a space between two: workers may ask no others."""
    segment_s: float = 0.0
    """Workers store the new tokens of a running sample about so often; 0: not by time."""
