"""Which transport a broadcast group runs on."""

from typing import Literal

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs do not re-export it

from weightsync.deadline import Deadline
from weightsync.transports.base import BroadcastGroupTransport
from weightsync.transports.collective import ProcessGroupTransport, backend_class
from weightsync.transports.ipc import IpcTransport

TransportName = Literal["gloo", "nccl", "ucc", "ipc"]


def check_transport(name: TransportName) -> None:
    """Raise WeightSyncError with the remedy if this process cannot use transport `name`."""
    if name != "ipc":
        backend_class(name)


def form_group(
    name: TransportName, store: Store, rank: int, size: int, interface: str, deadline: Deadline
) -> BroadcastGroupTransport:
    """Blocks until all ranks are there. Raises WeightSyncError if they are not by the deadline."""
    if name == "ipc":
        return IpcTransport(store, rank, size, deadline)
    return ProcessGroupTransport(name, store, rank, size, interface, deadline)
