"""Finds out where an engine's own loader puts every element of the published tensors, by loading numbered ones.

An engine fuses projections, stacks experts, shards over tensor parallel ranks, pads, and swaps halves. Its loader does
that a tensor at a time, which takes seconds for tens of thousands of them, and makes the same copies every time. So the
loader is traced once:

    numbered tensors ─► the loader ─► parameters ─► which tensor, which element, stands in each row ─► Placement

and from then on every version is copied straight to its place. Numbers are patterns of 16 bits, which pass through any
number format unharmed. Two loads number the tensors, differently: rows that are the same after both are rows that the
loader does not fill. Two more loads give the element's place in its tensor, in two halves.

Placements that were found once are kept in files, so that the next engine of the same kind need not trace its loader:

    trace ─► proved ─► write ──► $XDG_CACHE_HOME/headway/placements/KEY ──► read ─► proved again ─► used

A file is a hint and no more. One that is damaged, or of something else, is not read or fails its proof; then the loader
is traced and the file rewritten. No engine needs these files: whatever the disk says, loading goes on without them.

R rows and C columns of a parameter, whose leading dimensions are flattened.
"""

import functools
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from headway.broker.errors import WeightSyncError
from headway.broker.installation import cache_directory

NUMBERS = 1 << 16
SECOND = 1 << 15
"""Distance between the two numbers of a source."""

BITS = {2: torch.int16, 4: torch.int32}
"""The integer type of an element, by its bytes."""

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], None]
"""The engine's loader, which writes into its parameters."""


class PublishedTensor(NamedTuple):
    """A tensor as the learner publishes it."""

    name: str
    shape: tuple[int, ...]
    torch_dtype: torch.dtype


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a parameter whose elements stand in one source at equal steps."""

    parameter: str
    first_row: int
    rows: int
    source: str
    offset: int
    """Position of the block's first element in the flat source."""
    row_step: int
    column_step: int


class Copies(NamedTuple):
    """Rows of parameters and the memory that they are copied from. The copies can be repeated while both stay in
    place."""

    targets: list[torch.Tensor]
    sources: list[torch.Tensor]

    @torch.no_grad()
    def make(self) -> None:
        """Make all copies."""
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)


