"""Scoring work: a worker asks for scores of finished responses, and processes that hold a model answer.

    worker    ask ─────────────► collect, again and again ────► values ─► forget
    scorer    lease ─► score ─► answer ─► lease (renews, and takes what a dead scorer left) ─► ...

Requests are for a scorer's name, such as that of a reward; any number of processes answer the requests of one name.
Requests have leases as samples do: one that is not renewed, or held for longer than its asker allows, goes to another
process. A request lives while its asker collects: that of a worker that is gone is forgotten.

Promised: the first answer under the newest lease is the only one that an asker sees. No request is lost: a server that
has lost it says so, and the asker asks again. A request that no process can answer ends with the reason.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha1
from typing import Literal

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from headway.broker.connection.connection import Argument, Connection, text
from headway.broker.errors import FrameError
from headway.broker.schema import ScoreRequest
from headway.broker.schema.status import ScorerInfo
from headway.broker.wire.codec import decode_score_request, encode, encode_score_request

Scores = NDArray[np.float32]
"""The answer to a request, flat: [1] of a reward model, [R] of a teacher, or [R, 1 + 2K] of one that was asked for K
candidates (`broker.schema.ScoreRequest`)."""
MAX_ANSWER_BYTES = 1 << 23
"""The most bytes of one answer; `scoring.lua` has the same number."""
_BYTES_AT_A_TIME = 1 << 20
"""About the most bytes of requests in one call, so that none holds the server up."""


class AnswerOutcome(StrEnum):
    """The server's answer to scores."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """It has an answer already under the same lease: the first reply was lost."""
    FENCED = "fenced"
    """The scorer holds the lease no longer, or the asker is gone."""


@dataclass(frozen=True)
class ScoreLease:
    """The right, until a deadline, to answer a request."""

    name: str
    """The request's random name."""
    token: str
    request: ScoreRequest


@dataclass(frozen=True)
class ScoringReply:
    """The server's answer to a scorer that asks for requests."""

    lost: frozenset[str]
    """The requests whose leases the scorer had and has lost."""
    leases: tuple[ScoreLease, ...] = ()


@dataclass(frozen=True)
class ScoringResult:
    """The progress of a request."""

    state: Literal["waiting", "unknown", "answered", "failed"]
    """`unknown`: the server has lost it, so it is to be asked again."""
    scores: Scores | None = None
    reason: str = ""
    """Why it failed."""


def new_request_name() -> str:
    """Returns a name that no other process can guess."""
    return secrets.token_hex(16)


