"""The status of a run: its state, its workers, its last steps, what the next step waits for, and which runs there are.

A look at the next step costs the server a few reads, however many groups the run has.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace
from redis.exceptions import NoPermissionError

from headway.broker.connection.connection import Connection, pairs, text
from headway.broker.connection.function_library import Verbs
from headway.broker.errors import BrokerError, FrameError, RunNotFoundError
from headway.broker.keys import RUNS, check_name, is_name
from headway.broker.schema import Lease, Owner
from headway.broker.schema.status import (
    DeadLetter,
    PoolInfo,
    QueueAges,
    QueueDepths,
    RunStatus,
    ScorerInfo,
    ScoringQueue,
    Silence,
    Tallies,
    VersionGroups,
    WorkerInfo,
)
from headway.broker.schema.step_metrics import StepMetrics
from headway.broker.wire.codec import decode, encode

from .leases import members
from .supervision import announced_version, read_faults
from .weights import put_blob

_KEPT_STEPS = 512
_ERROR_CHARACTERS = 2000
_WARNINGS = 100
"""The most complaints about unreadable reports that a client keeps: a worker that sends one may send many."""

_SESSION_MS = 120_000
"""Milliseconds that a session lasts after a heartbeat: see `heartbeat` in workers.lua."""
_LARGEST = 1e15
"""The bound of figures in a report."""
_LATE = 0.5
"""A worker is late after this share of the time for which a heartbeat keeps it alive; it sends several in that time."""

T = TypeVar("T", bound=msgspec.Struct)
log = logging.getLogger(__name__)


class HeartbeatReply(NamedTuple):
    """The server's answer to a worker's report."""

    must_drain: bool
    """Whether `exclude` asked the worker to drain."""
    state: str
    """The state of the run; "absent" where no learner has claimed it yet."""
    serving: int
    """The workers that have weights and do not drain, this one included; a killed one counts until a swap begins."""
    lost: frozenset[str]
    """The tokens of lost leases, whose generation must stop."""


class StatusVerbs:
    """The facts that displays show and no decision rests on."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unreadable: set[str] = set()
        """The reports that this client has complained about."""
        self._beats = set[asyncio.Task[Any]]()
        """The heartbeats on their way, also those that their callers gave up."""

    async def config(self) -> bytes | None:
        """Returns the resolved recipe that the learner stored when it claimed the run; None where no learner whose
        functions this client can call has claimed it yet.

        Raises ForeignRunError, and SchemaMismatchError where the learner is of another version of Headway.
        """
        keys = self._connection.keys
        identity, verbs, blob = await self._connection.execute("MGET", keys("identity"), keys.verbs, keys("config"))
        self._connection.check_identity(identity.decode() if identity else "")
        if verbs is None or blob is None:
            return None
        Verbs.read(verbs, self._connection.run)
        return bytes(blob)

    async def heartbeat(
        self, info: WorkerInfo, ttl_s: float, leases: Sequence[Lease] = (), lease_ttl_s: float = 0.0
    ) -> HeartbeatReply:
        """Reports that a worker is alive for so long, and moves the deadlines of its leases. Raises ForeignRunError,
        and BrokerError for an invalid name or a report that is refused; leases are renewed then, too."""
        check_name(info.worker, "worker")
        if not self._connection.identity:
            await self._connection.join()
        info = replace(info, identity=self._connection.identity, last_error=_storable(info.last_error))
        serves = info.version is not None and info.state != "draining"
        said = (info.worker, self._connection.session, int(1000 * ttl_s), encode(info), int(serves), lease_ttl_s)
        beat = asyncio.create_task(
            self._connection.script("heartbeat", *said, *members(leases), absent=[1, b"absent", 1])
        )
        self._beats.add(beat)
        beat.add_done_callback(self._forget)
        standing, state, serving, *lost = await asyncio.shield(beat)
        if standing == 0:
            self._warn_once(f"name {info.worker}", f"Another worker {info.worker} is alive: this one is not listed.")
        return HeartbeatReply(standing == 2, state.decode(), serving, frozenset(token.decode() for token in lost))

    async def exclude(self, worker: str, manner: Literal["drain", "quarantine"]) -> bool:
        """Asks a living worker to hand its work back and leave, or lets it have no more leases.

        It holds for that process only. Returns False where no worker of that name is alive. Needs the learner's user.
        """
        return bool(await self._connection.script("exclude", check_name(worker, "worker"), manner, absent=0))

    async def leave(self, worker: str) -> None:
        """Takes a worker that stops on purpose off the list of workers at once."""
        if self._beats:  # a late heartbeat would put it back on the list
            await asyncio.wait(self._beats)
        await self._connection.script("leave", worker, self._connection.session, absent=None)

    def _forget(self, beat: asyncio.Task[Any]) -> None:
        self._beats.discard(beat)
        if not beat.cancelled():
            beat.exception()  # a caller that still waits for it has been told

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Returns the live workers by name, without those of another schema version and without unreadable reports."""
        return self._heard(await self._connection.script("workers", absent=[]))

    def _heard(self, flat: Sequence[bytes]) -> tuple[WorkerInfo, ...]:
        heard = self._readable_ones(_frames(flat), WorkerInfo, "worker")
        return tuple(info for name, info in heard.items() if self._is_of(name, info))

    def _pools(self, flat: Sequence[Any]) -> tuple[PoolInfo, ...]:
        """Returns the pools of {name, frame, workers wanted...}, without unreadable reports."""
        wanted = dict(zip(map(text, flat[::3]), flat[2::3], strict=True))
        heard = self._readable_ones(dict(zip(wanted, flat[1::3], strict=True)), PoolInfo, "pool")
        return tuple(replace(info, wanted=wanted[name]) for name, info in heard.items())

    def _scorers(self, flat: Sequence[bytes]) -> tuple[ScorerInfo, ...]:
        """Returns the scorers of {name, frame...}, without unreadable reports."""
        return tuple(self._readable_ones(_frames(flat), ScorerInfo, "scorer").values())

    def _is_of(self, name: str, info: WorkerInfo) -> bool:
        if info.worker != name:
            self._warn_once(name, f"Worker {name} is passed over: it reports as {info.worker[:200]!r}.")
        return info.worker == name

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._unreadable and len(self._unreadable) < _WARNINGS:
            self._unreadable.add(what)
            log.warning("%s", text)

    def _readable_ones(self, frames: Mapping[str, bytes], kind: type[T], what: str) -> dict[str, T]:
        """Returns the reports that can be read, by name, and complains of the new ones that cannot in one line."""
        heard, wrong = dict[str, T](), list[str]()
        for name, frame in frames.items():
            try:
                report = decode(frame, kind)
                if kind is not StepMetrics:  # those are the learner's own, and may have losses that are not finite
                    _check_figures(report)
                heard[name] = report
            except FrameError as error:
                wrong.append(f"{what} {name} is passed over, its report cannot be read: {error}")
        if wrong:
            more = f" And so are {len(wrong) - 1} more." if len(wrong) > 1 else ""
            self._warn_once(what, f"{wrong[0]}{more}")
        return heard

    async def report_step(self, owner: Owner, metrics: StepMetrics) -> None:
        """Adds a step to the last 512."""
        await put_blob(self._connection, owner, "steps", encode(metrics), keep=_KEPT_STEPS)

    async def state(self) -> str:
        """Returns the state of the run; "absent" where no learner has claimed it yet."""
        state, *_ = await self._connection.script("peek", absent=[None])
        return state.decode() if state else "absent"

    async def set_state(self, owner: Owner, state: str) -> None:
        """Sets the state: claimed, warming up, training, finished or stopped."""
        await self._connection.learner_script("state", owner, state)

    async def snapshot(self, *, any_identity: bool = False) -> RunStatus:
        """Returns everything in one look. Raises RunNotFoundError, which lists the server's runs.

        With `any_identity` it shows the run that has the name now: for a display that goes on when a run is
        overwritten.
        """
        if any_identity:
            self._connection.identity = ""
        reply = await self._connection.script("snapshot", absent=None)
        meta = dict(pairs(reply[0])) if reply else {}
        if "state" not in meta:
            raise RunNotFoundError(
                f"No run {self._connection.run} at {self._connection.url}. Runs there: {await self.runs_for_people()}."
            )
        _, tally, sizes, frames, workers, quarantined, letters, refused, pools, versions, lifetimes, ages, scoring = (
            reply
        )
        refused_lately, refused_workers = refused
        heard_pools = self._pools(pools)
        steps = tuple(
            self._readable_ones({str(n): frame for n, frame in enumerate(frames)}, StepMetrics, "step").values()
        )
        return RunStatus(
            run=self._connection.run,
            identity=self._connection.identity,
            state=meta["state"],
            incarnation=int(meta["incarnation"]),
            announced=announced_version(meta),
            queues=_queues(meta, sizes),
            ages=_ages(ages),
            workers=self._heard(workers),
            last_step=steps[-1] if steps else None,
            recent_steps=steps,
            tallies=_tallies(tally),
            quarantined=tuple(sorted(set(map(text, quarantined)))),
            dead_letters=tuple(
                DeadLetter(tid=tid, worker=worker, reason=reason)
                for tid, worker, reason in (map(text, letter) for letter in reversed(letters))
            ),
            refused_lately=refused_lately,
            refused_workers=refused_workers,
            pools=heard_pools,
            faults=await read_faults(self._connection),
            silences=_silences(lifetimes, heard_pools),
            scorers=self._scorers(scoring[0]),
            scoring=tuple(_scoring_queue(*entry) for entry in scoring[1:]),
            versions=tuple(VersionGroups(*counts) for counts in versions),
        )

    async def runs(self) -> tuple[str, ...]:
        """Returns the names of all runs on this server."""
        names = map(text, await self._connection.execute("SMEMBERS", RUNS))
        return tuple(sorted(filter(is_name, names)))

    async def runs_for_people(self) -> str:
        """Returns the names in one line, or a remark where this user may not ask for them."""
        try:
            return ", ".join(await self.runs()) or "none"
        except BrokerError as error:
            if isinstance(error.__cause__, NoPermissionError):
                return "our user may not list them"
            raise

    async def delete_run(self) -> int:
        """Removes everything of this run, and returns the number of keys."""
        keys = self._connection.keys
        names = await self._connection.scan(f"{keys.prefix}*")
        names += await self._connection.scan(keys.blob("*/*"))
        verbs = await self._connection.execute("GET", keys.verbs)
        # This first: from then on every verb of a learner still alive is refused.
        await self._connection.execute("UNLINK", keys("owner"), keys("identity"), keys("secret"), keys.verbs)
        if verbs:
            await self._connection.unload_verbs(verbs.decode().partition(" ")[2])
        for start in range(0, len(names), 1000):
            await self._connection.pipeline([("UNLINK", name) for name in names[start : start + 1000]])
        await self._connection.execute("SREM", RUNS, self._connection.run)
        return len(names)


def _frames(flat: Sequence[bytes]) -> dict[str, bytes]:
    """Returns the frames of {name, frame...}, by name, without those of names that no process can have."""
    named = ((text(name), frame) for name, frame in zip(flat[::2], flat[1::2], strict=True))
    return {name: frame for name, frame in named if is_name(name)}


def _check_figures(report: msgspec.Struct) -> None:
    """Raises FrameError for figures that no process has: displays add them up, and divide by them."""
    for name, value in msgspec.structs.asdict(report).items():
        if isinstance(value, msgspec.Struct):
            _check_figures(value)
        for figure in value.values() if isinstance(value, dict) else (value,):
            if isinstance(figure, float) and not abs(figure) < _LARGEST:
                raise FrameError(f"{name} is {figure}")


def _tallies(flat: Any) -> Tallies:
    tallies: dict[str, dict[int, int]] = {}
    for name, value in pairs(flat):
        what, _, key = name.partition(":")
        tallies.setdefault(what, {})[int(key)] = int(value)
    return Tallies(**{what: dict(sorted(counts.items())) for what, counts in tallies.items()})


def _silences(flat: Sequence[Any], pools: Sequence[PoolInfo]) -> dict[str, Silence]:
    """Returns the silences of {worker, ms that its session lasts, ms until it is not alive any more...}."""
    said = zip(map(text, flat[::3]), flat[1::3], flat[2::3], strict=True)
    silent = ((name, max(0, _SESSION_MS - session) / 1000, max(0, alive) / 1000) for name, session, alive in said)
    ended_s = {tag: seconds for pool in pools for tag, seconds in pool.ended_s.items()}
    return {
        name: Silence(
            heard_s,
            is_late=heard_s > _LATE * (heard_s + alive_s),
            has_ended=ended_s.get(name.rpartition("-")[2], inf) <= heard_s,
        )
        for name, heard_s, alive_s in silent
        if is_name(name)
    }


def _storable(text: str) -> str:
    """Returns an error's text in UTF-8: messages may hold halves of characters, such as those of file names."""
    return text[:_ERROR_CHARACTERS].encode(errors="backslashreplace").decode()


