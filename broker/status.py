"""What a run says of itself: its state, its workers, its last steps, and which runs there are."""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace
from redis.exceptions import NoPermissionError

from .codec import decode, encode
from .connection import Command, Connection
from .errors import BrokerError, FrameError, RunNotFoundError
from .keys import PREFIX, check_worker_name, is_name, run_of
from .owner import Owner
from .schema import DeadLetter, QueueDepths, RunStatus, StepMetrics, Tallies, WeightVersion, WorkerInfo
from .versions import put_blob

_KEPT_STEPS = 512
_WORKER_NAMES_TTL_S = 86400
_ERROR_CHARACTERS = 2000
_WARNINGS = 100
"""Of reports that cannot be read: whoever sends such may send many."""
_SHOWN_LETTERS = 8

T = TypeVar("T", bound=msgspec.Struct)
log = logging.getLogger(__name__)


class StatusBoard:
    """Everything that is looked at and never decided by."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unreadable: set[str] = set()
        """What was complained about."""
        self._beats = set[asyncio.Task[list[Any]]]()
        """Heartbeats on their way, those that their callers gave up among them."""

    async def config(self) -> bytes | None:
        """The resolved recipe that the learner stored when it claimed the run. Raises ForeignRunError."""
        keys = self._connection.keys
        identity, blob = await self._connection.execute("MGET", keys("identity"), keys("config"))
        self._connection.check_identity(identity.decode() if identity else "")
        return bytes(blob) if blob is not None else None

    async def heartbeat(self, info: WorkerInfo, ttl_s: float) -> None:
        """Alive for so long, unless it beats again. Raises ForeignRunError, BrokerError where its name is none."""
        check_worker_name(info.worker)
        if not self._connection.identity:
            await self._connection.join()
        info = replace(info, identity=self._connection.identity, last_error=_storable(info.last_error))
        keys = self._connection.keys
        names, serving = keys("workers"), keys("serving")
        serves = info.version is not None and info.state != "draining"
        commands: list[Command] = [
            ("SET", keys(f"worker:{info.worker}"), encode(info), "PX", int(1000 * ttl_s)),
            ("SADD", names, info.worker),
            ("EXPIRE", names, _WORKER_NAMES_TTL_S),
            ("SADD" if serves else "SREM", serving, info.worker),
            ("EXPIRE", serving, _WORKER_NAMES_TTL_S),
            ("GET", keys("identity")),
        ]
        beat = asyncio.create_task(self._connection.pipeline(commands))
        self._beats.add(beat)
        beat.add_done_callback(self._forget)
        *_, identity = await asyncio.shield(beat)
        self._connection.check_identity(identity.decode() if identity else "")

    async def leave(self, worker: str) -> None:
        """Gone on purpose: at once no longer among the workers."""
        if self._beats:  # which would bring it back
            await asyncio.wait(self._beats)
        keys = self._connection.keys
        await self._connection.pipeline(
            [
                ("UNLINK", keys(f"worker:{worker}")),
                ("SREM", keys("workers"), worker),
                ("SREM", keys("serving"), worker),
            ]
        )

    def _forget(self, beat: asyncio.Task[list[Any]]) -> None:
        self._beats.discard(beat)
        if not beat.cancelled():
            beat.exception()  # whoever still waits for it has been told

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Those alive, by name; without those of another schema version, what is no worker's name or report, and what
        is left over from another run of this name."""
        keys = self._connection.keys
        asked: list[Command] = [("SMEMBERS", keys("workers")), ("GET", keys("identity"))]
        members, identity = await self._connection.pipeline(asked)
        names = self._readable_names(members)
        if not names:
            return ()
        blobs = await self._connection.execute("MGET", *(keys(f"worker:{name}") for name in names))
        alive = {name: blob for name, blob in zip(names, blobs, strict=True) if blob is not None}
        dead = [name for name in names if name not in alive]
        if dead:  # one that comes back adds itself again with its next heartbeat
            with suppress(BrokerError):  # who only looks may not
                await self._connection.execute("SREM", keys("workers"), *dead)
        heard = ((name, self._readable(blob, WorkerInfo, f"worker {name}")) for name, blob in alive.items())
        of_run = identity.decode() if identity else ""
        return tuple(
            info for name, info in heard if info is not None and self._is_of(name, info) and info.identity == of_run
        )

    def _readable_names(self, members: Iterable[bytes]) -> list[str]:
        """In order. Anybody who has a worker's password can add others."""
        names = [member.decode(errors="backslashreplace") for member in members]
        for name in names:
            if not is_name(name):
                self._warn_once(name, f"{name[:200]!r} is passed over: it is no name for a worker.")
        return sorted(name for name in names if is_name(name))

    def _is_of(self, name: str, info: WorkerInfo) -> bool:
        if info.worker != name:
            self._warn_once(name, f"Worker {name} is passed over: it reports as {info.worker[:200]!r}.")
        return info.worker == name

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._unreadable and len(self._unreadable) < _WARNINGS:
            self._unreadable.add(what)
            log.warning("%s", text)

    def _readable(self, frame: bytes, kind: type[T], what: str) -> T | None:
        try:
            return decode(frame, kind)
        except FrameError as error:
            self._warn_once(what, f"{what} is passed over, its report cannot be read: {error}")
            return None

    async def report_step(self, owner: Owner, metrics: StepMetrics) -> None:
        """Adds a step to the last 512."""
        await put_blob(self._connection, owner, "steps", encode(metrics), keep=_KEPT_STEPS)

    async def state(self) -> str:
        """Of the run; "absent" where no learner has claimed it yet."""
        state = await self._connection.execute("HGET", self._connection.keys.meta, "state")
        return state.decode() if state else "absent"

    async def set_state(self, owner: Owner, state: str) -> None:
        """claimed, warming up, training, finished, stopped."""
        await self._connection.learner_script("state", owner, state)

    async def snapshot(self) -> RunStatus:
        """One look at everything. Raises RunNotFoundError, which lists the runs that there are."""
        meta = await self._meta()
        queues = await self._queues(meta)
        identity, quarantined, dead_letters = await self._refused()
        frames = await self._connection.execute("LRANGE", self._connection.keys("steps"), 0, -1)
        steps = tuple(step for frame in frames if (step := self._readable(frame, StepMetrics, "a step")))
        announced = (
            WeightVersion(int(meta["announced_incarnation"]), int(meta["announced_step"]))
            if "announced_step" in meta
            else None
        )
        return RunStatus(
            run=self._connection.run,
            identity=identity,
            state=meta["state"],
            incarnation=int(meta["incarnation"]),
            announced=announced,
            queues=queues,
            workers=await self.workers(),
            last_step=steps[-1] if steps else None,
            recent_steps=steps,
            tallies=await self._tallies(),
            quarantined=quarantined,
            dead_letters=dead_letters,
        )

    async def runs(self) -> tuple[str, ...]:
        """Names of all runs on this server."""
        names = map(run_of, await self._connection.scan(f"{PREFIX}{{*}}:meta"))
        return tuple(sorted(filter(is_name, names)))

    async def runs_for_people(self) -> str:
        """Their names; a worker's user may not ask for them."""
        try:
            return ", ".join(await self.runs()) or "none"
        except BrokerError as error:
            if isinstance(error.__cause__, NoPermissionError):
                return "our user may not list them"
            raise

    async def delete_run(self) -> int:
        """Removes everything of this run; how many keys that were."""
        names = await self._connection.scan(f"{self._connection.keys.prefix}*")
        names += await self._connection.scan(self._connection.keys.blob("*/*"))
        # These first: from then on every verb of a learner still alive is refused.
        keys = self._connection.keys
        await self._connection.execute("UNLINK", keys.meta, keys("owner"), keys("identity"))
        for start in range(0, len(names), 1000):
            await self._connection.pipeline([("UNLINK", name) for name in names[start : start + 1000]])
        return len(names)

    async def _refused(self) -> tuple[str, tuple[str, ...], tuple[DeadLetter, ...]]:
        """The run's identity; names of workers that get no more leases; the newest dead letters, oldest first."""
        keys = self._connection.keys
        asked: list[Command] = [("GET", keys("identity")), ("SMEMBERS", keys("quarantined"))]
        identity, holders = await self._connection.pipeline(asked)
        letters: list[Any] = []
        with suppress(BrokerError):  # workers may not: they hold parts of others' samples
            letters = await self._connection.execute("XREVRANGE", keys("dead"), "+", "-", "COUNT", _SHOWN_LETTERS)
        names = sorted({_text(holder).partition(" ")[0] for holder in holders})
        return _text(identity or b""), tuple(names), tuple(_letter(entry) for _, entry in reversed(letters))

    async def _tallies(self) -> Tallies:
        flat = await self._connection.execute("HGETALL", self._connection.keys("tally"))
        tallies: dict[str, dict[int, int]] = {}
        for name, value in _pairs(flat):
            what, _, key = name.partition(":")
            tallies.setdefault(what, {})[int(key)] = int(value)
        return Tallies(**{what: dict(sorted(counts.items())) for what, counts in tallies.items()})

    async def _meta(self) -> dict[str, str]:
        flat = await self._connection.execute("HGETALL", self._connection.keys.meta)
        meta = dict(_pairs(flat))
        if "state" not in meta:
            raise RunNotFoundError(
                f"No run {self._connection.run} at {self._connection.url}. Runs there: {await self.runs_for_people()}."
            )
        return meta

    async def _queues(self, meta: dict[str, str]) -> QueueDepths:
        keys = self._connection.keys
        counted = ("pool", "retry", "leases", "ready")
        commands: list[Command] = [("ZCARD", keys(name)) for name in counted]
        commands.append(("ZRANGE", keys("pinned"), 0, -1))
        *sizes, steps = await self._connection.pipeline(commands, atomic=True)
        batches = await self._connection.pipeline([("LLEN", keys(f"batch:{int(step)}")) for step in steps])
        pool, retry, leased, ready = sizes
        number = {name: int(meta.get(name, 0)) for name in _COUNTERS}
        settled_or_held = number["dropped"] + number["trained"] + ready + sum(batches)
        return QueueDepths(
            pool=pool,
            admitted=number["admitted"],
            retry=retry,
            leased=leased,
            open=max(0, number["admitted"] - settled_or_held),
            ready=ready,
            pinned=sum(batches),
            dropped_stale=number["dropped"] - number["uninformative"],
            requeued_stale=number["requeued"],
            expired_leases=number["expired_leases"],
            fenced=number["fenced"],
            rejected=number["rejected"],
            payload_bytes=number["payload_bytes"],
            generated_tokens=number["generated_tokens"],
            wasted_tokens=number["wasted_tokens"],
            resumed_tokens=number["resumed_tokens"],
            discarded_tokens=number["discarded_tokens"],
            trimmed_samples=number["trimmed_samples"],
            uninformative=number["uninformative"],
        )


def _storable(text: str) -> str:
    """An error as UTF-8 has it: messages may hold halves of characters, such as those of file names."""
    return text[:_ERROR_CHARACTERS].encode(errors="backslashreplace").decode()


def _letter(flat: Any) -> DeadLetter:
    pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
    entry = {_text(name): _text(value) for name, value in pairs}
    return DeadLetter(tid=entry.get("tid", ""), worker=entry.get("worker", ""), reason=entry.get("reason", ""))


def _text(value: bytes) -> str:
    """Of what a worker wrote."""
    return value.decode(errors="backslashreplace")


def _pairs(flat: Any) -> list[tuple[str, str]]:
    """The fields of a hash, in whichever protocol they came."""
    pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
    return [(name.decode(), value.decode()) for name, value in pairs]


_COUNTERS = (
    "admitted",
    "dropped",
    "trained",
    "requeued",
    "expired_leases",
    "fenced",
    "rejected",
    "payload_bytes",
    "generated_tokens",
    "wasted_tokens",
    "resumed_tokens",
    "discarded_tokens",
    "trimmed_samples",
    "uninformative",
)
