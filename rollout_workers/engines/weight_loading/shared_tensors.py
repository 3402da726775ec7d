"""Hands named tensors to an engine's processes without sending them: the processes map the tensors' memory.

    front process: Handover.of(tensors) ─► a few bytes ─► update_weights ─► TensorMapper.tensors(those bytes): engine

Tensors on a GPU stay in place and are mapped once: an engine that is given the same memory again, with other numbers in
it, gets the same views. Tensors on a CPU stay in place for the length of one call if all lie in memory that processes
can attach (`attachable_memory`); others are copied into a file in RAM for that long.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import accumulate
from typing import NamedTuple

import msgspec
import torch

from headway.rollout_workers.engines.base import NamedTensors
from headway.weightsync.tensors.buckets import ALIGNMENT, DTYPES
from headway.weightsync.tensors.shared_memory import attach, gpu_handle, handle_of, host_buffer

KEPT = 2
"""Sets of memory that stay mapped: the engine may receive into one while it swaps the other in."""


class _Place(NamedTuple):
    """A tensor's place in one of the buffers."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    buffer: int
    offset: int
    nbytes: int


class _Shared(msgspec.Struct, frozen=True, array_like=True):
    handles: tuple[bytes, ...]
    places: tuple[_Place, ...]
    stays: bool
    """Whether the same memory may be given again."""


class SharedTensors(NamedTuple):
    """One version, as an engine's processes get it."""

    names: tuple[str, ...]
    shared: bytes
    """The bytes that `TensorMapper.tensors` takes."""


class Handover:
    """Hands tensors over from the front process. It keeps GPU memory that engines have mapped from being freed."""

    def __init__(self, wanted: Callable[[NamedTensors], NamedTensors]) -> None:
        """`wanted` returns the tensors as the engine's processes want them, and raises WeightSyncError for wrong
        ones."""
        self._wanted = wanted
        self._handles: OrderedDict[int, tuple[torch.UntypedStorage, bytes]] = OrderedDict()
        self._given: deque[tuple[NamedTensors, SharedTensors]] = deque(maxlen=KEPT)

    @contextmanager
    def of(self, tensors: NamedTensors) -> Iterator[SharedTensors]:
        """Give the tensors to processes of this machine until the end of the block."""
        if all(tensor.is_cuda for _, tensor in tensors):
            yield self._known(tensors)
        elif (shared := _attachable(wanted := self._wanted(tensors))) is not None:
            yield _encoded(shared)
        else:
            with _copied([(name, tensor.cpu()) for name, tensor in wanted]) as shared:
                yield _encoded(shared)

    @asynccontextmanager
    async def handed(self, tensors: NamedTensors) -> AsyncIterator[SharedTensors]:
        """As `of`, while the event loop goes on: the copies are made in a thread."""
        with ExitStack() as until_end:
            yield await asyncio.to_thread(until_end.enter_context, self.of(tensors))

    def _known(self, tensors: NamedTensors) -> SharedTensors:
        """Return the same object for the same list of tensors."""
        for known, given in self._given:
            if known is tensors:
                return given
        given = _encoded(self._in_place([(name, tensor.contiguous()) for name, tensor in self._wanted(tensors)]))
        self._given.append((tensors, given))
        return given

    def _in_place(self, tensors: NamedTensors) -> _Shared:
        handles, places = _places(tensors, self._keep)
        while len(self._handles) > KEPT * len(handles):
            self._handles.popitem(last=False)
        return _Shared(handles, places, stays=True)

    def _keep(self, name: str, tensor: torch.Tensor) -> bytes:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._handles:
            self._handles[address] = storage, gpu_handle(tensor)
        self._handles.move_to_end(address)
        return self._handles[address][1]


def _encoded(shared: _Shared) -> SharedTensors:
    return SharedTensors(tuple(place.name for place in shared.places), msgspec.msgpack.encode(shared))


def _places(
    tensors: NamedTensors, handle: Callable[[str, torch.Tensor], bytes]
) -> tuple[tuple[bytes, ...], tuple[_Place, ...]]:
    """Return the handle of each storage that contiguous tensors lie in, and the place of each tensor."""
    buffers: dict[int, int] = {}
    handles, places = [], []
    for name, tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        if address not in buffers:
            buffers[address] = len(buffers)
            handles.append(handle(name, tensor))
        offset = int(tensor.storage_offset()) * tensor.element_size()
        places.append(_Place(name, _dtype(tensor), tuple(tensor.shape), buffers[address], offset, tensor.nbytes))
    return tuple(handles), tuple(places)


def _attachable(tensors: NamedTensors) -> _Shared | None:
    """Return the places of tensors that all lie in memory that processes can attach; None if one does not, or has
    gaps."""
    handles = {name: handle_of(tensor) for name, tensor in tensors if tensor.is_contiguous()}
    known = {name: handle for name, handle in handles.items() if handle is not None}
    if len(known) < len(tensors):
        return None
    return _Shared(*_places(tensors, lambda name, tensor: known[name]), stays=False)


@contextmanager
def _copied(tensors: NamedTensors) -> Iterator[_Shared]:
    ends = list(accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for _, tensor in tensors))
    places = tuple(
        _Place(name, _dtype(tensor), tuple(tensor.shape), 0, offset, tensor.nbytes)
        for (name, tensor), offset in zip(tensors, [0, *ends], strict=False)
    )
    with host_buffer(ends[-1] if ends else 0) as (buffer, handle):
        for place, (_, tensor) in zip(places, tensors, strict=True):
            _view(buffer, place).copy_(tensor)
        yield _Shared((handle,), places, stays=False)


class TensorMapper:
    """Maps tensors into one of the engine's processes."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Mapping[str, torch.Tensor]] = OrderedDict()
        self._buffers: dict[bytes, Mapping[bytes, torch.Tensor]] = {}
        """Buffers of the remembered versions by handle: parts of a version come through the same memory, which is
        mapped once."""

    def tensors(self, shared: bytes) -> Mapping[str, torch.Tensor]:
        """Return the tensors by name. The same bytes give the same mapping while it is remembered."""
        if shared in self._known:
            self._known.move_to_end(shared)
            return self._known[shared]
        decoded = msgspec.msgpack.decode(shared, type=_Shared)
        mapped = {handle: buffer for buffers in self._buffers.values() for handle, buffer in buffers.items()}
        buffers = [mapped[handle] if handle in mapped else attach(handle) for handle in decoded.handles]
        tensors = {place.name: _view(buffers[place.buffer], place) for place in decoded.places}
        if decoded.stays:
            self._known[shared] = tensors
            self._buffers[shared] = dict(zip(decoded.handles, buffers, strict=True))
            while len(self._known) > KEPT:
                forgotten, _ = self._known.popitem(last=False)
                del self._buffers[forgotten]
        return tensors


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _view(buffer: torch.Tensor, place: _Place) -> torch.Tensor:
    return buffer[place.offset : place.offset + place.nbytes].view(DTYPES[place.dtype]).view(place.shape)
