"""The learner's verbs: claim the run, take a step's batch, commit it, re-assert after a server restart.

Take pins: asked again, a step gets the same batch until a checkpoint that contains the step is durable and
committed. Prompts that the learner feeds wait in the pool, in the order of their group ids, until a lease admits them.
"""

import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, islice

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.broker.connection.connection import Argument, Command, Connection, pairs
from headway.broker.errors import DamagedFrameError, ForeignRunError, FrameError
from headway.broker.schema import (
    CheckpointGroups,
    CheckpointMark,
    Claim,
    Group,
    Owner,
    Prompt,
    RunRules,
    SampleLimits,
    Trajectory,
    TrajectoryId,
    WeightVersion,
)
from headway.broker.security.sample_validation import check_lag, validate_sample
from headway.broker.wire.codec import decode, decode_trajectory, encode

from .weights import Versions

__all__ = ["Batches", "CheckpointGroups", "CheckpointMark", "Claim", "NotReady", "Owner", "TakenBatch", "new_identity"]

log = logging.getLogger(__name__)

_HEAD_BYTES = 256
_REPLICA_TIMEOUT_MS = 5000
_ON_A_SHARD = re.compile(rb"\d+/(payload|segment):[!-~]+")
"""The blobs that workers may put on the garbage list. A worker chooses their names; others than ASCII are
ignored."""
NOTHING = CheckpointGroups("", ())


def new_identity() -> str:
    """Returns the identity of a run that begins: 16 random hexadecimal digits."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class TakenBatch:
    """The groups that train one step; a batch without groups means that nothing will ever come."""

    step: int
    groups: tuple[Group, ...]
    waited_s: tuple[float, ...] = ()
    """For how long each group had waited for the learner, with all its samples, when it was taken; empty where the
    batch comes from the log."""


class NotReady(StrEnum):
    """Why a take gave no batch."""

    GROUPS = "groups"
    """Too few groups are finished."""
    STRAGGLERS = "stragglers"
    """Taking the groups that are ready would push an older, unfinished one over the bound on lag."""
    BYTES = "bytes"
    """The store is full: an early commit frees what was trained."""
    REJECTED = "rejected"
    """A sample of the batch could not be trained and is generated anew."""
    ANNOUNCE = "announce"
    """The newest announced weights are older than this step's: announce these."""
    REWIND = "rewind"
    """The server has lost the step's batch and workers are ahead: announce this step's weights under the new
    incarnation."""


@dataclass(frozen=True)
class _PinnedGroup:
    group: str
    round: int
    payloads: dict[int, str]
    """The names of the payloads by sample; a trimmed group lacks some."""


@dataclass(frozen=True)
class _RunFacts:
    """The facts that this learner tells a server again that has forgotten them."""

    rules: RunRules
    config: bytes
    committed_step: int
    watermark: str
    contained: tuple[str, ...]
    """The groups from the watermark on that the checkpoint had trained."""
    replayable_to: int
    is_rewound: bool
    is_anew: bool
    forks: Mapping[int, int]
    """The step that each incarnation went on from."""


