"""The learner's side of broadcasts: forms a group for each set of members, sends, and drops members that did not
answer.

A failed broadcast is returned as a text and never raised: workers pull the version instead. Each of the three waits
(twice for a group to form, once for a version to arrive) ends by the broadcast deadline; after a failed broadcast the
learner waits for the members' answers for a second more. Members that do not connect are not tried again for a while
(`Backoff`).

A worker that missed a deadline stays out until its heartbeat shows a version at least as new as the one that it
missed: it has pulled, so it runs again. This needs no clock.

With `staging: none` members must be paused while they receive. So they receive in waves, some members at a time. Each
wave has a process group and a deadline of its own, so a wave that fails costs the next one nothing.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from headway.broker.errors import BrokerError, WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.status import WorkerInfo
from headway.broker.schema.weights import BroadcastGroup
from headway.broker.user_code.import_paths import ImportRoots

from .config import WeightsConfig
from .limits import Deadline
from .transports.base import BroadcastGroupTransport
from .transports.broadcast import check_transport, form_group, pipelined
from .transports.rendezvous import BlockingStore, Rendezvous


class Member(NamedTuple):
    """One worker process: a restarted worker keeps its name but is another member."""

    worker: str
    host: str
    pid: int


def eligible(workers: Iterable[WorkerInfo], missed: Mapping[str, WeightVersion]) -> tuple[Member, ...]:
    """Return the alive workers that take part in the next broadcast, sorted by name."""
    chosen = (info for info in workers if _takes_part(info) and not is_behind(info, missed))
    return tuple(sorted(Member(info.worker, info.host, info.pid) for info in chosen))


def _takes_part(info: WorkerInfo) -> bool:
    return info.wants_broadcast and info.version is not None and info.state != "draining"


def follows_by_pull(info: WorkerInfo) -> bool:
    """Return whether the worker joins no group as long as it runs, and so can use deltas."""
    return not info.wants_broadcast and info.state != "draining"


def is_behind(info: WorkerInfo, missed: Mapping[str, WeightVersion]) -> bool:
    """Return whether a worker that missed a version has not yet shown that it caught up."""
    version = missed.get(info.worker)
    return version is not None and (info.version is None or info.version < version)


def still_missed(workers: Iterable[WorkerInfo], missed: Mapping[str, WeightVersion]) -> dict[str, WeightVersion]:
    """Return `missed` without the workers that caught up and those that are gone."""
    return {info.worker: missed[info.worker] for info in workers if info.worker in missed and is_behind(info, missed)}


_LONGEST_S = 600.0


class Backoff:
    """The last attempts to form a group of the same members. Members that all checked in but cannot connect to each
    other are left to pull for a while: every attempt costs a deadline.

    After the first failure the learner tries again at once, as a member may have died. After further ones it waits for
    two deadlines, doubled each time up to ten minutes: probably one host cannot reach another.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._members: tuple[Member, ...] = ()
        self._why = ""
        self._rest = Deadline(0.0)

    def failed(self, members: tuple[Member, ...], why: str) -> None:
        """Note that a group of `members`, who had all checked in, was not formed, and why."""
        rest_s = min(2 * (self._rest.seconds or self._deadline_s), _LONGEST_S) if members == self._members else 0.0
        self._members, self._why, self._rest = members, why, Deadline(rest_s)

    def formed(self) -> None:
        """Note that a group was formed, and forget earlier failures."""
        self._members = ()

    def why_not(self, members: tuple[Member, ...]) -> str:
        """Return why no group of `members` should be formed now, or ""."""
        if members != self._members or self._rest.is_over():
            return ""
        return f"{self._why}; workers pull, and it is tried again in {self._rest.remaining():.0f} s"


_FORM_ATTEMPTS = 2
_NACK_WAIT_S = 1.0

Wire = Callable[[], Iterable[torch.Tensor]]
"""A version's buckets and its seal, in order, as often as they are asked for."""


class _Wave(NamedTuple):
    """Members that receive a version together."""

    workers: tuple[str, ...]
    transport: BroadcastGroupTransport


class _Group(NamedTuple):
    """One epoch, as it was formed."""

    members: tuple[Member, ...]
    rendezvous: Rendezvous
    waves: tuple[_Wave, ...]


