"""Reports a supervisor's pools and their dead processes to the broker, and reads from it how many workers each pool
is to have. It also compares the workers of each pool: which are slow, and which do not report.

A worker is known by the tag that the supervisor gave the process, so reports of other processes, whose senders may lie,
count for nothing."""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from headway.broker.client.broker import BlockingBroker
from headway.broker.errors import (
    BrokerError,
    BrokerUnavailableError,
    ConfigError,
    ForeignRunError,
    HeadwayError,
    RunNotFoundError,
)
from headway.broker.schema.status import WorkerInfo
from headway.deploy.recipe.pools import SCORER
from headway.deploy.recipe.resolve import recipe_from_bytes
from headway.rollout_workers.config import WorkersConfig
from headway.rollout_workers.health import RUN_OVER, GenerationRate, RunEnd, Verdict, silent, slowest

from .process_pool import Pool, Slot

LOOKS = 10
"""Looks within the window of `slow`."""
LONGEST_LOOK_S = 5.0
CONFIG_S = 30.0
"""Seconds between two looks at the run's configuration, which a learner that resumes may change."""
MOST_PATIENCE = 16
"""The longest time before a new process is compared, in windows: it doubles with every verdict in a row."""


class PoolHealth:
    """Judges all pools of a supervisor, and tells the slots."""

    def __init__(self) -> None:
        self._config: WorkersConfig | None = None
        self._config_s = self._look_s = float("-inf")
        self._windows: dict[str, _RateWindow] = {}
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
            for name, verdict in self._verdicts(slots, reports, every_s, self._config):
                self._set_verdict(client, next(slot for slot in slots if slot.worker == name), verdict)
        self._windows = {name: rates for name, rates in self._windows.items() if name in reports}

    def _refresh(self, client: BlockingBroker, now: float) -> None:
        if now - self._config_s < CONFIG_S and self._config is not None:
            return
        stored = client.call(client.broker.status.config())
        self._config_s = now
        with suppress(ConfigError):
            self._config = recipe_from_bytes(stored).workers if stored is not None else None

    def _verdicts(
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
            rates = self._rates(slots, reports, config.slow_window_s)
            slow = slowest(rates, config.slow_window_s, config.slow_factor)
            verdicts += [slow] if slow is not None and slow not in verdicts else []
        return verdicts

    def _rates(
        self, slots: Sequence[Slot], reports: dict[str, WorkerInfo], window_s: float
    ) -> dict[str, GenerationRate]:
        """Return the rates of the workers that have reported for a whole window. One whose predecessors were set aside
        gets more time."""
        found = {}
        for slot in slots:
            if (info := reports.get(slot.worker)) is None:
                continue
            rate = self._windows.setdefault(slot.worker, _RateWindow()).note(info, window_s)
            patience_s = window_s * min(2**slot.verdicts, MOST_PATIENCE) if slot.verdicts else 0.0
            if rate is not None and time.monotonic() - slot.started >= patience_s:
                found[slot.worker] = rate
        return found

    def _set_verdict(self, client: BlockingBroker, slot: Slot, verdict: Verdict) -> None:
        report = client.broker.faults.report
        client.call(report(worker=slot.worker, host=socket.gethostname(), rule=verdict.rule, reason=verdict.reason))
        slot.verdict = verdict


class _RateWindow:
    """Counts one worker's reports within the window."""

    def __init__(self) -> None:
        self._looks = deque[tuple[float, WorkerInfo]]()

    def note(self, info: WorkerInfo, window_s: float) -> GenerationRate | None:
        """Add a look, and return the rate over the window; None before the worker has reported for a whole one."""
        now = time.monotonic()
        self._looks.append((now, info))
        while len(self._looks) > 1 and now - self._looks[1][0] >= window_s:
            self._looks.popleft()
        at, first = self._looks[0]
        if now - at < window_s:
            return None
        return GenerationRate(
            info.generated_tokens - first.generated_tokens, info.busy_s - first.busy_s, info.slot_s - first.slot_s
        )


def name_of(slot: Slot, reports: Iterable[str]) -> str:
    """Return the name of the slot's process, by which it reports; "" until it has."""
    return next((name for name in reports if name.endswith(f"-{slot.command.name}-{slot.tag}")), "")


REPORT_S = 0.5
PATIENCE_S = 60.0
"""Seconds that a supervisor which finds its run ended waits for a learner to resume it, as its workers do."""
TTL_S = 5.0
"""Seconds after which the broker forgets the pools of a silent supervisor, and another one may take their names."""
LAST_PATIENCE_S = 1.0
"""Seconds that the end of a supervisor waits for a server that is away: then leases expire by themselves."""

WORKING = ("generating", "idle", "asleep", "ready")
"""States of workers and scorers that hold a lease, or take one once there is one for them."""

log = logging.getLogger(__name__)


@dataclass
class Refusal:
    """The time since which the reports of a pool are refused, and what was reported of that."""

    since: float
    reported: str = ""


@contextmanager
def pool_reports(url: str, run: str, pools: Sequence[Pool]) -> Iterator[None]:
    """Set `wanted` of the pools to what `headway scale` asks for, in a thread, until the end of the block, and hand the
    leases of their dead processes back.

    During an outage of the server the pools keep their sizes. So does a pool whose report is refused, as another
    supervisor has its name, until it is taken.
    """
    with _in_thread("pools", _follow, url, run, pools):
        yield


@contextmanager
def death_reports(url: str, run: str, pools: Sequence[Pool]) -> Iterator[None]:
    """Hand back what the pools' dead processes held, in a thread, until the end of the block. The pools keep their
    sizes."""
    with _in_thread("death reports", _report_all_deaths, url, run, pools):
        yield


@contextmanager
def _in_thread(
    name: str, work: Callable[[str, str, list[Pool], threading.Event], None], url: str, run: str, pools: Sequence[Pool]
) -> Iterator[None]:
    """Do the work in a thread, which is told when the block ends."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(url, run, list(pools), over), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=TTL_S)


def _report_all_deaths(url: str, run: str, pools: list[Pool], over: threading.Event) -> None:
    """Connect only once a process has died, and for the time that the report takes."""
    is_over = False
    while not is_over:
        is_over = over.wait(REPORT_S)  # those that die at the very end are reported, too
        if not any(pool.dead for pool in pools):
            continue
        with suppress(BrokerUnavailableError):  # it is tried again until their leases expire
            client = BlockingBroker(url, run)
            try:
                for pool in pools:
                    _report_deaths(client, pool)
            except BrokerUnavailableError:
                raise
            except ForeignRunError:
                return  # nothing of the run is there any more
            except HeadwayError as error:
                log.warning("What a dead process held comes back only when it expires: %s", error)
                return
            finally:
                _close(client)


def _follow(url: str, run: str, pools: list[Pool], over: threading.Event) -> None:
    client: BlockingBroker | None = None
    end, judge, refused = RunEnd(PATIENCE_S), PoolHealth(), dict[str, Refusal]()
    try:
        while not over.wait(REPORT_S):
            try:
                if client is None:
                    client = BlockingBroker(url, run)
                    client.broker.end_when(over.is_set, LAST_PATIENCE_S)
                for pool in pools:
                    _report_deaths(client, pool)
                    _note_working(client, pool)
                    _report(client, pool, refused)
                is_over = end.is_over(client.call(client.broker.status.state()))
                for pool in pools:
                    pool.is_run_over = is_over
                judge.look(client, pools)
            except ForeignRunError:  # another run has the name now, and these pools serve its learner
                judge = PoolHealth()
                _close(client)
                client = None
            except BrokerUnavailableError:
                continue
            except HeadwayError as error:
                log.warning("The pools cannot be scaled: %s", error)
                return
        if client is not None:
            with suppress(HeadwayError):  # else their leases expire
                for pool in pools:
                    _report_deaths(client, pool)
    finally:
        _close(client)


def _report_deaths(client: BlockingBroker, pool: Pool) -> None:
    """Hand back what its dead processes held. A report that failed for want of a server is made again the next time."""
    while pool.dead:
        dead = pool.dead[0]
        client.call((client.broker.scoring if dead.is_scorer else client.broker.leases).report_death(dead.session))
        pool.dead.popleft()


def _note_working(client: BlockingBroker, pool: Pool) -> None:
    """Note which processes work, by their own reports. The broker is asked only while some of them begin."""
    beginning = [slot for slot in list(pool.slots.values()) if slot.is_running and not slot.is_working]
    if not beginning:
        return
    if any(slot.command.role == SCORER for slot in beginning):
        try:
            scorers = client.call(client.broker.status.snapshot()).scorers
        except RunNotFoundError:
            return
        states: dict[str, str] = {info.process: info.state for info in scorers}
    else:
        states = {info.worker: info.state for info in client.call(client.broker.status.workers())}
    for slot in beginning:
        slot.is_working = states.get(name_of(slot, states), "") in WORKING


def _report(client: BlockingBroker, pool: Pool, refused: dict[str, Refusal]) -> None:
    """Report a pool. `refused`: why reports are not taken, by pool. That is said once, and only once it has lasted: the
    name of a supervisor that has just ended, as before --resume, is still taken for TTL_S."""
    try:
        wanted = client.call(client.broker.pools.report(pool.info(), pool.count, TTL_S))
    except (ForeignRunError, BrokerUnavailableError):
        raise
    except BrokerError as error:
        refusal = refused.setdefault(pool.name, Refusal(time.monotonic()))
        if refusal.reported != str(error) and time.monotonic() - refusal.since > TTL_S + 2 * REPORT_S:
            log.warning("%s Until then `headway scale` does not reach it.", error)
            refusal.reported = str(error)
        return
    refused.pop(pool.name, None)
    if wanted is not None:
        pool.wanted = wanted


def _close(client: BlockingBroker | None) -> None:
    if client is not None:
        with suppress(BrokerError):
            client.close()
