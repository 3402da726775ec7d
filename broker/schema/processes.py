"""Reports of processes: of workers, scorers and pools on themselves, and of workers that fell silent or failed."""

from typing import Literal

import msgspec

from . import WeightVersion


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
