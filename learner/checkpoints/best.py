"""The best checkpoint by a metric of the run's evaluations, which stays when older checkpoints are deleted.

    checkpoints/best.json   BestCheckpoint
    checkpoints/best        a link to its directory, for everything that takes the directory of a model

An evaluation is of the weights of a step, and so of the checkpoint of that step. Its result may come before that
checkpoint is durable, or many steps later; a checkpoint whose evaluation is under way stays, too.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from .disk import sync

LINK, RECORD = "best", "best.json"

log = logging.getLogger(__name__)


class BestCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The best checkpoint, and the metric by which it is."""

    metric: str
    mode: Literal["max", "min"]
    value: float
    incarnation: int
    step: int


class Best:
    """Chooses the best of a run's checkpoints and remembers it over restarts. Of equal ones the earliest is the
    best."""

    def __init__(self, root: Path, metric: str, mode: Literal["max", "min"]) -> None:
        self._root = root
        self._metric = metric
        self._mode = mode
        self._measured: dict[int, float] = {}
        """Values of steps whose checkpoints were not durable when the evaluation ended."""
        self.awaited: Callable[[], Collection[int]] = tuple
        """Returns the steps whose evaluations are under way."""

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note what an evaluation of the weights of `step` has measured. `choose` follows."""
        value = metrics.get(self._metric, math.nan)
        if math.isfinite(value):
            self._measured[step] = value

    def choose(self, lineage: Mapping[tuple[int, int], Path]) -> set[Path]:
        """Choose among the durable checkpoints (by incarnation and step) that led to the latest, and return those that
        must stay. A best one that a rewind has left behind is the best no longer."""
        best = self._held(lineage)
        for (incarnation, step), path in sorted(lineage.items()):
            value = self._measured.pop(step, None)
            if value is not None and (best is None or self._is_better(value, best.value)):
                best = BestCheckpoint(
                    metric=self._metric, mode=self._mode, value=value, incarnation=incarnation, step=step
                )
                log.info("the best checkpoint by %s (%.4g) is %s", self._metric, value, path)
        self._store(best)
        awaited = {path for (_, step), path in lineage.items() if step in self.awaited()}
        return awaited | ({lineage[best.incarnation, best.step]} if best else set())

    def _is_better(self, value: float, than: float) -> bool:
        return value > than if self._mode == "max" else value < than

    def _held(self, lineage: Mapping[tuple[int, int], Path]) -> BestCheckpoint | None:
        """Return the best one until now; None if it was chosen by another rule."""
        held = read_best(self._root)
        if held is None or (held.metric, held.mode) != (self._metric, self._mode):
            return None
        return held if (held.incarnation, held.step) in lineage else None

    def _store(self, best: BestCheckpoint | None) -> None:
        """Write the record, and then the link, which a crash between the two leaves as it was until the next call."""
        record, link = self._root / RECORD, self._root / LINK
        if best is None:
            for path in (link, record):
                path.unlink(missing_ok=True)
            return
        if read_best(self._root) != best:
            replaced = record.with_name(f".{RECORD}")
            replaced.write_bytes(msgspec.json.format(msgspec.json.encode(best)))
            sync(replaced)
            replaced.replace(record)
        target = Path(str(best.incarnation), f"step_{best.step}")
        if not link.is_symlink() or link.readlink() != target:
            replaced = link.with_name(f".{LINK}")
            replaced.unlink(missing_ok=True)
            replaced.symlink_to(target, target_is_directory=True)
            replaced.replace(link)
        sync(self._root)


def read_best(root: Path) -> BestCheckpoint | None:
    """Return the record in a run's directory of checkpoints; None where there is none, or none that can be read."""
    try:
        return msgspec.json.decode((root / RECORD).read_bytes(), type=BestCheckpoint)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s cannot be read (%s): the best checkpoint is chosen anew.", root / RECORD, error)
        return None
