"""Each role has a user of its own, whose access control list says what it may do (Redis 7, Valkey 7.2 or newer).

    learner    everything of its runs, and nothing of other runs
    worker     the run's functions, except those of its owner; payloads and segments whose names it knows; it may read
               weights and the recipe
    observer   may look, but at no weights, payloads or prompts, and may list no keys
    scorer     the run's functions for scorers, and their keys; it may read the recipe and the model's files

The server checks the commands inside a function against the rights of its caller. So a worker's user may write all that
its functions write. The names of those keys contain a secret that it cannot read, so it can do to these keys only what
the functions do. The server lists the names of keys, and so the secrets of its runs, to learners alone. A worker may
not even read `owner`, so every function of the owner is refused to it. Nor may it read `scoring`, so every function of
scorers is refused to it.

The users of the embedded server have passwords beside the server's data, each in a file that only the server's own user
may read: DIRECTORY/passwords/learner, worker, observer, scorer. They are made once, so that a server that is started
again has the same ones.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from headway.broker.connection.address import PASSWORD_FILE_OPTION
from headway.broker.errors import HeadwayError
from headway.broker.keys import PREFIX, check_name

_PASSWORD_BYTES = 24
_UNKNOWN_TO_7_0 = ("client|setinfo", "client|no-touch", "waitaof")
"""Commands that Redis 7.0 does not know: it refuses rules that name them."""


class Role(StrEnum):
    """The role that a user of the server is for."""

    LEARNER = "learner"
    WORKER = "worker"
    OBSERVER = "observer"
    SCORER = "scorer"


@dataclass(frozen=True)
class _Rights:
    """Allowed commands, and the keys on which they may be used; further selectors allow others."""

    commands: str
    writes: str = ""
    """Keys below a run's prefix, or with a slash before them below that of all runs, that may be written and read."""
    reads: str = ""
    selectors: "tuple[_Rights, ...]" = ()


_CONNECTION = "ping client|setinfo client|no-touch cluster|slots info time wait waitaof"
_LOOKING = "exists get hgetall hmget llen lrange object|idletime pttl smembers zcard zcount zrange zrangebyscore zscore"

_RIGHTS = {
    Role.LEARNER: _Rights(
        commands=f"{_CONNECTION} {_LOOKING} expire fcall fcall_ro function|delete function|load getrange hdel hget"
        " hincrby hlen hset hsetnx lindex lrem ltrim memory|usage mget persist pttl rename rpush sadd scan scard set"
        " sismember srem strlen unlink xadd xrevrange zadd zpopmin zrem zremrangebylex"
        " zremrangebyscore",
        writes="* /runs",
    ),
    Role.WORKER: _Rights(
        commands=f"{_CONNECTION} {_LOOKING} expire fcall fcall_ro hdel hget hincrby hlen hset lindex persist rpush sadd"
        " set scard sismember srandmember srem unlink xadd zadd zpopmin zrem",
        writes="hidden:*",
        selectors=(
            _Rights("exists get persist set strlen unlink", writes="payload:* segment:*"),
            _Rights(
                "get getrange mget", reads="archive:* broadcast config fault:* holder identity manifest:* model verbs"
            ),
            _Rights("exists get unlink", writes="prompt:*"),
            _Rights("hmget xread", reads="bell meeting:*"),
            _Rights("set", writes="durable fault:[0-9a-f]"),
        ),
    ),
    Role.OBSERVER: _Rights(
        commands=f"ping client|setinfo client|no-touch cluster|slots {_LOOKING} fcall_ro getrange mget time xrevrange",
        reads="hidden:* config fault:* holder identity verbs /runs",
    ),
    Role.SCORER: _Rights(
        commands=f"{_CONNECTION} exists expire fcall fcall_ro get hdel hget hincrby hmget hset mget scard set sadd"
        " sismember smembers srem unlink zadd zrangebyscore zrem zscore",
        writes="hidden:of:* hidden:*:scoring:*",
        reads="config hidden:*:meta identity model scoring verbs",
    ),
}


@dataclass(frozen=True)
class User:
    """One role's user on the server, for one run or for all."""

    role: Role
    run: str | None
    """The run for which the user is; None: all runs."""
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
        of_all = [f"{kind}{PREFIX}{name[1:]}" for name in names if name.startswith("/")]
        return of_all + [
            f"{kind}{PREFIX}{{{tag}}}:{name}" for name in names if not name.startswith("/") for tag in tags
        ]


def users(run: str | None, passwords: Mapping[str, str]) -> list[User]:
    """Returns a user for each role; a role without a password gets a random one, so that no process can log in as
    it."""
    if run is not None:
        check_name(run, "run")
    return [User(role, run, passwords.get(role) or secrets.token_urlsafe(_PASSWORD_BYTES)) for role in Role]


_FOLDER = "passwords"


def url_as(role: Role, url: str) -> str:
    """Returns the URL of an embedded server by which another role reaches it; any other URL as it is.

    The role's password file lies beside that of the role that the URL names.
    """
    for other in Role:
        name, file = f"{User(other, None, '').name}@", quote(f"/{_FOLDER}/{other}")
        if name in url and url.endswith(file):
            return url.replace(name, f"{User(role, None, '').name}@", 1).removesuffix(file) + quote(
                f"/{_FOLDER}/{role}"
            )
    return url


class Credentials:
    """The passwords below `directory`, which belongs to one server."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / _FOLDER

    def file(self, role: Role) -> Path:
        """Returns the path of the file with the role's password."""
        return self._folder / role

    def url_of(self, role: Role, url: str) -> str:
        """Returns the URL by which this role reaches the server at `url`: with its user name, and the path of its
        password file."""
        user = User(role, None, "").name
        return f"{url.replace('://', f'://{user}@', 1)}?{PASSWORD_FILE_OPTION}={quote(str(self.file(role)))}"

    def make(self) -> None:
        """Makes the files that are missing. Idempotent. Raises HeadwayError where they cannot be written."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._folder.chmod(0o700)
            for role in Role:
                if not self.file(role).exists():
                    self._write(role)
        except OSError as error:
            raise HeadwayError(
                f"The server's passwords cannot be kept in {self._folder} ({error.strerror or error}): make it"
                " writable, or choose another directory."
            ) from error

    def acl(self, *, is_for_7_0: bool) -> list[str]:
        """Returns lines of the server's configuration: a user for each role, and none without a password."""
        passwords = {role.value: self.file(role).read_text().strip() for role in Role}
        lines = [f"user {user.name} {' '.join(user.rules(is_for_7_0=is_for_7_0))}" for user in users(None, passwords)]
        return ["user default off", *lines]

    def _write(self, role: Role) -> None:
        """Writes a file that no process sees half-written and no other user can read."""
        partial = self._folder / f".{role}.partial"
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(_PASSWORD_BYTES) + "\n")
        partial.rename(self.file(role))
