"""Everything that crosses a process boundary: frozen structs without behaviour, one schema number.

    __init__.py     the data path: prompts, leases, segments, trajectories and groups, the rules for them; the owner
    weights.py      a version of the weights and its receivers; the model's files
    step_metrics.py a learner step
    agent_measures.py   the names of measures of an agent's episode
    status.py       a snapshot of a run; the reports of workers, scorers and pools

Numpy arrays travel as raw little-endian buffers (see `broker.wire.codec`); everything else is msgpack.

Invariant: a change to a field that older peers cannot read raises SCHEMA_VERSION; peers refuse frames of another number
instead of guessing.
"""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 13

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


class AgentCall(msgspec.Struct, frozen=True, array_like=True):
    """What an agent asked of the model, and was answered by one turn.

    The call's context is what the model read: the first `keeps` tokens of the row of turn `after`, and then the
    response tokens between the end of the turn before in the response and the start of this one.
    """

    after: int
    """The number of the turn on whose row the context begins; -1: on the prompt."""
    keeps: int
    """Tokens of that row that the context begins with: of the prompt, or of that turn's own context with its answer."""
    digest: str = ""
    """Names what was asked, in hexadecimal digits; a repeated call is one of the same digest."""
    attempt: str = ""
    """Names the attempt, of an agent from outside: it knows the episode by this name."""
    conversation: str = ""
    """Names the conversation up to this answer: a later call that repeats it goes on after this turn. "": the agent
    keeps tokens, and no messages."""
    role: Literal["main", "auxiliary"] = "main"
    """auxiliary: it was answered for the agent's own purposes, such as a title, and is not trained."""
    finish_reason: Literal["stop", "length"] = "stop"
    tool_calls: int = 0
    """The tools that the answer calls."""
    waited_s: float = 0.0
    """Seconds between the answer before and this call: of tools, and of the agent itself."""
    sampled_s: float = 0.0
    """Seconds from the call to its answer."""
    unseen: tuple[int, ...] = ()
    """Turns before this one that an agent from outside did not have when the model answered this call."""


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One turn of an episode: the model sampled response tokens [start, end) without an answer in between. (The right
    to swap weights is a swap turn: `broker.client.engine_pauses`.)"""

    start: int
    end: int
    reward: float
    """The environment's reward for this turn alone."""
    call: AgentCall | None = None
    """The agent's call, in an episode that an agent plays: all of its turns have one, and they are a tree
    (`broker.wire.rows`). None: the turn goes on after the turn before, or the prompt."""


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
    messages: list[dict[str, Any]] | None = None
    """The conversation that `text` renders; None for a prompt that is text in its row."""
    ground_truth: Any
    """The right answer, with the type that its row has: text, a number, a list or a mapping."""
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
    each. Of an agent's episode it is all turns of the segment, which are whole."""
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
    """[R] 1 where the token was sampled, and is trained; 0 for an environment's tokens and for auxiliary turns."""
    spans: tuple[VersionSpan, ...]
    """Cover [0, R) in order without gaps."""
    reward: float
    """The reward that the learner optimizes: the weighted sum of `rewards`."""
    rewards: dict[str, float]
    """Each reward function's own score, by name."""
    turns: tuple[Turn, ...] = ()
    """The turns of an episode that has several or that an agent plays, in order. Empty: the whole response is one
    turn."""
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


@dataclass(frozen=True)
class Owner:
    """One learner's hold on the run; refused once another one has claimed it."""

    incarnation: int
    token: str


@dataclass(frozen=True)
class CheckpointMark:
    """The checkpoint that a learner starts from; (0, 0) for a fresh start. Step N contains the steps < N."""

    incarnation: int
    """The checkpoint's incarnation, or a later one that its learners know of. The next one is above it, even on a
    server that has forgotten it."""
    step: int


@dataclass(frozen=True)
class CheckpointGroups:
    """The groups that a checkpoint contains: all below the watermark, and those named."""

    watermark: str
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Claim:
    """The state in which a learner finds a run that it takes over."""

    owner: Owner
    identity: str
    """The run's identity."""
    highest_announced: int | None
    """The step of the newest announced weights; None if no weights were ever announced."""
    committed_step: int = 0
    """All steps below this one were committed before."""
    is_rewound: bool = False
    """Whether the run has forgotten the steps that were committed from the checkpoint's step on."""