class Sender:
    """Owns the current group. Epochs number the groups, and count up from `last_epoch` for the whole run.

    Groups are formed, and members answer, through the broker; every call raises the broker's errors.
    """

    def __init__(
        self,
        blocking_store: BlockingStore,
        incarnation: int,
        last_epoch: int,
        address: str,
        config: WeightsConfig,
        put_group: Callable[[BroadcastGroup], None],
        roots: ImportRoots | None = None,
    ) -> None:
        check_transport(config.transport, roots)
        self._roots = roots
        self._blocking_store = blocking_store
        self._incarnation = incarnation
        self._epoch = last_epoch
        self._address = address
        self._config = config
        self._put_group = put_group
        self._group: _Group | None = None
        self._missed: dict[str, WeightVersion] = {}
        """The version that each worker was last seen to miss: the worker is in no group until it has caught up."""
        self._barred = set[str]()
        """The workers whose messages were refused while a group formed: they are in no group any more, and pull."""
        self._backoff = Backoff(config.broadcast_timeout_s)

    def prepare(self, workers: Callable[[], Sequence[WorkerInfo]], version: WeightVersion) -> tuple[int, str]:
        """Form the group for `version` where the current one will not do. Returns its epoch (0: no member to send to)
        and what went wrong, or ""."""
        failures: list[str] = []
        for _ in range(_FORM_ATTEMPTS):
            alive = workers()
            self._missed = still_missed(alive, self._missed)
            wanted = eligible((info for info in alive if info.worker not in self._barred), self._missed)
            if self._group is not None and self._group.members == wanted:  # a group that failed is None
                return self._epoch, "; ".join(failures)
            self._leave()
            if not wanted:
                return 0, "; ".join(failures)
            if why_not := self._backoff.why_not(wanted):
                return 0, why_not
            failure = self._form(wanted, version)
            if not failure:
                self._backoff.formed()
                return self._epoch, "; ".join(failures)
            failures.append(failure)
        return 0, "; ".join(failures)

    def send(self, version: WeightVersion, wire: Wire) -> tuple[tuple[str, ...], str]:
        """Send `version`, which was offered, to the group that `prepare` formed. Returns the members that hold and
        verified it, and what went wrong, or "". A failure ends the epoch after the remaining waves were served.

        The next bucket of `wire` is asked for while the one before is on its way.
        """
        assert self._group is not None
        _, rendezvous, waves = self._group
        reached: list[str] = []
        failures: list[str] = []
        try:
            for number, wave in enumerate(waves):
                if number:
                    rendezvous.begin(version, number)
                some, failure = self._send_to(wave, rendezvous, version, wire())
                reached += some
                failures += [failure] if failure else []
            if not failures:
                rendezvous.forget(version, reached, len(waves))
        except BrokerError:
            self._leave()  # it is not known which member received what
            raise
        if failures:
            self._leave()
        return tuple(reached), "; ".join(failures)

    def _send_to(
        self, wave: _Wave, rendezvous: Rendezvous, version: WeightVersion, wire: Iterable[torch.Tensor]
    ) -> tuple[tuple[str, ...], str]:
        deadline = Deadline(self._config.broadcast_timeout_s)
        failure = _broadcast(wave.transport, wire, deadline)
        if failure:
            # Closing the learner's end fails the members' calls at once, so that those still running can answer.
            wave.transport.close()
            deadline = Deadline(min(_NACK_WAIT_S, self._config.broadcast_timeout_s))
        answers = rendezvous.await_acknowledgements(version, wave.workers, deadline)
        reached = tuple(worker for worker, answer in answers.items() if not answer)
        lost = [worker for worker in wave.workers if worker not in reached]
        if lost:
            reasons = ", ".join(f"{worker} ({answers.get(worker) or 'no answer'})" for worker in lost)
            failure = f"{failure or 'broadcast'}; not reached: {reasons}"
            self._missed.update(dict.fromkeys(lost, version))
        return reached, failure

    def close(self) -> None:
        """Leave the group."""
        self._leave()

    def _form(self, wanted: tuple[Member, ...], version: WeightVersion) -> str:
        """Start the next epoch. Returns what kept its group from being formed, or ""."""
        deadline = Deadline(self._config.broadcast_timeout_s)
        self._epoch += 1
        group = self._record(wanted)
        rendezvous = Rendezvous(self._blocking_store, group)
        rendezvous.open()
        self._put_group(group)
        absent = rendezvous.await_members(group.members, deadline)
        rendezvous.decide(stands=not absent)
        if absent:
            self._missed.update(dict.fromkeys(absent, version))
            return f"group {self._epoch} not formed, absent after {deadline.seconds:g} s: {', '.join(absent)}"
        waves: list[_Wave] = []
        for number, workers in enumerate(_batched(group.members, group.at_once)):
            store, size = rendezvous.store_of(number), len(workers) + 1
            try:
                transport = form_group(self._config.transport, store, 0, size, self._address, deadline, self._roots)
            except WeightSyncError as error:
                # It is unknown which member failed, unless one sent a message that no worker of ours sends. All others
                # are asked again: one that is gone will then not check in.
                _close(waves)
                self._barred |= {store.refused} - {""}
                self._backoff.failed(wanted, str(error))
                return str(error)
            waves.append(_Wave(workers, transport))
        self._group = _Group(wanted, rendezvous, tuple(waves))
        return ""

    def _record(self, members: tuple[Member, ...]) -> BroadcastGroup:
        """Return the record by which members learn of the epoch that begins."""
        return BroadcastGroup(
            epoch=self._epoch,
            incarnation=self._incarnation,
            transport=self._config.transport,
            meeting=secrets.token_hex(8),
            learner=self._address,
            timeout_s=self._config.broadcast_timeout_s,
            members=tuple(member.worker for member in members),
            at_once=self._at_once(len(members)),
        )

    def _at_once(self, members: int) -> int:
        """Return how many members receive together: all, where they generate meanwhile; with `staging: none`, where
        they are paused, the share `swaps_at_once`, so that the others generate."""
        return max(1, int(self._config.swaps_at_once * members)) if self._config.staging == "none" else members

    def _leave(self) -> None:
        if self._group is not None:
            _close(self._group.waves)
            with suppress(BrokerError):  # else it ends by itself
                self._group.rendezvous.end()
        self._group = None


def _close(waves: Iterable[_Wave]) -> None:
    for wave in waves:
        wave.transport.close()


def _broadcast(transport: BroadcastGroupTransport, wire: Iterable[torch.Tensor], deadline: Deadline) -> str:
    """Broadcast all of `wire`. Returns what went wrong, or ""."""
    try:
        for _ in pipelined(transport, wire, deadline):
            pass
    except WeightSyncError as error:
        return str(error)
    return ""


def _batched(members: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(members[first : first + size]) for first in range(0, len(members), size)]