@dataclass(frozen=True)
class Placement:
    """Everything that the loader copies."""

    blocks: tuple[Block, ...]

    @functools.cached_property
    def _of_source(self) -> Mapping[str, Sequence[Block]]:
        found: dict[str, list[Block]] = {}
        for block in self.blocks:
            found.setdefault(block.source, []).append(block)
        return found

    def copies(self, parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> "Copies":
        """Return the copies of the blocks whose sources are among `tensors`, which are contiguous and of the published
        shapes."""
        pairs = [(filled_rows(parameters, block), block) for name in tensors for block in self._of_source.get(name, ())]
        sources = [_strided(tensors[block.source], block, target.shape[1]) for target, block in pairs]
        return Copies([target for target, _ in pairs], sources)

    def is_at(self, parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the parameters hold, bit for bit, what copies of these tensors would put there."""
        targets, sources = self.copies(parameters, tensors)
        bits = [BITS[target.dtype.itemsize] for target in targets]
        pairs = zip(targets, sources, bits, strict=True)
        return all(torch.equal(target.view(one), source.to(target.device).view(one)) for target, source, one in pairs)


def runs_of(placement: Placement) -> dict[str, list[tuple[int, int]]]:
    """Return the rows that copies fill, by parameter, as runs from one row up to another."""
    runs: dict[str, list[tuple[int, int]]] = {}
    for block in placement.blocks:
        runs.setdefault(block.parameter, []).append((block.first_row, block.first_row + block.rows))
    return runs


def filled_rows(parameters: Mapping[str, torch.Tensor], block: Block) -> torch.Tensor:
    """Return [rows, C], a view of the parameter's rows that the block fills."""
    return rows_of(parameters[block.parameter])[block.first_row : block.first_row + block.rows]


def rows_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return [R, C], a view of the parameter. A vector has one column."""
    parameter = parameter.detach()
    return parameter.view(-1, 1) if parameter.dim() < 2 else parameter.view(-1, parameter.shape[-1])


def trace(load: Load, parameters: Mapping[str, torch.Tensor], sources: Sequence[PublishedTensor]) -> Placement:
    """Find out what the loader copies, and overwrite its parameters. Raises WeightSyncError if it does more than
    copy."""
    if len(sources) > SECOND:
        raise WeightSyncError(f"{len(sources)} tensors cannot be numbered; {SECOND} can")
    _check(parameters, sources)
    first = _loaded(load, parameters, sources, _source)
    second = _loaded(load, parameters, sources, _source_again)
    is_loaded = {name: _is_loaded(first[name], second[name]) for name in parameters}
    _check_rows(parameters, is_loaded)
    low = _loaded(load, parameters, sources, _low_half)
    high = _loaded(load, parameters, sources, _high_half)
    names = [source.name for source in sources]
    blocks: list[Block] = []
    for name, parameter in parameters.items():
        which_R = torch.where(is_loaded[name], first[name][:, 0], -1)
        places_R3 = low[name] + high[name] * NUMBERS
        blocks += _blocks(name, rows_of(parameter).shape[1], which_R, places_R3, names)
    return Placement(tuple(blocks))


def scribble(load: Load, parameters: Mapping[str, torch.Tensor], sources: Sequence[PublishedTensor]) -> None:
    """Overwrite what the loader loads with numbers that are no weights."""
    _loaded(load, parameters, sources, _source)


def scrambled(sources: Sequence[PublishedTensor], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield sources of which no two have the same elements, and no source the same ones in two rows, but by rare
    chance. Weights may: many models begin with vectors of ones."""
    return _numbered(sources, _scramble, device)


def _check(parameters: Mapping[str, torch.Tensor], sources: Sequence[PublishedTensor]) -> None:
    for name, parameter in parameters.items():
        if not parameter.is_contiguous():
            raise WeightSyncError(f"{name} is not contiguous")
    given = {source.torch_dtype for source in sources}
    held = {parameter.dtype for parameter in parameters.values()}
    if given != held or len(given) != 1 or next(iter(given)).itemsize not in BITS:
        raise WeightSyncError(f"the engine holds {_words(held)} and gets {_words(given)}: its loader must convert them")


def _words(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "nothing"


def _source(number: int, places: torch.Tensor) -> torch.Tensor:
    """Return the elements of source number `number` for one tracing load. The next three functions do the same."""
    return torch.full_like(places, number)


def _source_again(number: int, places: torch.Tensor) -> torch.Tensor:
    return torch.full_like(places, number + SECOND)


def _low_half(number: int, places: torch.Tensor) -> torch.Tensor:
    return places % NUMBERS


def _high_half(number: int, places: torch.Tensor) -> torch.Tensor:
    return places // NUMBERS


def _scramble(number: int, places: torch.Tensor) -> torch.Tensor:
    mixed = (places + 1).mul_(-1640531535).add_(number * 40503)  # 32 bits, which wrap
    mixed.bitwise_xor_(mixed >> 15).mul_(0x2C1B3C6D)
    return mixed.bitwise_xor_(mixed >> 12).bitwise_and_(NUMBERS - 1)


def _loaded(
    load: Load,
    parameters: Mapping[str, torch.Tensor],
    sources: Sequence[PublishedTensor],
    numbering: Callable[[int, torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return [R, 3], the numbers in each parameter's first, second and last column; all three are the same for one
    column."""
    load(_numbered(sources, numbering, next(iter(parameters.values())).device))
    return {name: _columns(_bits(parameter)) for name, parameter in parameters.items()}


def _numbered(
    sources: Sequence[PublishedTensor], numbering: Callable[[int, torch.Tensor], torch.Tensor], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    for number, source in enumerate(sources):
        places = torch.arange(math.prod(source.shape), dtype=torch.int32, device=device)
        bits = numbering(number, places).to(BITS[source.torch_dtype.itemsize])  # the upper half wraps into the sign
        yield source.name, bits.view(source.torch_dtype).view(source.shape)


def _is_loaded(first_R3: torch.Tensor, second_R3: torch.Tensor) -> torch.Tensor:
    """Return [R], whether the loader loaded each row."""
    return (second_R3[:, 0] - first_R3[:, 0]) % NUMBERS == SECOND


def _check_rows(parameters: Mapping[str, torch.Tensor], is_loaded: Mapping[str, torch.Tensor]) -> None:
    """Raise if a row comes from several sources. The parameters hold the sources' numbers now."""
    for name, parameter in parameters.items():
        bits_RC = _bits(parameter)
        is_one_R = (bits_RC == bits_RC[:, :1]).all(1).cpu()
        if not bool((is_one_R | ~is_loaded[name]).all()):
            raise WeightSyncError(f"rows of {name} come from several tensors each")


def _columns(bits_RC: torch.Tensor) -> torch.Tensor:
    columns = bits_RC.shape[1]
    return _unsigned(bits_RC[:, [0, min(1, columns - 1), columns - 1]])


def _unsigned(bits: torch.Tensor) -> torch.Tensor:
    return bits.cpu().long() % NUMBERS


def _blocks(
    name: str, columns: int, which_R: torch.Tensor, places_R3: torch.Tensor, names: Sequence[str]
) -> Iterator[Block]:
    """Yield runs of rows with one source and one step, without rows that the loader did not fill."""
    steps_R = places_R3[:, 1] - places_R3[:, 0]
    is_uneven_R = (steps_R < 0) | (places_R3[:, 2] != places_R3[:, 0] + steps_R * (columns - 1))
    if (is_uneven_R & (which_R >= 0)).any():
        raise WeightSyncError(f"columns of {name} do not stand at equal steps in what was published")
    offsets_R = places_R3[:, 0]
    starts = _starts(which_R, steps_R, offsets_R)
    for row, end in zip(starts, [*starts[1:], len(which_R)], strict=True):
        if which_R[row] >= 0:
            source, step = names[int(which_R[row])], int(steps_R[row]) or 1
            row_step = int(offsets_R[row + 1] - offsets_R[row]) if end - row > 1 else 1
            yield Block(name, row, end - row, source, int(offsets_R[row]), row_step, step)


def _starts(which_R: torch.Tensor, steps_R: torch.Tensor, offsets_R: torch.Tensor) -> list[int]:
    """Return the first rows of runs with one source, one column step and one row step. The rows of a view go
    forward."""
    if not len(which_R):
        return []
    row_steps = torch.where(which_R[1:] >= 0, offsets_R.diff(), 1)
    goes_on = (which_R.diff() == 0) & ((steps_R.diff() == 0) | (which_R[1:] < 0)) & (row_steps >= 1)
    # A row that continues a run must keep the step of the run.
    is_next = goes_on.clone()
    is_next[1:] &= ~goes_on[:-1] | (row_steps[1:] == row_steps[:-1])
    return [0, *(1 + (~is_next).nonzero().flatten()).tolist()]


def _bits(parameter: torch.Tensor) -> torch.Tensor:
    return rows_of(parameter).view(BITS[parameter.dtype.itemsize])


def _strided(tensor: torch.Tensor, block: Block, columns: int) -> torch.Tensor:
    return torch.as_strided(
        tensor, (block.rows, columns), (block.row_step, block.column_step), tensor.storage_offset() + block.offset
    )


FORM = 1
"""The number of the files' form, which is part of every key."""
MOST_BYTES = 1 << 28
"""The largest file that is read."""
MOST_FILES = 256
"""The most files that are kept; the oldest go first."""
FIELDS = 7
"""The numbers of a block: of its parameter, its first row, its rows, of its source, offset, row step, column step."""
LARGEST = 1 << 40
"""The largest of these numbers."""

log = logging.getLogger(__name__)


def placement_cache(kind: str) -> "PlacementCache | None":
    """Return the user's own, where there can be any; `kind` as for PlacementCache."""
    directory = cache_directory()
    return None if directory is None else PlacementCache(directory / "placements", kind)


class _File(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    digest: bytes
    """The digest of `blocks`."""
    blocks: bytes
    """[B, FIELDS] of int64, little-endian."""


class PlacementCache:
    """The files in one directory for engines of one kind."""

    def __init__(self, directory: Path, kind: str) -> None:
        """`kind` tells engines apart whose parameters have the same names and shapes: the engine's version, the class
        of its model, and the place of the process among those that share the model."""
        self._directory = directory
        self._kind = kind

    def read(self, published: Sequence[PublishedTensor], parameters: Mapping[str, torch.Tensor]) -> Placement | None:
        """Return what was kept for these tensors and parameters. All its blocks lie within them; whether it is right is
        not known."""
        key = self._key(published, parameters)
        path = self._path(key)
        try:
            if path.stat().st_size > MOST_BYTES:
                return None
            file = msgspec.msgpack.decode(path.read_bytes(), type=_File)
        except (OSError, msgspec.MsgspecError):
            return None
        if file.key != key or file.digest != _digest(file.blocks) or len(file.blocks) % (8 * FIELDS):
            return None
        blocks_BF = np.frombuffer(file.blocks, "<i8").reshape(-1, FIELDS)
        return _decoded(blocks_BF, published, parameters) if _fits(blocks_BF, published, parameters) else None

    def write(
        self, published: Sequence[PublishedTensor], parameters: Mapping[str, torch.Tensor], placement: Placement
    ) -> None:
        """Keep a placement, if the disk lets it be kept."""
        key = self._key(published, parameters)
        of_parameter = {name: number for number, name in enumerate(parameters)}
        of_source = {source.name: number for number, source in enumerate(published)}
        numbers = [
            (of_parameter[b.parameter], b.first_row, b.rows, of_source[b.source], b.offset, b.row_step, b.column_step)
            for b in placement.blocks
        ]
        blocks = np.array(numbers, "<i8").reshape(-1, FIELDS).tobytes()
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._replace(self._path(key), msgspec.msgpack.encode(_File(key, _digest(blocks), blocks)))
            self._prune()
        except OSError as error:
            log.info("where the loader puts weights is not kept for the next start: %s", error)

    def _replace(self, path: Path, content: bytes) -> None:
        handle, name = tempfile.mkstemp(dir=self._directory, prefix=".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    def _prune(self) -> None:
        """Remove the oldest files. Another process may do the same at the same time."""
        files = sorted((one.stat().st_mtime, one) for one in self._directory.iterdir())
        for _, one in files[:-MOST_FILES]:
            one.unlink(missing_ok=True)

    def _key(self, published: Sequence[PublishedTensor], parameters: Mapping[str, torch.Tensor]) -> bytes:
        sources = [(one.name, one.shape, str(one.torch_dtype)) for one in published]
        targets = [(name, tuple(one.shape), str(one.dtype)) for name, one in parameters.items()]
        kind = [FORM, self._kind, str(torch.__version__), sources, targets]
        return _digest(msgspec.msgpack.encode(kind))

    def _path(self, key: bytes) -> Path:
        return self._directory / key.hex()


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=20).digest()


def _fits(blocks_BF: np.ndarray, published: Sequence[PublishedTensor], parameters: Mapping[str, torch.Tensor]) -> bool:
    """Return whether every block lies within its parameter and its source."""
    parameter, first_row, rows, source, offset, row_step, column_step = blocks_BF.T
    if not ((blocks_BF >= 0).all() and (blocks_BF < LARGEST).all() and (blocks_BF[:, [2, 5, 6]] > 0).all()):
        return False
    if not ((parameter < len(parameters)).all() and (source < len(published)).all()):
        return False
    sizes_P2 = np.array([rows_of(one).shape for one in parameters.values()], np.int64).reshape(-1, 2)
    elements_S = np.array([int(np.prod(one.shape, dtype=np.int64)) for one in published], np.int64)
    heights, widths = sizes_P2[parameter].T
    # In floating point nothing overflows, and up to 2^53 it is exact.
    last = offset + (rows - 1.0) * row_step + (widths - 1.0) * column_step
    return bool((first_row + rows <= heights).all() and (last < elements_S[source]).all())


def _decoded(
    blocks_BF: np.ndarray, published: Sequence[PublishedTensor], parameters: Mapping[str, torch.Tensor]
) -> Placement:
    names = tuple(parameters)
    return Placement(
        tuple(
            Block(names[parameter], first_row, rows, published[source].name, offset, row_step, column_step)
            for parameter, first_row, rows, source, offset, row_step, column_step in blocks_BF.tolist()
        )
    )
