"""The worker's verbs: lease a sample, keep the lease, submit the trajectory, or hand the lease back.

A lease expires on the server's clock and then goes to another worker under a new token; whoever comes late is
fenced.
"""

import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .codec import decode, encode_trajectory
from .connection import Connection
from .errors import BrokerError, FrameError
from .schema import Lease, Prompt, Trajectory, TrajectoryId, WeightVersion
from .staleness import oldest_step

_ATTEMPTS = 3


class SubmitOutcome(StrEnum):
    """What became of a submission."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """This very submission was accepted before; its first reply was lost."""
    FENCED = "fenced"
    """The lease is no longer held, the group's round is over, or a rewind has abandoned the weights: the work is
    void."""


@dataclass(frozen=True)
class LeaseReply:
    """The leases handed out, and where fewer than asked for, why."""

    leases: tuple[Lease, ...]
    state: str
    """Of the run; "absent" where no learner has claimed it yet."""
    server_id: str
    reason: str
    """"" | capacity | stale weights | no prompts | bytes | finished | paused (nothing announced, or
    stopped)."""


class Leases:
    """One worker process's hold on samples. It remembers what it holds, so as not to be given the same sample
    twice."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._held: dict[str, dict[TrajectoryId, str]] = defaultdict(dict)
        self.payload_ttl_s = 600.0
        """A payload whose submission never followed is forgotten after this."""

    async def lease(self, worker: str, version: WeightVersion, count: int, ttl_s: float) -> LeaseReply:
        """Up to `count` samples for an engine that holds `version`. A lost reply's leases expire by
        themselves."""
        held = self._held[worker]
        server_id, state, reason, *flat = await self._connection.script(
            "lease",
            version.incarnation,
            version.step,
            count,
            ttl_s,
            secrets.token_hex(8),
            *(f"{tid} {token}" for tid, token in held.items()),
        )
        granted = {parse_tid(m): token.decode() for m, token in zip(flat[::2], flat[1::2], strict=True)}
        prompts, damage = await self._prompts({tid.group for tid in granted})
        leases = tuple(
            Lease(tid=tid, token=token, ttl_s=ttl_s, prompt=prompts[tid.group])
            for tid, token in granted.items()
            if tid.group in prompts  # else the group was settled since, and the lease with it
        )
        if damage is not None:
            await self.release(leases)
            raise self._damaged(damage) from damage
        held.update((lease.tid, lease.token) for lease in leases)
        return LeaseReply(leases, state.decode(), server_id.decode(), reason.decode())

    async def renew(self, leases: Sequence[Lease], ttl_s: float) -> set[TrajectoryId]:
        """Moves the deadlines; returns those that are no longer held, whose generation must stop."""
        if not leases:
            return set()
        lost = {parse_tid(m) for m in await self._connection.script("renew", ttl_s, *_members(leases))}
        for lease in leases:
            if lease.tid in lost:
                self._forget(lease)
        return lost

    async def submit(self, lease: Lease, trajectory: Trajectory) -> SubmitOutcome:
        """Hands a finished sample in. Raises FrameError where its parts contradict each other."""
        payload = encode_trajectory(trajectory)
        tokens, oldest = len(trajectory.response_tokens), oldest_step(trajectory.spans)
        for _ in range(_ATTEMPTS):
            # A key of its own for each attempt: a repeated SET would put a TTL on a payload already accepted.
            name = f"payload:{lease.tid}:{secrets.token_hex(6)}"
            ttl_ms = int(1000 * self.payload_ttl_s)
            outcome, _ = await self._connection.script(
                "submit",
                str(lease.tid),
                lease.token,
                name,
                tokens,
                oldest,
                *_newest_steps(trajectory),
                before=[("SET", self._connection.keys(name), payload, "PX", ttl_ms)],
            )
            if outcome != b"no payload":
                self._forget(lease)
                return SubmitOutcome(outcome.decode())
        raise BrokerError(
            f"The server at {self._connection.url} loses payloads of {len(payload)} bytes as soon as "
            "they are stored: its maxmemory-policy must be noeviction."
        )

    async def release(self, leases: Sequence[Lease]) -> None:
        """Hands leases back at once, for others to take."""
        if leases:
            await self._connection.script("release", *_members(leases))
        for lease in leases:
            self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        for held in self._held.values():
            if held.get(lease.tid) == lease.token:
                del held[lease.tid]

    async def _prompts(self, groups: set[str]) -> tuple[dict[str, Prompt], FrameError | None]:
        """Those that are there and whole, and what is wrong with the last that is not whole."""
        if not groups:
            return {}, None
        names = sorted(groups)
        blobs = await self._connection.execute("MGET", *(self._connection.keys(f"prompt:{g}") for g in names))
        prompts, damage = dict[str, Prompt](), None
        for group, blob in zip(names, blobs, strict=True):
            try:
                if blob is not None:
                    prompts[group] = decode(blob, Prompt)
            except FrameError as error:
                damage = error
        return prompts, damage

    def _damaged(self, error: FrameError) -> BrokerError:
        return BrokerError(
            f"A prompt of run {self._connection.run} is damaged on the server ({error}): something else "
            "writes there, or its disk is bad. Choose another run.name and feed again."
        )


def parse_tid(member: bytes) -> TrajectoryId:
    """The id that a script names `group:round:sample`."""
    group, round_, sample = member.decode().rsplit(":", 2)
    return TrajectoryId(group, int(round_), int(sample))


def _newest_steps(trajectory: Trajectory) -> list[int]:
    """For each incarnation whose weights sampled it, in turn: the incarnation and the newest step."""
    newest = {version.incarnation: version.step for version in sorted(span.version for span in trajectory.spans)}
    return [number for pair in newest.items() for number in pair]


def _members(leases: Sequence[Lease]) -> list[str]:
    return [argument for lease in leases for argument in (str(lease.tid), lease.token)]
