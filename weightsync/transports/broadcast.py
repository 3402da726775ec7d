"""Both sides of a broadcast: the group's transport is opened by its name, and buckets pass through it one after
another, each sent while learner and members work on the next or previous one. Then follow the fingerprints, which exist
only once the last bucket is full.

    learner    fill k + 1 │ send k         member    receive k + 1 │ fingerprint k
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs do not re-export it

from headway.broker.errors import ConfigError, WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.user_code.import_paths import ImportRoots, load_custom
from headway.broker.user_code.kinds import unknown_kind
from headway.weightsync.limits import Deadline

from .base import TRANSPORTS, BroadcastGroupTransport
from .collective import COLLECTIVES, ProcessGroupTransport, backend_class
from .ipc import IpcTransport

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
        made: BroadcastGroupTransport = load_custom(
            name,
            BroadcastGroupTransport,
            _KEY,
            lambda own: own(store, rank, size, interface, deadline),
            roots=roots or ImportRoots(),
        )
    except ConfigError as error:  # the learner chose the transport; a worker that cannot import it pulls
        raise WeightSyncError(str(error)) from error
    return made


_AT_ONCE = 2
_NUMBER = np.dtype("<u8")


def pipelined(
    transport: BroadcastGroupTransport, buckets: Iterable[torch.Tensor], deadline: Deadline
) -> Iterator[torch.Tensor]:
    """Broadcast `buckets`, and yield each once it is through, while the next one is under way.

    Raises the errors of the transport and of `buckets`. However it ends, no transfer is under way afterwards.
    """
    under_way: deque[_Transfer] = deque()
    try:
        for bucket in buckets:
            under_way.append(_Transfer(transport, bucket, deadline))
            if len(under_way) == _AT_ONCE:
                yield under_way.popleft().finished()
        while under_way:
            yield under_way.popleft().finished()
    finally:
        for transfer in under_way:
            with suppress(WeightSyncError):
                transfer.finished()


class _Transfer:
    def __init__(self, transport: BroadcastGroupTransport, bucket: torch.Tensor, deadline: Deadline) -> None:
        self._bucket = bucket
        self._finish = transport.start(bucket, deadline)

    def finished(self) -> torch.Tensor:
        self._finish()
        return self._bucket


def seal(version: WeightVersion, fingerprints: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the seal that follows the last bucket: the version and all of its fingerprints, as bytes."""
    numbers = (version.incarnation, version.step, *fingerprints)
    return torch.from_numpy(np.array(numbers, _NUMBER).view(np.uint8)).to(device)


def empty_seal(count: int, device: torch.device) -> torch.Tensor:
    """Return memory for the seal of a version of `count` tensors."""
    return torch.zeros((2 + count) * _NUMBER.itemsize, dtype=torch.uint8, device=device)


def unsealed(version: WeightVersion, sealed: torch.Tensor) -> tuple[int, ...]:
    """Return the fingerprints in a seal. Raises WeightSyncError if they are another version's."""
    incarnation, step, *fingerprints = sealed.cpu().numpy().view(_NUMBER).tolist()
    if (found := WeightVersion(incarnation, step)) != version:
        raise WeightSyncError(f"version {found} arrived where {version} was offered")
    return tuple(fingerprints)
