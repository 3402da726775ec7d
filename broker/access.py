"""Who may do what on the server: a user for each role, as access control lists say it (Redis 7, Valkey 7.2 or newer).

    learner    everything of its runs, and nothing of anybody else's
    worker     what its own scripts touch; weights, batches and the recipe only to read; no scripts but those loaded
    observer   to look: no weights, no payloads

The server checks the commands inside a script against the rights of its caller. Hence a worker's user can spoil the
counters and queues of its run, which its scripts write; it cannot train it, feed it, or hand out weights.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

from .keys import PREFIX, check_run_name

_PASSWORD_BYTES = 24
_UNKNOWN_TO_7_0 = ("client|setinfo", "client|no-touch", "waitaof")
"""Redis 7.0 refuses rules that name them."""


class Role(StrEnum):
    """Whom a user is for."""

    LEARNER = "learner"
    WORKER = "worker"
    OBSERVER = "observer"


@dataclass(frozen=True)
class _Rights:
    """Commands, and the keys that they may be used on."""

    commands: str
    writes: str = ""
    """Keys below a run's prefix that may be read, too."""
    reads: str = ""
    frees: str = ""
    """Keys that may be unlinked and not be written otherwise."""


_CONNECTION = "ping client|setinfo client|no-touch cluster|slots multi exec evalsha info time wait waitaof"
_LOOKING = "exists get hget hgetall hmget llen lrange mget smembers zcard zrange"
_LOOKED_AT = "batch:* holder leases meta pinned pool ready retry steps tally worker:* workers"

_RIGHTS = {
    Role.LEARNER: _Rights(
        commands=f"{_CONNECTION} {_LOOKING} eval script|load scan object|idletime expire hdel hincrby hset hsetnx"
        " lindex lrem ltrim persist rename rpush sadd set sismember srem strlen unlink xadd xrevrange zadd"
        " zpopmin zrangebyscore zrem zremrangebylex zscore",
        writes="*",
    ),
    Role.WORKER: _Rights(
        commands=f"{_CONNECTION} {_LOOKING} expire getrange hdel hincrby hset hsetnx lindex persist rpush sadd set"
        " sismember srem strlen unlink xadd xread zadd zpopmin zrangebyscore zrem",
        writes="awake dead durable garbage group:* joining:* leases lost meta none of:* open payload:* pool quarantined"
        " ready retry segment:* segments:* serving strikes tally turns worker:* workers",
        reads=f"{_LOOKED_AT} identity archive:* bell broadcast config forks manifest:* meeting:* model phase prompt:*",
        frees="prompt:*",
    ),
    Role.OBSERVER: _Rights(
        commands="ping client|setinfo client|no-touch cluster|slots multi exec scan object|idletime xrevrange"
        f" {_LOOKING}",
        reads=f"{_LOOKED_AT} config dead dropped identity lost open quarantined settled strikes",
    ),
}


@dataclass(frozen=True)
class User:
    """One role's user on the server, for one run or for all."""

    role: Role
    run: str | None
    """None: of all runs."""
    password: str

    @property
    def name(self) -> str:
        return f"headway-{self.role}" + (f"-{self.run}" if self.run else "")

    def rules(self, *, is_for_7_0: bool = False) -> list[str]:
        """What `ACL SETUSER NAME` is told; the password only by its digest."""
        unknown = _UNKNOWN_TO_7_0 if is_for_7_0 else ()
        rights = _RIGHTS[self.role]
        reads = set(rights.reads.split()) - set(rights.writes.split())
        return [
            "reset",
            "on",
            "#" + sha256(self.password.encode()).hexdigest(),
            *self._keys("~", rights.writes.split()),
            *self._keys("%R~", sorted(reads)),
            *(f"+{command}" for command in rights.commands.split() if command not in unknown),
            *(f"(%W~{key} +unlink)" for key in self._keys("", rights.frees.split())),
        ]

    def _keys(self, kind: str, names: Sequence[str]) -> list[str]:
        tags = ("*",) if self.run is None else (self.run, f"{self.run}/*")
        return [f"{kind}{PREFIX}{{{tag}}}:{name}" for name in names for tag in tags]


def users(run: str | None, passwords: Mapping[str, str]) -> list[User]:
    """A user for each role; a role without a password gets one that cannot be guessed."""
    if run is not None:
        check_run_name(run)
    return [User(role, run, passwords.get(role) or secrets.token_urlsafe(_PASSWORD_BYTES)) for role in Role]