class Batches:
    """The verbs by which a learner takes trained steps out of the run."""

    def __init__(self, connection: Connection, versions: Versions) -> None:
        self._connection = connection
        self._versions = versions
        self._known: _RunFacts | None = None
        self._pinned_before = frozenset[int]()
        """The steps whose batch an earlier learner took, by its own rules."""
        self.limits = SampleLimits()
        """The bounds of this run's samples; the caller sets them before the first take."""

    async def claim(
        self,
        *,
        checkpoint: CheckpointMark,
        rules: RunRules,
        config: bytes,
        resume: bool,
        contains: CheckpointGroups = NOTHING,
        replayable_to: int = 0,
        regenerate: bool = False,
        identity: str | None = None,
    ) -> Claim:
        """Takes the run over from its owner, from this checkpoint on.

        The groups that the checkpoint contains are settled, even if the server has lost them; batches from its step on
        stay pinned and will be delivered again; workers keep their leases. Where the run has committed more than
        the checkpoint contains, the learner promises with `replayable_to` to train the steps below that from
        its own record; if that is not enough the run forgets them, to be fed and generated again. With
        `regenerate` it forgets everything that the checkpoint does not contain.

        `identity`: of the run (`new_identity`); None: of the one that has the name, else a new one. Raises
        ForeignRunError where another run has the name, BrokerError where a fresh start meets a run that has advanced.
        """
        if identity is None:
            identity = await self._connection.join() or new_identity()
        await self._refuse_another(identity)
        self._connection.identity = identity
        previous = await self._connection.load_verbs()
        token = secrets.token_hex(16)
        flat = _flat(rules)
        reply = await self._connection.script(
            "claim",
            checkpoint.incarnation,
            checkpoint.step,
            int(resume),
            token,
            config,
            replayable_to,
            int(regenerate),
            contains.watermark,
            len(flat) // 2,
            *flat,
            *contains.groups,
        )
        self._connection.server_id = reply[1].decode()
        self._versions.forget()
        self._known = _RunFacts(
            rules=rules,
            config=config,
            committed_step=checkpoint.step,
            watermark=contains.watermark,
            contained=contains.groups,
            replayable_to=replayable_to,
            is_rewound=bool(reply[4]),
            is_anew=regenerate,
            forks={int(incarnation): int(step) for incarnation, step in pairs(reply[5])},
        )
        if previous:
            await self._connection.unload_verbs(previous)
        pinned = await self._connection.execute("ZRANGE", self._connection.keys.hidden("pinned"), 0, -1)
        self._pinned_before = frozenset(int(step) for step in pinned)
        await self._replicate()
        announced = int(reply[2]) if reply[2] else None
        return Claim(Owner(int(reply[0]), token), identity, announced, int(reply[3]), bool(reply[4]))

    async def take(self, owner: Owner, step: int, n: int) -> TakenBatch | NotReady:
        """Returns the n groups that train `step`, or why there are none yet.

        Raises FencedError, ServerRestartedError.
        """
        status, *rest = await self._connection.learner_script("take", owner, step, n)
        if status == b"exhausted":
            return TakenBatch(step, ())
        if status == b"wait":
            return NotReady(rest[0].decode())
        self._note_fork(owner, rest.pop(0))
        pinned = [_PinnedGroup(g.decode(), int(r), _payloads(names)) for g, r, _, *names in rest]
        groups = await self._fetch(owner, step, pinned)
        waited_s = tuple(float(waited) for _, _, waited, *_ in rest if waited)
        return NotReady.REJECTED if groups is None else TakenBatch(step, groups, waited_s)

    async def commit(self, owner: Owner, step: int, groups: Sequence[str] = (), watermark: str | None = None) -> int:
        """Frees the batches of all steps < `step`, which a durable checkpoint contains, and returns how many groups it
        freed.

        `groups` are trained too, even if the server has lost that. `watermark`: no group with a lower id that
        the run does not hold will ever be fed again, so the names of trained ones below it are forgotten.
        Idempotent.
        """
        freed, has_garbage = await self._connection.learner_script("commit", owner, step, watermark or "", *groups)
        if self._known:
            mark = max(self._known.watermark, watermark or "")
            self._known = replace(self._known, committed_step=max(step, self._known.committed_step), watermark=mark)
        if has_garbage:
            await self._free_garbage(owner)
        await self._replicate()
        return int(freed)

    async def drop(self, owner: Owner, step: int, groups: Sequence[str]) -> int:
        """Drops groups of the step's batch that teach nothing: other groups take their places in the next take.

        The server counts them and never accepts them again. Returns how many it dropped; idempotent.
        """
        return int(await self._connection.learner_script("drop", owner, step, *groups))

    async def settled_without_training(self) -> list[str]:
        """Returns the groups from the watermark on that a stated rule dropped: no learner need feed them again."""
        names = await self._connection.execute("ZRANGE", self._connection.keys.hidden("dropped"), 0, -1)
        return [name.decode() for name in names]

    async def reassert(
        self,
        owner: Owner,
        *,
        announced: WeightVersion | None,
        committed_groups: Sequence[str],
        pinned: Mapping[int, Sequence[TrajectoryId]],
    ) -> None:
        """After ServerRestartedError: makes the server, perhaps rolled back, agree with this learner, and
        adopts it.

        `pinned` are the batches taken and not yet committed. Feed again from the last checkpoint's cursor
        afterwards (and close the feed again). Raises FencedError where another learner has claimed the run
        since.
        """
        assert self._known is not None, "reassert before claim"
        known = self._known
        rules = _flat(known.rules)
        arguments: list[Argument] = [owner.incarnation, owner.token]
        arguments += [announced.incarnation, announced.step] if announced else ["", ""]
        arguments += [known.watermark, known.committed_step, known.config]
        arguments += [known.replayable_to, int(known.is_rewound), int(known.is_anew)]
        arguments += [len(rules) // 2, *rules, len(known.forks), *chain.from_iterable(known.forks.items())]
        settled = {*committed_groups, *(group for group in known.contained if group >= known.watermark)}
        arguments += [len(settled), *sorted(settled)]
        for step in sorted(pinned):
            for group, (round_, size) in _rounds(pinned[step]).items():
                arguments += [step, group, round_, size]
        await self._connection.load_verbs()
        self._connection.server_id = (await self._connection.script("reassert", *arguments)).decode()
        await self._versions.restore(owner)

    def _note_fork(self, owner: Owner, forked_to: bytes) -> None:
        """Notes from which step on this learner makes other weights than earlier ones. It tells this to a server that
        loses its last second."""
        if self._known and forked_to:
            step = min(int(forked_to), self._known.forks.get(owner.incarnation, int(forked_to)))
            self._known = replace(self._known, forks={**self._known.forks, owner.incarnation: step})

    async def _refuse_another(self, identity: str) -> None:
        """Raises ForeignRunError where another run has the name, before this client touches anything of it."""
        held = await self._connection.execute("GET", self._connection.keys("identity"))
        if held is not None and held.decode() != identity:
            raise ForeignRunError(
                f"Run {self._connection.run} at {self._connection.url} is another run (identity {held.decode()}) than"
                " the one that is begun or resumed here: go on with that one (--resume, in the directory that holds"
                " its checkpoints), choose another run.name, or start anew with --overwrite."
            )

    async def _fetch(self, owner: Owner, step: int, pinned: Sequence[_PinnedGroup]) -> tuple[Group, ...] | None:
        replies = await self._connection.pipeline([command for one in pinned for command in self._gets(one)])
        blobs = chain.from_iterable(reply if isinstance(reply, list) else [reply] for reply in replies)
        groups = []
        for one in pinned:
            values = list(islice(blobs, 1 + len(one.payloads)))
            groups.append(await self._decode_or_reject(owner, step, one, values))
        whole = tuple(group for group in groups if group is not None)
        return whole if len(whole) == len(groups) else None

    def _gets(self, pinned: _PinnedGroup) -> list[Command]:
        """Returns commands that read the prompt and every payload of a group; one command where all are in one slot."""
        keys = self._connection.keys
        names = [keys.prompt(pinned.group), *(keys.blob(name) for name in pinned.payloads.values())]
        if all(name.startswith(keys.prefix) for name in names):
            return [("MGET", *names)]
        return [("GET", name) for name in names]

    async def _decode_or_reject(
        self, owner: Owner, step: int, pinned: _PinnedGroup, blobs: Sequence[bytes | None]
    ) -> Group | None:
        """Returns the group, or None after it has sent back a sample that cannot be trained, to be generated anew."""
        blob, trajectories = blobs[0], list[Trajectory]()
        where: str = f"prompt:{pinned.group}"
        try:
            prompt = decode(blob or b"", Prompt)
            prompt_tokens = np.array(prompt.token_ids, np.int32)
            for sample, blob in zip(pinned.payloads, blobs[1:], strict=True):
                tid = TrajectoryId(pinned.group, pinned.round, sample)
                where = str(tid)
                trajectories.append(self._trainable(tid, prompt_tokens, blob, WeightVersion(owner.incarnation, step)))
        except FrameError as error:
            log.warning("%s is not trained but generated anew: %s", where, error)
            what = (step, pinned.group, pinned.round, where, str(error), (blob or b"")[:_HEAD_BYTES])
            is_damaged = blob is None or isinstance(error, DamagedFrameError)
            kind = "prompt" if where.startswith("prompt:") else "damaged" if is_damaged else "sample"
            await self._connection.learner_script("reject", owner, *what, kind)
            return None
        return Group(prompt=prompt, round=pinned.round, trajectories=tuple(trajectories))

    def _trainable(
        self, tid: TrajectoryId, prompt_tokens: NDArray[np.int32], blob: bytes | None, newest: WeightVersion
    ) -> Trajectory:
        """Decodes a trajectory. Raises FrameError for anything but a sample of this prompt by weights up to
        `newest`."""
        trajectory = _decode_as(tid, blob)
        validate_sample(trajectory, prompt_tokens, self.limits, identity=self._connection.identity, newest=newest)
        rules = self._known.rules if self._known else None
        is_by_these_rules = newest.step not in self._pinned_before  # else an earlier learner had a higher bound
        if rules is not None and rules.on_over_bound != "mask" and is_by_these_rules:
            check_lag(trajectory, newest.step, rules.max_lag)
        return trajectory

    async def _free_garbage(self, owner: Owner) -> None:
        """Frees blobs on other shards that scripts could not free."""
        freed: list[bytes] = []
        while True:
            last = freed[-1] if freed else b""
            names = await self._connection.learner_script("garbage", owner, len(freed), last)
            if not names:
                return
            keys = [self._connection.keys.blob(name.decode()) for name in names if _ON_A_SHARD.fullmatch(name)]
            await self._connection.pipeline([("UNLINK", key) for key in keys])
            freed = names

    async def _replicate(self) -> None:
        """Waits until replicas, where the run asks for some, have what the learner wrote."""
        replicas = self._known.rules.replicas if self._known else 0
        if replicas and not await self._connection.make_durable(replicas, _REPLICA_TIMEOUT_MS):
            log.warning("fewer than broker.replicas=%d replicas keep up with the server", replicas)


def _payloads(names: Sequence[bytes | None]) -> dict[int, str]:
    return {sample: name.decode() for sample, name in enumerate(names) if name is not None}


def _decode_as(tid: TrajectoryId, blob: bytes | None) -> Trajectory:
    if blob is None:
        raise FrameError(f"{tid}: the payload is missing")
    trajectory = decode_trajectory(blob)
    if trajectory.tid != tid:
        raise FrameError(f"{tid}: the payload is that of {trajectory.tid}")
    return trajectory


def _flat(rules: RunRules) -> list[Argument]:
    settings = msgspec.structs.asdict(rules)
    return [part for name, value in settings.items() for part in (name, "" if value is None else value)]


def _rounds(tids: Sequence[TrajectoryId]) -> dict[str, tuple[int, int]]:
    """Returns the round and the number of samples of each group."""
    sizes: dict[str, tuple[int, int]] = {}
    for tid in tids:
        sizes[tid.group] = (tid.round, max(tid.sample + 1, sizes.get(tid.group, (0, 0))[1]))
    return sizes


_UNREGISTERED_TTL_S = 600


class PromptVerbs:
    """The verbs by which a learner feeds prompts into the run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def feed(self, prompts: Sequence[Prompt], owner: Owner) -> int:
        """Registers the groups that the run does not know yet, and returns their number. Idempotent.

        The learner feeds again from the checkpoint's cursor after a claim and after a re-assertion: groups that are
        held, trained or dropped are left alone. Groups are begun in the order of their ids.
        """
        if not prompts:
            return 0
        keys = self._connection.keys
        # NX: the blob of a group that is already registered must not get a TTL.
        blobs = [("SET", keys.prompt(p.group), encode(p), "NX", "EX", _UNREGISTERED_TTL_S) for p in prompts]
        groups = [argument for p in prompts for argument in (p.group, p.num_samples, len(p.token_ids))]
        new, *missing = await self._connection.learner_script("feed", owner, *groups, before=blobs)
        if not missing:
            return int(new)
        names = {group.decode() for group in missing}  # an abandoned blob's TTL ended in between
        return int(new) + await self.feed([p for p in prompts if p.group in names], owner)

    async def close_feed(self, owner: Owner) -> None:
        """Says that no more prompts will come, so that the last, short batch can be taken. A claim opens the feed
        again."""
        await self._connection.learner_script("close_feed", owner)

    async def waiting(self) -> tuple[int, bool]:
        """Returns the number of groups fed and not yet admitted, and whether prompts were damaged and must be fed
        again."""
        keys = self._connection.keys
        ahead, has_lost = await self._connection.pipeline(
            [("ZCARD", keys.hidden("pool")), ("EXISTS", keys.hidden("lost"))]
        )
        return int(ahead), bool(has_lost)