class Scoring:
    """The verbs of workers and scorers for scoring work."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def ask(
        self, scorer: str, requests: Mapping[str, ScoreRequest], *, ttl_s: float, hold_s: float, worker: str = ""
    ) -> frozenset[str]:
        """Asks a scorer of the run for `worker`, or with the learner's user for none. Returns the names of the requests
        that the server holds now. The others found no room, and are to be asked again. Idempotent.

        A request is forgotten once it was not collected for `ttl_s`, a minute at most; each process may have it for
        `hold_s`. Raises BrokerError where the run has no such scorer, and for a worker in quarantine.
        """
        frames = {
            name: encode_score_request(replace(request, identity=self._connection.identity))
            for name, request in requests.items()
        }
        held = set[str]()
        for names in _by_bytes(frames):
            said: list[Argument] = [part for name in names for part in (name, frames[name])]
            asker = worker, self._connection.session if worker else ""
            reply = await self._connection.script("score_ask", scorer, *asker, ttl_s, hold_s, *said)
            held |= {name for name, is_held in zip(names, reply, strict=True) if is_held}
        return frozenset(held)

    async def collect(
        self, scorer: str, names: Sequence[str], *, ttl_s: float, forget: Sequence[str] = ()
    ) -> dict[str, ScoringResult]:
        """Tells how far requests are, and forgets others, whose answers the asker has or no longer needs."""
        said: list[Argument] = [scorer, ttl_s, len(forget), *forget, *names]
        replies = await self._connection.script("score_collect", *said)
        return {name: _collected(*reply) for name, reply in zip(names, replies, strict=True)}

    async def lease(
        self, scorer: str, *, ttl_s: float, most: int, most_bytes: int, held: Sequence[ScoreLease] = ()
    ) -> ScoringReply:
        """Renews the leases in `held`, and leases up to `most` more requests of about `most_bytes` together, the
        longest asked first. A request that cannot be read is given up. A scorer that obeys another configuration than
        the run's gets none, and `Leases.recipe_changed` is set."""
        token, recipe = _mark(self._connection.session) + secrets.token_hex(16), self._connection.recipe
        reason, lost, *granted = await self._connection.script(
            "score_lease", scorer, ttl_s, token, most, most_bytes, recipe, *_held(held), absent=[b"", []]
        )
        if reason:
            self._connection.recipe_changed.set()
        leases = list[ScoreLease]()
        for name, frame in granted:
            try:
                leases.append(ScoreLease(name.decode(), token, decode_score_request(frame)))
            except FrameError as error:
                await self._release(scorer, [name.decode(), token], f"the request cannot be read: {error}")
        return ScoringReply(frozenset(name.decode() for name in lost), tuple(leases))

    async def answer(self, scorer: str, answers: Sequence[tuple[ScoreLease, Scores]]) -> list[AnswerOutcome]:
        """Hands scores in, and returns the outcome of each."""
        said: list[Argument] = []
        for lease, scores in answers:
            said += [lease.name, lease.token, np.ascontiguousarray(scores, "<f4").tobytes()]
        outcomes = await self._connection.script("score_answer", scorer, *said, absent=[b"fenced"] * len(answers))
        return [AnswerOutcome(outcome.decode()) for outcome in outcomes]

    async def release(self, scorer: str, leases: Sequence[ScoreLease], reason: str = "") -> None:
        """Gives leases back for other processes. With a `reason` this process cannot score them; a request that several
        cannot score fails. Idempotent."""
        if leases:
            await self._release(scorer, _held(leases), reason)

    async def report(self, info: ScorerInfo, ttl_s: float) -> None:
        """Reports that a scorer process is alive for so long."""
        await self._connection.script("scorer", info.process, int(1000 * ttl_s), encode(info), absent=None)

    async def leave(self, process: str) -> None:
        """Takes a scorer process that stops on purpose off the list at once."""
        await self._connection.script("scorer", process, 1, b"", absent=None)

    async def report_death(self, session: str) -> int:
        """Gives back at once what the scorer process with this session held, and returns how many requests those were.
        The caller has seen that process end, and made its session: no other process knows that."""
        return int(await self._connection.script("score_report_death", session, absent=0))

    async def _release(self, scorer: str, held: Sequence[Argument], reason: str) -> None:
        await self._connection.script("score_release", scorer, reason, *held, absent=None)


def _mark(session: str) -> str:
    """Returns the beginning of the tokens of this session's leases. The session cannot be told from it."""
    return sha1(session.encode(), usedforsecurity=False).hexdigest()[:16]


def _held(leases: Sequence[ScoreLease]) -> list[Argument]:
    return [argument for lease in leases for argument in (lease.name, lease.token)]


def _collected(state: bytes, value: bytes = b"") -> ScoringResult:
    match state:
        case b"answered":
            whole = value[: len(value) // 4 * 4]
            return ScoringResult("answered", scores=np.frombuffer(whole, "<f4").astype(np.float32))
        case b"failed":
            return ScoringResult("failed", reason=text(value))
        case b"unknown":
            return ScoringResult("unknown")
    return ScoringResult("waiting")


def _by_bytes(frames: Mapping[str, bytes]) -> list[list[str]]:
    """Returns the names in parts of about `_BYTES_AT_A_TIME`."""
    parts, size = list[list[str]](), 0
    for name, frame in frames.items():
        if not parts or size + len(frame) > _BYTES_AT_A_TIME:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += len(frame)
    return parts
