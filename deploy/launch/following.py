"""Reports a supervisor's pools and their dead processes to the broker, and learns from it how many workers are wanted
in each."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from headway.broker.client.broker import BlockingBroker
from headway.broker.errors import BrokerError, BrokerUnavailableError, ForeignRunError, HeadwayError, RunNotFoundError
from headway.deploy.recipe.ray_roles import SCORER
from headway.rollout_workers.run_end import RunEnd

from .judging import Judge, name_of
from .pool import Pool

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
    """The time since which the reports of a pool are refused, and what was told of that."""

    since: float
    told: str = ""


@contextmanager
def following(url: str, run: str, pools: Sequence[Pool]) -> Iterator[None]:
    """Set `wanted` of the pools to what `headway scale` asks for, in a thread, until the end of the block, and hand the
    leases of their dead processes back.

    During an outage of the server the pools keep their sizes. So does a pool whose report is refused, as another
    supervisor has its name, until it is taken.
    """
    with _beside("pools", _follow, url, run, pools):
        yield


@contextmanager
def burying(url: str, run: str, pools: Sequence[Pool]) -> Iterator[None]:
    """Hand back what the pools' dead processes held, in a thread, until the end of the block. The pools keep their
    sizes."""
    with _beside("burials", _bury_all, url, run, pools):
        yield


@contextmanager
def _beside(
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


def _bury_all(url: str, run: str, pools: list[Pool], over: threading.Event) -> None:
    """Connect only once a process has died, and for the time that its burial takes."""
    is_over = False
    while not is_over:
        is_over = over.wait(REPORT_S)  # those that die at the very end are buried, too
        if not any(pool.dead for pool in pools):
            continue
        with suppress(BrokerUnavailableError):  # it is tried again until their leases expire
            client = BlockingBroker(url, run)
            try:
                for pool in pools:
                    _bury(client, pool)
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
    end, judge, refused = RunEnd(PATIENCE_S), Judge(), dict[str, Refusal]()
    try:
        while not over.wait(REPORT_S):
            try:
                if client is None:
                    client = BlockingBroker(url, run)
                    client.broker.end_when(over.is_set, LAST_PATIENCE_S)
                for pool in pools:
                    _bury(client, pool)
                    _note_working(client, pool)
                    _report(client, pool, refused)
                is_over = end.is_over(client.call(client.broker.status.state()))
                for pool in pools:
                    pool.is_run_over = is_over
                judge.look(client, pools)
            except ForeignRunError:  # another run has the name now, and these pools serve its learner
                judge = Judge()
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
                    _bury(client, pool)
    finally:
        _close(client)


def _bury(client: BlockingBroker, pool: Pool) -> None:
    """Hand back what its dead processes held. One whose burial failed for want of a server stays for the next time."""
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
        if refusal.told != str(error) and time.monotonic() - refusal.since > TTL_S + 2 * REPORT_S:
            log.warning("%s Until then `headway scale` does not reach it.", error)
            refusal.told = str(error)
        return
    refused.pop(pool.name, None)
    if wanted is not None:
        pool.wanted = wanted


def _close(client: BlockingBroker | None) -> None:
    if client is not None:
        with suppress(BrokerError):
            client.close()
