"""A resumed learner goes on from the newest checkpoint that every rank can load."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from headway.learner.ranks import Ranks

from .checkpoint import Checkpoint, CheckpointError
from .digests import check_digests

log = logging.getLogger(__name__)


def load_first(checkpoints: Sequence[Checkpoint], load: Callable[[Path], None], ranks: Ranks) -> Checkpoint:
    """Loads the first of these that is undamaged on all ranks, and returns it. Collective.

    A warning names each one that it passes over. Where none can be loaded it raises CheckpointError, which says what is
    wrong with the first one.
    """
    first: Exception | None = None
    for checkpoint in checkpoints:
        failure = _failure(checkpoint, load, ranks)
        if failure is None:
            log.info("resuming from %s", checkpoint.path)
            return checkpoint
        if checkpoint is not checkpoints[-1]:
            log.warning("%s Going back to the checkpoint before.", failure)
        first = first or failure
    assert first is not None, "no checkpoints"
    if not isinstance(first, CheckpointError):
        raise first
    tried = f"None of the {len(checkpoints) - 1} before it can be loaded either. " if len(checkpoints) > 1 else ""
    raise CheckpointError(
        f"{first} {tried}Restore its files, go back to another checkpoint (--rewind-to STEP), or start anew"
        " (--overwrite)."
    ) from first


def _failure(checkpoint: Checkpoint, load: Callable[[Path], None], ranks: Ranks) -> Exception | None:
    """Returns why the checkpoint cannot be loaded: an error on every rank if there is one on any."""
    for act in (lambda: check_digests(checkpoint.path, ranks.rank, ranks.world_size), lambda: load(checkpoint.path)):
        failure = _caught(act)
        if ranks.any(failure is not None):
            return failure or CheckpointError(
                f"Checkpoint {checkpoint.path} could not be loaded: another rank says why."
            )
    return None


def _caught(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - all ranks must hear of it; raised again where nothing else is left
        return error
    return None