def _scoring_queue(
    name: bytes, open_requests: int, leased: int, oldest_s: bytes, answered: int, failed: int, expired: int, stored: int
) -> ScoringQueue:
    return ScoringQueue(
        scorer=text(name),
        waiting=open_requests - leased,
        leased=leased,
        oldest_s=max(0.0, float(oldest_s)),
        answered=answered,
        failed=failed,
        expired_leases=expired,
        bytes=stored,
    )


def _ages(reply: Sequence[bytes]) -> QueueAges:
    oldest_ready_s, mean_ready_s, oldest_lease_s, next_sample_s = (float(age) if age else None for age in reply)
    return QueueAges(
        oldest_ready_s=oldest_ready_s,
        mean_ready_s=mean_ready_s,
        oldest_lease_s=oldest_lease_s,
        next_sample_s=next_sample_s,
    )


_COUNTERS = (
    *("admitted", "expired_leases", "copied_leases", "fenced", "rejected", "payload_bytes", "generated_tokens"),
    *("wasted_tokens", "resumed_tokens", "discarded_tokens", "trimmed_samples", "uninformative"),
    *("skipped_evaluations", "worker_restarts"),
)
"""The fields of `QueueDepths` that `meta` has under the same names."""


def _queues(meta: dict[str, str], sizes: Sequence[int]) -> QueueDepths:
    def number(name: str) -> int:
        return int(meta.get(name, 0))

    pool, retry, leased, ready, pinned = sizes
    settled_or_held = number("dropped") + number("trained") + ready + pinned
    return QueueDepths(
        pool=pool,
        retry=retry,
        leased=leased,
        open=max(0, number("admitted") - settled_or_held),
        ready=ready,
        pinned=pinned,
        dropped_stale=number("dropped") - number("uninformative"),
        requeued_stale=number("requeued"),
        **{name: number(name) for name in _COUNTERS},
    )


