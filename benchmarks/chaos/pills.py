"""Impossible samples and segments, which hostile workers send past the client's own checks.

Each kind is refused by a check of its own. The audit knows a sample by its author, and a segment by its content,
because the worker that continues it puts its own name to the whole.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from msgspec.structs import replace

from headway.broker import Broker
from headway.broker.client.scoring import new_request_name
from headway.broker.client.submissions import Submission, measures_of
from headway.broker.errors import BrokerError, QuarantinedError
from headway.broker.schema import Lease, ScoreRequest, Segment, Trajectory, TrajectoryId, VersionSpan, WeightVersion
from headway.broker.wire.codec import encode_trajectory

from .tasks import LONGEST, SCORER, VOCABULARY, logprobs_of, response_length, response_tokens
from .trial import LEASE_TTL_S, MAX_LAG, RUN

HOSTILE = "hostile"
"""The beginning of these workers' names."""
ANOTHER_RUN = "f" * 16
LEASES = 2
"""The number of leases that a hostile worker takes at a time."""
JUNK = 4
"""The number of requests that a hostile worker asks at a time."""
ATTEMPTS, AGAIN_S = 40, 0.05
TIMEOUT_S = 1.0
Pill = Callable[[Trajectory], Trajectory]


def is_pill(trajectory: Trajectory) -> bool:
    """Whether no honest worker has made this."""
    return (
        trajectory.worker.startswith(HOSTILE)
        or len(trajectory.response_tokens) > LONGEST
        or int(trajectory.response_tokens.max()) >= VOCABULARY
        or float(trajectory.behavior_logprobs.max()) > 0
    )


def _of_length(one: Trajectory, length: int) -> Trajectory:
    tokens = np.full(length, 7, np.int32)
    return replace(
        one,
        response_tokens=tokens,
        behavior_logprobs=logprobs_of(tokens),
        loss_mask=np.ones(length, np.uint8),
        spans=(VersionSpan(0, length, one.spans[0].version),),
    )


def _of_version(one: Trajectory, incarnations: int, steps: int) -> Trajectory:
    (span,) = one.spans
    version = WeightVersion(span.version.incarnation + incarnations, max(0, span.version.step + steps))
    return replace(one, spans=(replace(span, version=version),))


def _beyond_vocabulary(one: Trajectory) -> Trajectory:
    return replace(one, response_tokens=np.full_like(one.response_tokens, VOCABULARY))


TOO_OLD = "weights that are too old"
"""A kind of pill that the first weights cannot make."""
PILLS: dict[str, Pill] = {
    "a token beyond the vocabulary": _beyond_vocabulary,
    "another prompt": lambda one: replace(one, prompt_tokens=one.prompt_tokens[::-1].copy()),
    "too long": lambda one: _of_length(one, LONGEST + 1),
    "much too long": lambda one: _of_length(one, 60_000),
    "a logprob of 80": lambda one: replace(one, behavior_logprobs=np.full_like(one.behavior_logprobs, 80)),
    "weights that come later": lambda one: _of_version(one, 0, 1000),
    "an incarnation that comes later": lambda one: _of_version(one, 1000, 0),
    TOO_OLD: lambda one: _of_version(one, 0, -MAX_LAG - 10),
    "another run's": lambda one: replace(one, identity=ANOTHER_RUN),
    "another sample's": lambda one: replace(one, tid=replace(one.tid, sample=one.tid.sample + 1)),
}
"""Pills by their fault; besides, there are `RUBBISH` and `SEGMENT`."""


def _request(prompt: int, response: int, token: int = 7, temperature: float = 1.0, top_k: int = 0) -> ScoreRequest:
    prompt_tokens, response_tokens = (np.full(length, token, np.int32) for length in (prompt, response))
    return ScoreRequest(
        prompt_tokens=prompt_tokens, response_tokens=response_tokens, temperature=temperature, top_k=top_k
    )


REQUESTS: dict[str, ScoreRequest] = {
    "a token beyond the vocabulary": _request(8, 4, VOCABULARY),
    "no prompt": _request(0, 4),
    "too long": _request(8, LONGEST + 1),
    "much too long": _request(8, 60_000),
    "a temperature near 0": _request(8, 4, temperature=1e-30),
    "a teacher's candidates": _request(8, 4, top_k=9),
}
"""Requests to the reward model by their fault; besides, there is `RUBBISH`."""
RUBBISH, SEGMENT = "no frame at all", "a segment"


