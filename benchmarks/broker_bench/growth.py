"""Speeds while more and more payloads have gone through, and while the server holds more of them.

Speeds are per processor second, of client and server together, because this benchmark's share of the machine varies.
"""

from typing import Any

import uvloop

from headway.broker import open_broker
from headway.broker.server.embedded import EmbeddedServer

from .flow import Look, flow, look
from .learner import BATCH, Learner, Run
from .payloads import GROUP_SIZE, SHORT_PROMPT, payloads_of
from .servers import fresh_server
from .worker import Worker

FRAME_BYTES = 300
_FLAT_WITHIN = 0.2
_TAKES = 8
"""The number of batches taken at each number held, for the median; fewer where fewer are held."""


def measure(*, through: int, held: int, window: int = 1024) -> dict[str, Any]:
    """Measure with up to `through` payloads passed on one after the other, and with up to `held` of them kept.

    Speeds are those of about `window` payloads, or more, that end at each power of ten times the window.
    """
    return {"frame_bytes": FRAME_BYTES, "through": _through(through, window), "held": _held(held, window)}


def _through(most: int, window: int) -> dict[str, Any]:
    marks, looks = _marks(most, window), list[Look]()
    with fresh_server("off") as server:
        uvloop.run(
            flow(
                server, payloads_of(FRAME_BYTES, SHORT_PROMPT), marks[-1] + 3 * window, GROUP_SIZE, window, looks.append
            )
        )
    return _report({mark: _speed(*_around(looks, mark, window)) for mark in marks})


def _held(most: int, window: int) -> dict[str, Any]:
    with fresh_server("off") as server:
        submits, takes = uvloop.run(_fill(server, _marks(most, window), window))
    return {
        "lease_and_submit": _report(submits),
        "take_ms": {mark: round(1e3 * seconds, 2) for mark, seconds in takes.items()},
    }


async def _fill(server: EmbeddedServer, marks: list[int], window: int) -> tuple[dict[int, float], dict[int, float]]:
    """Measure, at each number of payloads held, the speed of lease and submit, and the time of taking one batch."""
    submits, takes = dict[int, float](), dict[int, float]()
    broker, taken = await open_broker(server.url, "held"), min(_TAKES, window // BATCH)
    try:
        groups = (marks[-1] + len(marks) * taken * BATCH) // GROUP_SIZE
        learner = await Learner.begin(broker, Run(groups=groups, prompt_tokens=SHORT_PROMPT, max_lag=groups))
        worker, step = Worker(broker, payloads_of(FRAME_BYTES, SHORT_PROMPT)), 0
        for mark in marks:
            await worker.work(mark + step * BATCH - window)
            before = look(server, worker.done)
            await worker.work(mark + step * BATCH)
            submits[mark] = _speed(before, look(server, worker.done))
            learner.take_s.clear()
            await learner.train(range(step, step + taken))
            step += taken
            takes[mark] = sorted(learner.take_s)[taken // 2]
    finally:
        await broker.close()
    return submits, takes


def _marks(most: int, window: int) -> list[int]:
    """Return 1, 10, 100... windows, up to `most` payloads."""
    marks = [window]
    while 10 * marks[-1] <= most:
        marks.append(10 * marks[-1])
    return marks


def _around(looks: list[Look], mark: int, window: int) -> tuple[Look, Look]:
    """Return a stretch of two windows, or of a tenth of the mark, that ends at the mark; the first window warms up."""
    end = max(mark, 3 * window)
    start = end - max(2 * window, mark // 10)
    return _first_from(looks, start), _first_from(looks, end)


def _first_from(looks: list[Look], trained: int) -> Look:
    return next((one for one in looks if one.trained >= trained), looks[-1])


def _speed(before: Look, after: Look) -> float:
    """Return payloads per processor second."""
    spent = after.client_cpu_s + after.server_cpu_s - before.client_cpu_s - before.server_cpu_s
    return (after.trained - before.trained) / spent


def _report(speeds: dict[int, float]) -> dict[str, Any]:
    ratio = min(speeds.values()) / max(speeds.values())
    return {
        "per_cpu_second": {mark: round(speed) for mark, speed in speeds.items()},
        "slowest_over_fastest": round(ratio, 2),
        "pass": ratio >= 1 - _FLAT_WITHIN,
    }