@dataclass(frozen=True)
class MissingSample:
    """A sample that its group still lacks."""

    sample: int
    holder: str
    """The worker that leased it last; empty where none did. A name with a `?` belongs to another process."""
    held_s: float
    """The time since it was leased, or since its last segment."""
    is_leased: bool
    """False where the lease has expired, or was handed back."""


@dataclass(frozen=True)
class UnfinishedGroup:
    """A group that was admitted, and lacks samples."""

    group: str
    size: int
    done: int
    """The samples that were submitted."""
    floor: int | None
    """The step of the oldest weights that sample it; None before its first lease."""
    missing: tuple[MissingSample, ...]
    """The samples that it lacks, or the first of them."""


@dataclass(frozen=True)
class StepProgress:
    """The progress of the next step, by the server's clock."""

    quiet_s: float
    """The time since a batch was taken, a version announced or the run claimed."""
    claimed_s: float
    """The time since a learner claimed the run."""
    taken: int | None
    """The newest step whose batch the learner took; None where it holds none."""
    taken_groups: int
    """The groups of that batch."""
    taken_s: float
    """The time since a batch was taken."""
    has_learner: bool
    """Whether a learner has given a sign of life lately."""
    groups_per_step: int
    max_lag: int
    ahead: float
    """Steps of groups that are admitted beyond those of the next step."""
    on_straggler: str
    stored_bytes: int
    max_bytes: int
    feed_is_closed: bool
    youngest_floor: int | None
    """The step of the oldest weights of the last group that the next step would train; None: too few are ready."""
    unfinished: tuple[UnfinishedGroup, ...]
    """The oldest unfinished groups, those that were begun first."""


