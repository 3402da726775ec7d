"""Opens the transport of a broadcast group by its name."""

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs do not re-export it

from headway.broker.errors import ConfigError, WeightSyncError
from headway.broker.user_code.kinds import unknown_kind
from headway.broker.user_code.own import make_own
from headway.broker.user_code.roots import ImportRoots
from headway.weightsync.deadline import Deadline
from headway.weightsync.transports.abilities import TRANSPORTS
from headway.weightsync.transports.base import BroadcastGroupTransport
from headway.weightsync.transports.collective import COLLECTIVES, ProcessGroupTransport, backend_class
from headway.weightsync.transports.ipc import IpcTransport

_KEY = "weights.transport"


def check_transport(name: str, roots: ImportRoots | None = None) -> None:
    """Raise WeightSyncError with the remedy if this process cannot use transport `name`, ConfigError if it cannot
    import it."""
    if name in COLLECTIVES:
        backend_class(name)
    elif ":" in name:
        (roots or ImportRoots()).load(name, _KEY)
    elif name not in TRANSPORTS:
        raise unknown_kind(name, TRANSPORTS, _KEY)


def form_group(
    name: str,
    store: Store,
    rank: int,
    size: int,
    interface: str,
    deadline: Deadline,
    roots: ImportRoots | None = None,
) -> BroadcastGroupTransport:
    """Form the group, and block until all ranks are there. Raises WeightSyncError if they are not by the deadline.

    A class of the user's own, below `roots` (by default those of ImportRoots), is called as
    `Class(store, rank, size, interface, deadline)`. Ranks exchange their addresses in `store`, a torch.distributed one;
    `interface` is the address of the interface that leads to the other ranks. The errors that it raises itself must be
    WeightSyncError.
    """
    if name in COLLECTIVES:
        return ProcessGroupTransport(name, store, rank, size, interface, deadline)
    if name in TRANSPORTS:
        return IpcTransport(store, rank, size, deadline)
    try:
        check_transport(name, roots)
        made: BroadcastGroupTransport = make_own(
            name,
            BroadcastGroupTransport,
            _KEY,
            lambda own: own(store, rank, size, interface, deadline),
            roots=roots or ImportRoots(),
        )
    except ConfigError as error:  # the learner chose the transport; a worker that cannot import it pulls
        raise WeightSyncError(str(error)) from error
    return made
