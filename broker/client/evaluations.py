"""Evaluation samples: the learner asks for them, and workers sample them beside those that are trained.

    learner   ask, before it offers version V ─────► progress, after each step ─► results, once all are in ─► end
    worker    swaps V in ─► lease ─► generate ─► submit ─► lease (renews, and takes what a dead worker left) ─► ...

An evaluation is of one weight version. Its samples have leases as those that are trained do, and nothing else in
common with them: they are in no group, are not admitted, have no lag, and no counter of the training contains them.

Promised: a result counts for version V only if its worker says that V sampled all of its tokens, and at most one result
counts for each sample. The samples of a worker that dies, or hands them back, go to other workers that hold V. A new
learner finds no evaluation of an earlier one.

A sample that is under way for a quarter of the time for which workers keep the version is copied to others that have
room, so that no worker can keep it for itself; its first result counts.

Not promised: that an evaluation ends. Workers that have moved on do not come back to V; the learner sees for how long
no worker was at work, and ends what cannot be completed.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from headway.broker.connection.connection import Argument, Connection
from headway.broker.schema import Owner, Prompt, WeightVersion
from headway.broker.wire.codec import decode, encode

_PROMPTS_AT_A_TIME = 100
_NO_EVALUATION = -1
MOST_COMPONENT_BYTES = 20_000
"""The same bound stands in evaluations.lua."""


class EvaluationOutcome(StrEnum):
    """The server's answer to a result."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """This sample is done already under the same lease: the first reply was lost."""
    FENCED = "fenced"
    """The worker holds the lease no longer, or the evaluation has ended."""
    OTHER_VERSION = "other version"
    """Other weights sampled some of it, so it does not count, and will be sampled again."""


@dataclass(frozen=True)
class EvaluationLease:
    """The right, until a deadline, to sample a held-out prompt with `version`."""

    version: WeightVersion
    sample: int
    """Its number in the evaluation: the samples of a prompt follow each other."""
    token: str
    prompt: Prompt
    worker: str


@dataclass(frozen=True)
class EvaluationReply:
    """The server's answer to a worker that holds the weights of an evaluation."""

    left: int | None
    """The samples that are not done, those that workers have leased among them; None: the version is not, or no longer,
    evaluated."""
    lost: frozenset[int]
    """The samples whose leases the worker had and has lost: their generation must stop."""
    leases: tuple[EvaluationLease, ...] = ()


@dataclass(frozen=True)
class EvaluationResult:
    """The result of one sample."""

    passed: bool
    reward: float
    response_tokens: int
    components: Mapping[str, float] = field(default_factory=dict)
    """The score of each reward function, its further measures and the environment's, by name."""


@dataclass(frozen=True)
class EvaluationProgress:
    """The progress of an evaluation."""

    samples: int
    done: int
    mixed: int
    """Samples that did not count, as other weights sampled some of their tokens; they are sampled again."""
    quiet_s: float
    """Seconds since a worker last handed a sample in, or had one for no longer than it keeps the version; at first,
    since the learner asked."""
    results: tuple[EvaluationResult, ...] = ()
    """The results in the order of the samples, once all are done; before, none."""


class Evaluations:
    """The verbs of learner and workers for evaluations, which are named by the version that they are of."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def ask(
        self, owner: Owner, version: WeightVersion, prompts: Sequence[Prompt], samples: int, keep_s: float = 120.0
    ) -> None:
        """Asks for `samples` samples of each prompt, by workers that keep the version for `keep_s` seconds. The learner
        calls it before it offers the version: a worker asks once it holds the version, and not again if there is
        nothing. Idempotent; raises FencedError, ServerRestartedError."""
        for first in range(0, len(prompts), _PROMPTS_AT_A_TIME):
            frames = [encode(prompt) for prompt in prompts[first : first + _PROMPTS_AT_A_TIME]]
            said: list[Argument] = [str(version), len(prompts), samples, keep_s, first, *frames]
            await self._connection.learner_script("evaluate", owner, *said)

    async def progress(self, owner: Owner, version: WeightVersion) -> EvaluationProgress | None:
        """Returns how far the evaluation is; None where there is none. Raises as `ask` does."""
        reply = await self._connection.learner_script("evaluation", owner, str(version), "look")
        if not reply:
            return None
        samples, done, mixed, quiet_s, *results = reply
        return EvaluationProgress(samples, done, mixed, float(quiet_s), tuple(map(_result, results)))

    async def end(self, owner: Owner, version: WeightVersion, *, is_skipped: bool = False) -> None:
        """Forgets the evaluation, whether or not its samples are done. One that `is_skipped` gave no result, and is
        counted. Idempotent; raises as `ask` does."""
        await self._connection.learner_script("evaluation", owner, str(version), "skip" if is_skipped else "end")

    async def lease(
        self, worker: str, version: WeightVersion, count: int, ttl_s: float, held: Sequence[EvaluationLease] = ()
    ) -> EvaluationReply:
        """Renews the leases in `held`, and leases up to `count` more samples for an engine that holds exactly
        `version`. A worker gets no more than its share of the samples at a time. Raises FrameError where a prompt is
        damaged."""
        left, lost, *granted = await self._connection.script(
            "evaluation_lease",
            str(version),
            count,
            ttl_s,
            secrets.token_hex(8),
            self._holder(worker),
            self._connection.recipe,
            *_samples(held),
            absent=[_NO_EVALUATION, []],
        )
        leases = tuple(
            EvaluationLease(version, sample, token.decode(), decode(frame, Prompt), worker)
            for sample, token, frame in granted
        )
        return EvaluationReply(None if left == _NO_EVALUATION else left, frozenset(lost), leases)

    async def submit(
        self, lease: EvaluationLease, result: EvaluationResult, versions: Sequence[WeightVersion]
    ) -> EvaluationOutcome:
        """Hands a result in. `versions` are those that sampled the response; the result counts only if all of them are
        the lease's."""
        outcome = await self._connection.script(
            "evaluation_submit",
            str(lease.version),
            lease.sample,
            lease.token,
            str(min(versions)),
            str(max(versions)),
            int(result.passed),
            repr(float(result.reward)),
            result.response_tokens,
            self._holder(lease.worker),
            _components(result),
        )
        return EvaluationOutcome(outcome.decode())

    async def release(self, leases: Sequence[EvaluationLease]) -> None:
        """Hands leases of one version back at once, for other workers to take. Idempotent."""
        if leases:
            version = str(leases[0].version)
            await self._connection.script("evaluation_release", version, *_samples(leases), absent=None)

    def _holder(self, worker: str) -> str:
        return f"{worker} {self._connection.session}"


def _samples(leases: Sequence[EvaluationLease]) -> list[Argument]:
    return [argument for lease in leases for argument in (lease.sample, lease.token)]


def _result(said: Any) -> EvaluationResult:
    passed, reward, tokens, *rest = said.split(b" ", 3)
    try:  # a worker's own words
        components = msgspec.json.decode(rest[0], type=dict[str, float]) if rest else {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        components = {}
    return EvaluationResult(passed == b"1", float(reward), int(tokens), components)


def _components(result: EvaluationResult) -> bytes:
    """Return the components as JSON: the first ones, as far as the server takes them."""
    kept = dict(result.components)
    while len(encoded := msgspec.json.encode(kept)) > MOST_COMPONENT_BYTES:
        kept.popitem()
    return encoded
