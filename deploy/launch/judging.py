"""A supervisor judges the workers of its own pools: who is slow compared with the others of the pool, who is silent.

It asks the broker what they report. It knows each by the tag that it gave the process, so that reports of other
processes, whose senders may lie, count for nothing.
"""

import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

from headway.broker.client.broker import BlockingBroker
from headway.broker.errors import ConfigError
from headway.broker.schema.status import WorkerInfo
from headway.deploy.recipe.loading import recipe_from_bytes
from headway.rollout_workers.config import WorkersConfig
from headway.rollout_workers.health.rules import GenerationPace, Verdict, silent, slowest
from headway.rollout_workers.run_end import RUN_OVER

from .pool import Pool, Slot

LOOKS = 10
"""Looks within the window of `slow`."""
LONGEST_LOOK_S = 5.0
CONFIG_S = 30.0
"""Seconds between two looks at the run's configuration, which a learner that resumes may change."""
MOST_PATIENCE = 16
"""The longest time before a new process is compared, in windows: it doubles with every verdict in a row."""


class Judge:
    """Judges all pools of a supervisor, and tells the slots."""

    def __init__(self) -> None:
        self._config: WorkersConfig | None = None
        self._config_s = self._look_s = float("-inf")
        self._paces: dict[str, _Paces] = {}
        self._unheard: dict[str, float] = {}
        """Seconds for which workers have not been heard of, by name, counted in looks: a supervisor that was stopped
        has not looked meanwhile."""

    def look(self, client: BlockingBroker, pools: Sequence[Pool]) -> None:
        """Look at the workers if that is due, and set the verdicts of their slots. Raises what the broker raises."""
        now = time.monotonic()
        self._refresh(client, now)
        if self._config is None:
            return
        every_s = min(self._config.slow_window_s / LOOKS, LONGEST_LOOK_S)
        if now - self._look_s < every_s or client.call(client.broker.status.state()) in RUN_OVER:
            return
        self._look_s = now
        reports = {info.worker: info for info in client.call(client.broker.status.workers())}
        for pool in pools:
            slots = [slot for slot in list(pool.slots.values()) if slot.is_running and slot.verdict is None]
            for name, verdict in self._judged(slots, reports, every_s, self._config):
                self._tell(client, next(slot for slot in slots if slot.worker == name), verdict)
        self._paces = {name: paces for name, paces in self._paces.items() if name in reports}

    def _refresh(self, client: BlockingBroker, now: float) -> None:
        if now - self._config_s < CONFIG_S and self._config is not None:
            return
        stored = client.call(client.broker.status.config())
        self._config_s = now
        with suppress(ConfigError):
            self._config = recipe_from_bytes(stored).workers if stored is not None else None

    def _judged(
        self, slots: Sequence[Slot], reports: dict[str, WorkerInfo], every_s: float, config: WorkersConfig
    ) -> list[tuple[str, Verdict]]:
        for slot in slots:
            slot.worker = slot.worker or name_of(slot, reports)
        verdicts = []
        for name in (slot.worker for slot in slots if slot.worker):
            self._unheard[name] = 0.0 if name in reports else self._unheard.get(name, 0.0) + every_s
            if (verdict := silent(self._unheard[name], config.stall_s)) is not None:
                verdicts.append((name, verdict))
        if config.slow_factor:
            paces = self._compared(slots, reports, config.slow_window_s)
            slow = slowest(paces, config.slow_window_s, config.slow_factor)
            verdicts += [slow] if slow is not None and slow not in verdicts else []
        return verdicts

    def _compared(
        self, slots: Sequence[Slot], reports: dict[str, WorkerInfo], window_s: float
    ) -> dict[str, GenerationPace]:
        """Return the paces of the workers that have reported for a whole window. One whose predecessors were set aside
        gets more time."""
        found = {}
        for slot in slots:
            if (info := reports.get(slot.worker)) is None:
                continue
            pace = self._paces.setdefault(slot.worker, _Paces()).note(info, window_s)
            patience_s = window_s * min(2**slot.verdicts, MOST_PATIENCE) if slot.verdicts else 0.0
            if pace is not None and time.monotonic() - slot.started >= patience_s:
                found[slot.worker] = pace
        return found

    def _tell(self, client: BlockingBroker, slot: Slot, verdict: Verdict) -> None:
        report = client.broker.faults.report
        client.call(report(worker=slot.worker, host=socket.gethostname(), rule=verdict.rule, reason=verdict.reason))
        slot.verdict = verdict


class _Paces:
    """Counts one worker's reports within the window."""

    def __init__(self) -> None:
        self._looks = deque[tuple[float, WorkerInfo]]()

    def note(self, info: WorkerInfo, window_s: float) -> GenerationPace | None:
        """Add a look, and return the pace over the window; None before the worker has reported for a whole one."""
        now = time.monotonic()
        self._looks.append((now, info))
        while len(self._looks) > 1 and now - self._looks[1][0] >= window_s:
            self._looks.popleft()
        at, first = self._looks[0]
        if now - at < window_s:
            return None
        return GenerationPace(
            info.generated_tokens - first.generated_tokens, info.busy_s - first.busy_s, info.slot_s - first.slot_s
        )


def name_of(slot: Slot, reports: Iterable[str]) -> str:
    """Return the name of the slot's process, by which it reports; "" until it has."""
    return next((name for name in reports if name.endswith(f"-{slot.command.name}-{slot.tag}")), "")
