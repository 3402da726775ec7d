"""Placements that were found once, in files, so that the next engine of the same kind need not trace its loader.

    trace ─► proved ─► write ──► $XDG_CACHE_HOME/headway/placements/KEY ──► read ─► proved again ─► used

A file is a hint and no more. One that is damaged, or of something else, is not read or fails its proof; then the loader
is traced and the file rewritten. No engine needs these files: whatever the disk says, loading goes on without them.
"""

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import torch

from headway.broker.installation import cache_directory

from .placement import Block, Placement, PublishedTensor, rows_of

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
