"""The learner's side of broadcasts: forms a group for each set of members, sends, drops who did not answer.

What goes wrong here is told, never raised: a version that could not be broadcast is pulled. Each of the three
waits (twice for a group to form, once for a version to arrive) ends by the broadcast deadline; after a failed
broadcast a second more hears what the members say.
"""

from collections.abc import Callable, Sequence

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs do not re-export it

from broker.errors import WeightSyncError
from broker.schema import BroadcastGroup, WeightVersion, WorkerInfo

from .config import WeightsConfig
from .deadline import Deadline
from .membership import Member, eligible, is_new_epoch_due, still_missed
from .transports.base import BroadcastGroupTransport
from .transports.forming import check_transport, form_group
from .transports.rendezvous import Rendezvous, host_store

_FORM_ATTEMPTS = 2
_NACK_WAIT_S = 1.0


class Sender:
    """Owns the store and the current group. Epochs count up from `last_epoch` for the whole run."""

    def __init__(
        self,
        run: str,
        incarnation: int,
        last_epoch: int,
        address: str,
        interface: str,
        config: WeightsConfig,
        put_group: Callable[[BroadcastGroup], None],
    ) -> None:
        check_transport(config.transport)
        self._run = run
        self._incarnation = incarnation
        self._epoch = last_epoch
        self._address = address
        self._interface = interface
        self._config = config
        self._put_group = put_group
        self._store: TCPStore | None = host_store(interface, config.broadcast_timeout_s)
        self._members: tuple[Member, ...] = ()
        self._rendezvous: Rendezvous | None = None
        self._transport: BroadcastGroupTransport | None = None
        self._missed: dict[str, WeightVersion] = {}

    def prepare(self, workers: Callable[[], Sequence[WorkerInfo]], version: WeightVersion) -> tuple[int, str]:
        """(epoch that `version` goes to, what went wrong). Epoch 0: nobody to send to."""
        failures: list[str] = []
        for _ in range(_FORM_ATTEMPTS):
            alive = workers()
            self._missed = still_missed(alive, self._missed)
            wanted = eligible(alive, self._missed)
            if not is_new_epoch_due(wanted, self._members, broken=self._transport is None):
                return self._epoch, "; ".join(failures)
            self._leave()
            if not wanted:
                return 0, "; ".join(failures)
            failure = self._form(wanted, version)
            if not failure:
                return self._epoch, "; ".join(failures)
            failures.append(failure)
        return 0, "; ".join(failures)

    def send(self, version: WeightVersion, buckets: Sequence[torch.Tensor]) -> tuple[tuple[str, ...], str]:
        """(members that hold and verified `version`, what went wrong). A failure ends the epoch."""
        deadline = Deadline(self._config.broadcast_timeout_s)
        failure = self._broadcast(buckets, deadline)
        if failure:
            # Closing our end fails the others at once, so those who still run can say so.
            self._leave_transport()
            deadline = Deadline(min(_NACK_WAIT_S, self._config.broadcast_timeout_s))
        answers = self._answers(version, deadline)
        reached = tuple(worker for worker, answer in answers.items() if not answer)
        lost = [member.worker for member in self._members if member.worker not in reached]
        if lost:
            reasons = ", ".join(f"{worker} ({answers.get(worker) or 'no answer'})" for worker in lost)
            failure = f"{failure or 'broadcast'}; not reached: {reasons}"
            self._missed.update(dict.fromkeys(lost, version))
        if failure:
            self._leave()
        return reached, failure

    def close(self) -> None:
        """Leave the group and stop the store."""
        self._leave()
        self._store = None

    def _form(self, wanted: tuple[Member, ...], version: WeightVersion) -> str:
        """Start the next epoch; empty when it stands, else what kept it from it."""
        deadline = Deadline(self._config.broadcast_timeout_s)
        assert self._store is not None
        self._epoch += 1
        group = self._group(wanted, self._store.port)
        rendezvous = Rendezvous(self._store, self._run, group)
        self._put_group(group)
        absent = rendezvous.await_members(group.members, deadline)
        rendezvous.decide(stands=not absent)
        if absent:
            self._missed.update(dict.fromkeys(absent, version))
            return f"group {self._epoch} not formed, absent after {deadline.seconds:g} s: {', '.join(absent)}"
        try:
            self._transport = form_group(
                self._config.transport, rendezvous.store, 0, len(wanted) + 1, self._interface, deadline
            )
        except WeightSyncError as error:
            # Who failed is unknown. All are asked again: the one that is gone will then not check in.
            return str(error)
        self._members, self._rendezvous = wanted, rendezvous
        return ""

    def _group(self, members: tuple[Member, ...], store_port: int) -> BroadcastGroup:
        return BroadcastGroup(
            epoch=self._epoch,
            incarnation=self._incarnation,
            transport=self._config.transport,
            store_host=self._address,
            store_port=store_port,
            timeout_s=self._config.broadcast_timeout_s,
            members=tuple(member.worker for member in members),
        )

    def _broadcast(self, buckets: Sequence[torch.Tensor], deadline: Deadline) -> str:
        assert self._transport is not None
        try:
            for bucket in buckets:
                self._transport.broadcast(bucket, deadline)
        except WeightSyncError as error:
            return str(error)
        return ""

    def _answers(self, version: WeightVersion, deadline: Deadline) -> dict[str, str]:
        assert self._rendezvous is not None
        return self._rendezvous.await_acknowledgements(version, [member.worker for member in self._members], deadline)

    def _leave_transport(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _leave(self) -> None:
        self._leave_transport()
        self._members, self._rendezvous = (), None
