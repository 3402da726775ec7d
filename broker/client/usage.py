"""The bytes that a run holds on its server, and for how long no process has used it. Asking does not count as use."""

from dataclasses import dataclass

from headway.broker.connection.connection import Connection, pairs
from headway.broker.errors import FrameError
from headway.broker.schema import WeightVersion
from headway.broker.schema.metrics import StepMetrics
from headway.broker.wire.codec import decode


@dataclass(frozen=True)
class RunUsage:
    """A line about a run."""

    run: str
    state: str
    incarnation: int
    announced: WeightVersion | None
    last_step: StepMetrics | None
    """The last step; None before the first, and where another schema version wrote it."""
    workers: int
    """The number of live workers."""
    payload_bytes: int
    idle_s: int
    """The time since its learner, a worker or a status display last used it. Before Redis 7.2 asking is use, too."""


class Usage:
    """Reads how much a run holds, and how many processes use it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def look(self) -> RunUsage | None:
        """Returns the line, or None where no learner has claimed the run yet."""
        reply = await self._connection.look("usage", absent=None)
        if reply is None:
            return None
        idle_s, flat, steps, workers = reply
        meta = dict(pairs(flat))
        if "state" not in meta:
            return None
        return RunUsage(
            run=self._connection.run,
            state=meta["state"],
            incarnation=int(meta["incarnation"]),
            announced=_announced(meta),
            last_step=_read(steps[0]) if steps else None,
            workers=int(workers),
            payload_bytes=int(meta.get("payload_bytes", 0)),
            idle_s=int(idle_s),
        )


def _announced(meta: dict[str, str]) -> WeightVersion | None:
    if "announced_step" not in meta:
        return None
    return WeightVersion(int(meta["announced_incarnation"]), int(meta["announced_step"]))


def _read(frame: bytes) -> StepMetrics | None:
    try:
        return decode(frame, StepMetrics)
    except FrameError:
        return None