class Hostile:
    """Takes leases and answers with pills, under another name whenever it gets no more of them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._generation = 0
        self._broker, self._asker = self._open(), self._open()
        """Two clients, as closing one cancels what other callers wait for."""
        self.sent: Counter[str] = Counter()
        self.quarantined = 0
        self.asked: Counter[str] = Counter()
        self.hoards = 0
        self.hoarded = 0

    async def close(self) -> None:
        await self._broker.close()
        await self._asker.close()

    async def send(self, rng: random.Random) -> None:
        """Send a few pills of one kind, unless the server is away."""
        try:
            _, version = await self._broker.versions.current()
            if version is not None:
                await self._answer(rng, version)
        except QuarantinedError:
            self.quarantined += 1
            self._broker = await self._anew(self._broker)
        except BrokerError:
            self._broker = await self._anew(self._broker)

    async def ask(self, rng: random.Random) -> None:
        """Send a few requests that no scorer can answer, before those of honest workers."""
        kind, worker = rng.choice(sorted({*REQUESTS, RUBBISH})), f"{HOSTILE}-{self._generation}"
        names = [new_request_name() for _ in range(JUNK)]
        try:
            if kind == RUBBISH:
                said = [part for name in names for part in (name, b"rubbish")]
                asker = worker, self._asker.session
                await self._asker.scoring._connection.script("score_ask", SCORER, *asker, LEASE_TTL_S, 1.0, *said)
            else:
                requests = dict.fromkeys(names, REQUESTS[kind])
                await self._asker.scoring.ask(SCORER, requests, ttl_s=LEASE_TTL_S, hold_s=1.0, worker=worker)
            self.asked[kind] += len(names)
        except BrokerError:
            self._asker = await self._anew(self._asker)

    async def hoard(self, rng: random.Random) -> None:
        """Take all available samples for a few times a lease's duration, under ever new names, and hand none in."""
        ends_at = time.monotonic() + rng.uniform(1, 4) * LEASE_TTL_S
        self.hoards += 1
        broker = Broker(self._url, RUN, timeout_s=TIMEOUT_S)
        while time.monotonic() < ends_at:
            with suppress(BrokerError):
                _, version = await broker.versions.current()
                if version is not None:
                    name = f"{HOSTILE}-{rng.getrandbits(32):x}"
                    held = await broker.leases.lease(name, version, 1000, LEASE_TTL_S)
                    evaluated = await broker.evaluations.lease(name, version, 1000, LEASE_TTL_S)
                    self.hoarded += len(held.leases) + len(evaluated.leases)
            await asyncio.sleep(AGAIN_S)
        with suppress(BrokerError):
            await broker.close()

    async def _lease(self, version: WeightVersion) -> tuple[Lease, ...]:
        """Lease samples, for which honest workers wait too."""
        for _ in range(ATTEMPTS):
            name = f"{HOSTILE}-{self._generation}"
            if leases := (await self._broker.leases.lease(name, version, LEASES, LEASE_TTL_S)).leases:
                return leases
            await asyncio.sleep(AGAIN_S)
        return ()

    async def _answer(self, rng: random.Random, version: WeightVersion) -> None:
        for lease in await self._lease(version):
            kinds = {*PILLS, RUBBISH, SEGMENT} - ({TOO_OLD} if version.step <= MAX_LAG else set())
            kind = rng.choice(sorted(kinds))
            if kind == SEGMENT:
                await self._poison_segment(lease, version)
            else:
                await self._submit(lease, version, kind)
            self.sent[kind] += 1

    async def _submit(self, lease: Lease, version: WeightVersion, kind: str) -> None:
        """Submit with the measures of an honest sample, because scripts see only the measures that a worker wrote."""
        honest = _honest(lease, version)
        frame = b"rubbish" if kind == RUBBISH else encode_trajectory(PILLS[kind](honest))
        submission = Submission(lease, frame, measures_of(frame, honest.spans), 0.0)
        await self._broker.leases._submissions._hand_in([submission])

    async def _poison_segment(self, lease: Lease, version: WeightVersion) -> None:
        """Append a poisoned segment and hand the lease back, for an honest worker to go on."""
        start = sum(len(segment.tokens) for segment in lease.segments)
        tokens = np.full(4, VOCABULARY, np.int32)
        segment = Segment(
            tid=lease.tid,
            index=len(lease.segments),
            start=start,
            tokens=tokens,
            behavior_logprobs=logprobs_of(tokens),
            loss_mask=np.ones(len(tokens), np.uint8),
            spans=(VersionSpan(start, start + len(tokens), version),),
        )
        await self._broker.leases.append(lease, segment, LEASE_TTL_S)
        await self._broker.leases.release([lease])

    async def _anew(self, broker: Broker) -> Broker:
        """Another client in place of this one, whose workers have another name."""
        self._generation += 1
        with suppress(BrokerError):
            await broker.close()
        return self._open()

    def _open(self) -> Broker:
        return Broker(self._url, RUN, timeout_s=TIMEOUT_S)


def _honest(lease: Lease, version: WeightVersion) -> Trajectory:
    """Return the sample as an engine generates it, but for its author."""
    tid: TrajectoryId = lease.tid
    length = response_length(tid)
    tokens = response_tokens(tid, 0, length, version)
    return Trajectory(
        tid=tid,
        identity=lease.identity,
        prompt_tokens=np.array(lease.prompt.token_ids, np.int32),
        response_tokens=tokens,
        behavior_logprobs=logprobs_of(tokens),
        loss_mask=np.ones(length, np.uint8),
        spans=(VersionSpan(0, length, version),),
        reward=1.0,
        rewards={},
        finish_reason="stop",
        worker=lease.worker,
    )
