"""The verbs that the server carries out: a library of functions for each run, made of the scripts in `scripts/`.

A script begins with the files that it includes, and perhaps with its flags. In the library it is a function, which
follows all those files and three prefixes of keys. Two prefixes contain a secret: a user that may call the function but
not read it can write these keys only as the function does (see `access`).
"""

import secrets
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Self

from headway.broker.errors import SchemaMismatchError
from headway.broker.installation import version_of
from headway.broker.keys import Keys

_SECRET_BYTES = 16
_CALL = "lib_call"
SHARED = tuple(
    f"lib_{name}"
    for name in (
        "base",
        "arguments",
        "samples",
        "tokens",
        "groups",
        "evaluations",
        "claim",
        "workers",
        "scoring",
    )
)
"""The files that scripts include, in this order, as each uses the ones before it."""
_STATE = "local call, KEYS, ARGV, IDENTITY, is_there, forks, highest, clock, has_refused, risen, SERVER\n"
_INCLUDE, _FLAGS = "-- include:", "-- flags:"


def new_secret() -> str:
    """Returns a secret that no process can guess."""
    return secrets.token_hex(_SECRET_BYTES)


@cache
def script_names() -> tuple[str, ...]:
    """Returns the names of all verbs."""
    names = (entry.name.removesuffix(".lua") for entry in (files("headway.broker") / "scripts").iterdir())
    return tuple(sorted(name for name in names if not name.startswith("lib_")))


@cache
def script_source(name: str) -> str:
    """Returns the text of a script, or of a file that scripts include."""
    return _file(name)


@cache
def included(name: str) -> tuple[str, ...]:
    """Returns the files that a script's first line names, and the one with which its function begins."""
    files_named = _file(name).partition("\n")[0].removeprefix(_INCLUDE).split()
    return (*files_named, _CALL) if files_named else ()


@cache
def flags_of(name: str) -> tuple[str, ...]:
    """Returns a script's flags. `no-writes`: users that may only read may call it. `allow-oom`: a server without memory
    carries it out."""
    _, line, *_ = _file(name).split("\n", 2)
    return tuple(line.removeprefix(_FLAGS).split()) if line.startswith(_FLAGS) else ()


@cache
def protocol() -> str:
    """Returns a digest of all scripts: clients with other scripts would misunderstand each other."""
    return sha1("".join(_file(name) for name in _file_names()).encode(), usedforsecurity=False).hexdigest()[:16]


@dataclass(frozen=True)
class Verbs:
    """The library of a run on its server, as the key `verbs` names it."""

    protocol: str
    library: str

    @classmethod
    def read(cls, value: bytes, run: str) -> Self:
        """Raises SchemaMismatchError where another version of Headway made it."""
        found = cls(*value.decode().split(" ", 1))
        if found.protocol != protocol():
            raise SchemaMismatchError(
                f"The learner of run {run} speaks protocol {found.protocol} with the broker, and this process "
                f"(Headway {version_of('headway') or 'of no version'}) {protocol()}: install the same version of "
                "Headway on both sides."
            )
        return found

    def call(self, name: str) -> tuple[str, str]:
        """Returns the command that calls the function, and the function's name."""
        return "FCALL_RO" if "no-writes" in flags_of(name) else "FCALL", f"{self.library}_{name}"


def library(keys: Keys) -> tuple[Verbs, str]:
    """Returns the library of a run whose secret is known, and the library's text."""
    prefixes = f"local P, PUBLIC, PROMPT = '{keys.hidden('')}', '{keys('')}', '{keys.prompt('')}'\n"
    body = "".join([prefixes, _STATE, *map(script_source, SHARED), *map(_function, script_names())])
    name = "headway_" + sha1(body.encode(), usedforsecurity=False).hexdigest()
    verbs = Verbs(protocol(), name)
    return verbs, f"#!lua name={name}\nlocal VERBS, LIBRARY = '{verbs.protocol} {name}', '{name}_'\n{body}"


def _function(name: str) -> str:
    flags = ", ".join(f"'{flag}'" for flag in flags_of(name))
    beginning = script_source(_CALL) if included(name) else ""
    return (
        f"redis.register_function{{function_name = LIBRARY .. '{name}', flags = {{{flags}}}, "
        f"callback = function(keys, arguments)\n{beginning}{script_source(name)}\nend}}\n"
    )


@cache
def _file_names() -> tuple[str, ...]:
    names = (entry.name for entry in (files("headway.broker") / "scripts").iterdir())
    return tuple(sorted(name.removesuffix(".lua") for name in names if name.endswith(".lua")))


@cache
def _file(name: str) -> str:
    return (files("headway.broker") / "scripts" / f"{name}.lua").read_text()
