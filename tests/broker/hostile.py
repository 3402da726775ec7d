# mypy: disable-error-code="union-attr, var-annotated"
"""A hostile program with a worker's password, and the honest processes of the run beside it."""

import random
import struct
from typing import Any

import redis

from headway.broker import Broker

from .scenario import Scenario


def measures(*numbers: int) -> bytes:
    """Return the measures of a blob, as functions take them: its bytes, {incarnation, step, tokens} of each version."""
    return struct.pack(f">{len(numbers)}I", *numbers)


class Hostile:
    """A plain client with the worker's password."""

    def __init__(self, url: str, run: str) -> None:
        self.client: Any = redis.Redis.from_url(url)
        self.prefix = f"headway:{{{run}}}:"
        _, self.library = self.client.get(f"{self.prefix}verbs").decode().split(" ")
        self.identity = self.client.get(f"{self.prefix}identity").decode()

    def call(self, verb: str, *arguments: Any) -> Any:
        """Call a function of the library. Raises the server's error."""
        return self.client.fcall(f"{self.library}_{verb}", 1, f"{self.prefix}hidden:of:{self.identity}", *arguments)

    def lease(self, count: int, ttl_s: float = 30, *, step: int = 0, holder: str = "evil 1") -> list[list[bytes]]:
        """Return {member, token} of each lease, and where it has segments, their oldest step and names."""
        nonce = f"{random.getrandbits(64):x}"
        leased: list[list[bytes]] = self.call("lease", 1, step, count, ttl_s, nonce, holder, "", 0)[4:]
        return leased

    def submit(self, leased: list[bytes], oldest: int, newest: int, *, frame: bytes = b"junk") -> bytes:
        """Submit a sample, and return the outcome."""
        member, token = leased[0].decode(), leased[1].decode()
        self.store(f"payload:{member}:{token}", frame)
        (outcome,) = self.call("submit", 0, member, token, "", measures(len(frame), 1, oldest, 1, 1, newest, 0))
        return bytes(outcome)

    def append(
        self, leased: list[bytes], oldest: int, newest: int, *, frame: bytes = b"junk", tokens: int = 6
    ) -> bytes:
        """Append a first segment, and return the outcome."""
        member, token = leased[0].decode(), leased[1].decode()
        name = f"segment:{member}:{random.getrandbits(64):x}"
        self.store(name, frame)
        outcome, _ = self.call(
            "append", member, token, 0, name, 30, measures(len(frame), 1, oldest, tokens, 1, newest, 0)
        )
        return bytes(outcome)

    def renew(self, leased: list[bytes], ttl_s: float = 30) -> list[bytes]:
        """The token, if the lease is lost."""
        _, _, _, *lost = self.call("heartbeat", "evil", "1", 30_000, b"junk", 0, ttl_s, *leased[:2])
        return lost

    def store(self, name: str, frame: bytes, *, is_new: bool = False) -> None:
        self.client.set(self.prefix + name, frame, px=60_000, nx=is_new)


class Cast:
    """A learner, an honest worker and a hostile one, each as its own user."""

    def __init__(self, learner: Broker, worker: Broker, hostile: Hostile, run: Scenario) -> None:
        self.learner, self.worker, self.hostile, self.run = learner, worker, hostile, run
        self.honest = Scenario(worker, run.claim)
