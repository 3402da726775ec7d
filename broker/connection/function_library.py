"""The verbs that the server carries out: a library of functions for each run, made of the files in `scripts/`.

The library is three prefixes of keys, and the text of all files in one order. Two prefixes contain a secret: a user
that may call a function but not read it can write these keys only as the function does (see `access`).
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Self

from headway.broker.errors import SchemaMismatchError
from headway.broker.installation import version_of
from headway.broker.keys import Keys

_SECRET_BYTES = 16
FILES = (
    *("calls", "samples", "tokens", "groups", "evaluations", "scoring", "claims", "prompts", "leases", "segments"),
    *("submissions", "batches", "weights", "rendezvous", "garbage", "engine_pauses", "workers", "pools", "status"),
)
"""The files of `scripts/`, in this order, as each uses what those before it define."""
_VERB = re.compile(r"^(?:register|verb|owner_verb)\('(\w+)', \{(.*?)\}, function", re.MULTILINE)


def new_secret() -> str:
    """Returns a secret that no process can guess."""
    return secrets.token_hex(_SECRET_BYTES)


@cache
def script_source(name: str) -> str:
    """Returns the text of a file."""
    return (files("headway.broker") / "scripts" / f"{name}.lua").read_text()


@cache
def verb_flags() -> Mapping[str, frozenset[str]]:
    """Returns the flags of each verb. `no-writes`: users that may only read may call it. `allow-oom`: a server without
    memory carries it out."""
    found = (match for name in FILES for match in _VERB.finditer(script_source(name)))
    return {verb[1]: frozenset(re.findall(r"[\w-]+", verb[2])) for verb in found}


@cache
def protocol() -> str:
    """Returns a digest of all files: clients with other ones would misunderstand each other."""
    return sha1("".join(map(script_source, FILES)).encode(), usedforsecurity=False).hexdigest()[:16]


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
        return "FCALL_RO" if "no-writes" in verb_flags()[name] else "FCALL", f"{self.library}_{name}"


def library(keys: Keys) -> tuple[Verbs, str]:
    """Returns the library of a run whose secret is known, and the library's text."""
    prefixes = f"local P, PUBLIC, PROMPT = '{keys.hidden('')}', '{keys('')}', '{keys.prompt('')}'\n"
    body = "".join([prefixes, *map(script_source, FILES)])
    name = "headway_" + sha1(body.encode(), usedforsecurity=False).hexdigest()
    verbs = Verbs(protocol(), name)
    return verbs, f"#!lua name={name}\nlocal VERBS, LIBRARY = '{verbs.protocol} {name}', '{name}_'\n{body}"
