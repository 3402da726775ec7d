"""Each role has a user of its own, whose access control list says what it may do (Redis 7, Valkey 7.2 or newer).

    learner    everything of its runs, and nothing of other runs
    worker     the run's functions, but those of its owner; payloads and segments whose names it knows; weights and the
               recipe only to read
    observer   to look: no weights, no payloads, no prompts

The server checks the commands inside a function against the rights of its caller. So a worker's user may write all that
its functions write, under names that contain a secret which it cannot read, and which no command of its lists: it can
do to these keys what the functions do, and nothing else. `owner` it may not even read, so that every function of the
owner is refused to it.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

from broker.keys import PREFIX, check_run_name

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
    """Commands, and the keys that they may be used on; then the same for each selector."""

    commands: str
    writes: str = ""
    """Keys below a run's prefix that may be read, too."""
    reads: str = ""
    selectors: "tuple[_Rights, ...]" = ()


_CONNECTION = "ping client|setinfo client|no-touch cluster|slots info time wait waitaof"
_LOOKING = "exists get hgetall hmget llen lrange object|idletime smembers zcard zrange zrangebyscore"

_RIGHTS = {
    Role.LEARNER: _Rights(
        commands=f"{_CONNECTION} {_LOOKING} expire fcall fcall_ro function|delete function|load hdel hget hincrby hlen"
        " hset hsetnx lindex lrem ltrim memory|usage mget persist pttl rename rpush sadd scan scard set sismember srem"
        " strlen unlink xadd xrevrange zadd zpopmin zrem zremrangebylex zscore",
        writes="*",
    ),
    Role.WORKER: _Rights(
        commands=f"{_CONNECTION} {_LOOKING} expire fcall fcall_ro hdel hget hincrby hset lindex persist rpush sadd set"
        " scard sismember srem unlink xadd zadd zpopmin zrem zscore",
        writes="hidden:*",
        selectors=(
            _Rights("exists get persist set strlen unlink", writes="payload:* segment:*"),
            _Rights("get getrange mget", reads="archive:* broadcast config holder identity manifest:* model verbs"),
            _Rights("exists get unlink", writes="prompt:*"),
            _Rights("expire hdel hget hincrby hmget hset hsetnx", writes="joining:*"),
            _Rights("hmget xread", reads="bell meeting:*"),
            _Rights("set", writes="durable"),
        ),
    ),
    Role.OBSERVER: _Rights(
        commands=f"ping client|setinfo client|no-touch cluster|slots {_LOOKING} fcall_ro scan time xrevrange",
        reads="hidden:* config holder identity verbs",
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
        """Returns the arguments of `ACL SETUSER NAME`; the password stands there only as its digest."""
        rights = _RIGHTS[self.role]
        return [
            "reset",
            "on",
            "#" + sha256(self.password.encode()).hexdigest(),
            *self._granted(rights, _UNKNOWN_TO_7_0 if is_for_7_0 else ()),
            *(f"({' '.join(self._granted(selector))})" for selector in rights.selectors),
        ]

    def _granted(self, rights: _Rights, unknown: Sequence[str] = ()) -> list[str]:
        return [
            *self._keys("~", rights.writes.split()),
            *self._keys("%R~", rights.reads.split()),
            *(f"+{command}" for command in rights.commands.split() if command not in unknown),
        ]

    def _keys(self, kind: str, names: Sequence[str]) -> list[str]:
        tags = ("*",) if self.run is None else (self.run, f"{self.run}/*")
        return [f"{kind}{PREFIX}{{{tag}}}:{name}" for name in names for tag in tags]


def users(run: str | None, passwords: Mapping[str, str]) -> list[User]:
    """A user for each role; a role without a password gets one that cannot be guessed."""
    if run is not None:
        check_run_name(run)
    return [User(role, run, passwords.get(role) or secrets.token_urlsafe(_PASSWORD_BYTES)) for role in Role]
