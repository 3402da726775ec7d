"""Digests tell whether a checkpoint still holds the bytes that were written: torch loads most damage silently.

    step_N/digests.json    a CRC-32 of every other file; added beside training, once the checkpoint is durable

Where the learner died before it added them, only the files' sizes are checked.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import msgspec

from .checkpoint import CheckpointError, read_small
from .disk import sync

DIGESTS_FILE = "digests.json"
_READ_BYTES = 4 << 20

log = logging.getLogger(__name__)


def add_digests(checkpoint: Path) -> None:
    """Adds the digests durably. A checkpoint that is retired meanwhile gets none."""
    with suppress(FileNotFoundError):
        digests = {name: _digest(checkpoint / name) for name in _names(checkpoint)}
        partial = checkpoint / f".{DIGESTS_FILE}"
        try:
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(digests)))
            sync(partial)
            partial.rename(checkpoint / DIGESTS_FILE)
        except FileNotFoundError:
            raise
        except OSError as error:
            log.warning("%s: the files' digests could not be added (%s); damage to it may go unnoticed", partial, error)


def check_digests(checkpoint: Path, rank: int, world_size: int) -> None:
    """Checks this rank's share of the files. Raises CheckpointError where one has other bytes than were written."""
    path = checkpoint / DIGESTS_FILE
    if not path.exists():
        return
    try:
        digests = msgspec.json.decode(read_small(path), type=dict[str, int])
        own = sorted(digests)[rank::world_size]
        damaged = [name for name in own if _digest(checkpoint / name) != digests[name]]
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"Checkpoint {checkpoint} cannot be read: {error}.") from error
    if damaged:
        raise CheckpointError(f"Checkpoint {checkpoint} is damaged: {damaged[0]} has other bytes than were written.")


def _names(checkpoint: Path) -> list[str]:
    files = (Path(folder, name) for folder, _, names in os.walk(checkpoint) for name in names)
    own = {checkpoint / DIGESTS_FILE, checkpoint / f".{DIGESTS_FILE}"}
    return sorted(str(path.relative_to(checkpoint)) for path in files if path not in own)


def _digest(path: Path) -> int:
    digest = 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest = crc32(part, digest)
    return digest
