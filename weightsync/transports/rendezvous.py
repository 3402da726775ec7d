"""Where an epoch's members check in, learn whether it stands, and acknowledge versions: keys in a TCPStore.

{run}/{incarnation}/{epoch}/in/{worker}            how often this worker's name checked in
                           /verdict                go | void
                           /turn/{version}/{wave}   this wave of members receives now
                           /ack/{version}/{worker}  empty, or what went wrong
                           /wave/{wave}/...         torch's own keys of that wave's process group
"""

from collections.abc import Iterable
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch's stubs do not re-export them

from broker.errors import WeightSyncError
from broker.schema import BroadcastGroup, WeightVersion
from weightsync.deadline import Deadline
from weightsync.transports.listening import listen

_WAIT_S = 0.005


def host_store(address: str, timeout_s: float) -> TCPStore:
    """A store in this process, which listens at `address` only. Raises WeightSyncError where it cannot."""
    listener = listen(address)
    bound, port = listener.getsockname()[:2]
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(
        bound, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def connect_store(group: BroadcastGroup, timeout_s: float) -> TCPStore:
    """A member's connection to the learner's store."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(group.store_host, group.store_port, is_master=False, wait_for_workers=False, timeout=timeout)


class Rendezvous:
    """One epoch in a store. Raises WeightSyncError where the store's process is gone."""

    def __init__(self, store: TCPStore, run: str, group: BroadcastGroup) -> None:
        self.store = PrefixStore(f"{run}/{group.incarnation}/{group.epoch}", store)
        self._what = f"broadcast group {group.epoch}"

    def check_in(self, worker: str) -> bool:
        """False if somebody of this name already did: a restarted worker must not pose as its predecessor."""
        return int(self.store.add(f"in/{worker}", 1)) == 1

    def await_members(self, members: Iterable[str], deadline: Deadline) -> tuple[str, ...]:
        """Those who did not check in by the deadline."""
        return self._await_all({worker: f"in/{worker}" for worker in members}, deadline)

    def decide(self, stands: bool) -> None:
        """Tell those who checked in, now or late, whether the group will be formed."""
        self.store.set("verdict", "go" if stands else "void")

    def await_verdict(self, deadline: Deadline) -> bool:
        """True if the group is to be formed now."""
        while not self.store.check(["verdict"]):
            deadline.check(f"{self._what}: the learner's word whether it stands")
            deadline.pause(_WAIT_S)
        return self.store.get("verdict") == b"go"

    def begin(self, version: WeightVersion, wave: int) -> None:
        """Tell a wave of members that `version` is sent to it from now on."""
        self.store.set(_turn_key(version, wave), "")

    def await_wave(self, version: WeightVersion, wave: int, deadline: Deadline) -> None:
        """Until `version` is sent to this wave."""
        while not self.store.check([_turn_key(version, wave)]):
            deadline.check(f"{self._what}: this worker's turn to receive version {version}")
            deadline.pause(_WAIT_S)

    def store_of(self, wave: int) -> PrefixStore:
        """For the process group of one wave."""
        return PrefixStore(f"wave/{wave}", self.store)

    def acknowledge(self, version: WeightVersion, worker: str, failure: str) -> None:
        """Tell the learner that `worker` holds `version`, or (failure not empty) why it does not."""
        self.store.set(_ack_key(version, worker), failure)

    def await_acknowledgements(
        self, version: WeightVersion, members: Iterable[str], deadline: Deadline
    ) -> dict[str, str]:
        """What each member answered by the deadline: an empty text for success; silent ones are absent."""
        keys = {worker: _ack_key(version, worker) for worker in members}
        silent = self._await_all(keys, deadline)
        return {worker: self.store.get(key).decode() for worker, key in keys.items() if worker not in silent}

    def forget(self, version: WeightVersion, members: Iterable[str], waves: int) -> None:
        """All members have acknowledged `version`: the store keeps what nobody deletes."""
        for worker in members:
            self.store.delete_key(_ack_key(version, worker))
        for wave in range(1, waves):
            self.store.delete_key(_turn_key(version, wave))

    def _await_all(self, keys: dict[str, str], deadline: Deadline) -> tuple[str, ...]:
        missing = dict(keys)
        while True:
            missing = {worker: key for worker, key in missing.items() if not self.store.check([key])}
            if not missing or deadline.is_over():
                return tuple(missing)
            deadline.pause(_WAIT_S)


def _turn_key(version: WeightVersion, wave: int) -> str:
    return f"turn/{version}/{wave}"


def _ack_key(version: WeightVersion, worker: str) -> str:
    return f"ack/{version}/{worker}"


def translated(error: RuntimeError, what: str) -> WeightSyncError:
    """A store error in our words."""
    first_line = str(error).strip().partition("\n")[0]
    return WeightSyncError(f"{what}: the learner's store does not answer: {first_line}")
