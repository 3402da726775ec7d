"""A snapshot of a run: its queues, tallies and versions, with the reports of its processes."""

from typing import Literal

import msgspec

from . import WeightVersion
from .step_metrics import StepMetrics


class AgentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's report of the episodes that agents play on it, those of evaluations too. All sums are since the worker
    began, and of episodes that have left it: played to their end, failed, or handed back."""

    episodes: int = 0
    """Episodes that are open now."""
    running_requests: int = 0
    """Calls of the model that are being answered now."""
    waiting_for_tools: int = 0
    """Open episodes that have a turn behind them and ask nothing of the model now: their tools or agents work."""
    finished: int = 0
    """Episodes that were played to their end and scored, with those that failed and got 0."""
    finished_turns: int = 0
    """Turns of finished episodes, with those that earlier workers sampled."""
    turns: int = 0
    """Turns that this worker sampled."""
    tool_s: float = 0.0
    """Seconds in which episodes asked nothing of the model, summed up."""
    read_tokens: int = 0
    """Tokens that the model read after a prompt: messages, answers of tools, and what forks read."""
    sampled_tokens: int = 0
    forks: int = 0
    """Turns whose conversation does not go on from the tokens of an earlier one: its history was rewritten, or a
    subagent began one."""
    reread_tokens: int = 0
    """Tokens that forks read after the place where they break off."""
    unseen_turns: int = 0
    """Turns that are not trained, as the agent never got them, or did not ask for them when it was run again."""
    resumed_calls: int = 0
    """Calls that were answered with a turn of an earlier attempt."""
    repeated_calls: int = 0
    """Calls that were answered with a turn of the same attempt: a client had lost its answer."""
    lost_calls: int = 0
    """Calls that an earlier worker had not answered when it was lost."""
    restarted: int = 0
    """Episodes that began anew, as their agent cannot repeat what it did."""
    over_budget: int = 0
    """Calls for which the episode had no turn or token left."""
    turn_timeouts: int = 0
    """Calls without an answer within `agent.turn_s`."""
    failures: dict[str, int] = {}
    """Failed episodes by reason: `raised`, `timeout` (over `agent.episode_s`), `lost` (the agent's process ended),
    `no_turn` (nothing can be trained), `no_reward`."""
    refused_calls: dict[str, int] = {}
    """Requests to the endpoint that got an error, by reason: its kind, such as `busy` or `ended`, or the field that
    cannot be honoured, such as `temperature`."""


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
    agent: AgentInfo | msgspec.UnsetType = msgspec.UNSET
    """The episodes that agents play; absent in a run without an agent."""


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
    working: int = 0
    """Those of them that have reported a lease, or a version with which they take one."""
    leaving: int = 0
    """Worker processes that were asked to hand their work back and leave."""
    restarting: int = 0
    """Workers that failed and are started again after a pause."""
    given_up: int = 0
    """Workers that are not started again, because their version of Headway is not the learner's."""
    restarts: int = 0
    """Processes that this supervisor has started in the place of others that ended."""
    ended_s: dict[str, float] = {}
    """The processes that ended last, and the seconds since; each by the tag at the end of its worker's name."""
    wanted: int = 0
    """Workers that `scale` asked for last; written when the report is read."""


class Silence(msgspec.Struct, frozen=True):
    """Seconds since a living worker was last heard of, by the server's clock."""

    heard_s: float
    """The time since its last heartbeat."""
    is_late: bool
    """Whether it missed heartbeats: it is dead, stands still or is cut off, and counts as alive a little longer."""
    has_ended: bool = False
    """Whether its supervisor says that its process ended, and nothing was heard of it since: it is dead."""


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
    """Groups dropped by `algorithm.dynamic_sampling`: nothing could be learned by comparing their samples."""
    trimmed_samples: int = 0
    """Samples that their groups went without."""
    copied_leases: int = 0
    """Leases of samples beside another worker's, which did not get on with them."""
    skipped_evaluations: int = 0
    """Evaluations by workers that gave no result, as no worker kept their version until all samples were done."""
    worker_restarts: int = 0
    """Processes that the supervisors of all pools have started in the place of others that ended."""


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


class VersionGroups(msgspec.Struct, frozen=True):
    """Groups of one weight version: it is the oldest one that has sampled a token of them."""

    step: int
    """The step of the version's weights."""
    generating: int
    ready: int
    dropped: int
    """Groups that were dropped: over the bound on lag, or by `algorithm.dynamic_sampling`."""
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