class ProgressVerbs:
    """Looks at what the next step waits for."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read(self) -> StepProgress | None:
        """Returns the progress, or None where no learner has claimed the run yet. Raises ForeignRunError."""
        reply = await self._connection.script("progress", absent=None)
        if reply is None:
            return None
        clock, flat, taken, taken_groups, has_learner, youngest, *groups = reply
        now, meta = float(clock), dict(pairs(flat))
        if "groups_per_step" not in meta:
            return None
        since = {name: now - float(meta.get(name, 0)) for name in ("claimed_at", "announced_at", "pinned_at")}
        return StepProgress(
            quiet_s=max(0.0, min(since.values())),
            claimed_s=max(0.0, since["claimed_at"]),
            taken=_whole(taken),
            taken_groups=int(taken_groups),
            taken_s=max(0.0, since["pinned_at"]),
            has_learner=bool(has_learner),
            groups_per_step=int(meta["groups_per_step"]),
            max_lag=int(meta["max_lag"]),
            ahead=float(meta.get("ahead") or meta["max_lag"]),
            on_straggler=meta["on_straggler"],
            stored_bytes=int(meta.get("payload_bytes", 0)) + int(meta.get("archive_bytes", 0)),
            max_bytes=int(meta["max_bytes"]),
            feed_is_closed=meta.get("feed_closed") == "1",
            youngest_floor=_whole(youngest),
            unfinished=tuple(_group(group, now) for group in groups),
        )


def _group(reply: Sequence[Any], now: float) -> UnfinishedGroup:
    group, size, done, floor, *missing = reply
    return UnfinishedGroup(
        group=text(group),
        size=int(size),
        done=int(done),
        floor=_whole(floor),
        missing=tuple(_sample(sample, now) for sample in missing),
    )


def _sample(reply: Sequence[Any], now: float) -> MissingSample:
    sample, holder, since, is_leased = reply
    held_s = max(0.0, now - float(since)) if since else 0.0
    return MissingSample(sample=int(sample), holder=text(holder), held_s=held_s, is_leased=bool(is_leased))


def _whole(value: bytes) -> int | None:
    return int(value) if value else None
