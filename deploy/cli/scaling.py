"""`headway scale`, `drain` and `quarantine`: asks pools and workers, wherever they run, for more, less or no work."""

import re
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from headway.broker.client.broker import BlockingBroker
from headway.broker.errors import BrokerError, ConfigError
from headway.broker.schema.status import PoolInfo
from headway.deploy.observe.status import pool_of
from headway.deploy.printing import say, say_json
from headway.deploy.roles.run_lookup import as_learner, client_of, locate_run

LOOK_S = 0.2
DISMISSED = {
    "drain": "Asked to hand their work back and leave",
    "quarantine": "No more leases for",
}
GONE = "The supervisor of pool {} has ended."


def scale_pool(change: str, pool: str, url: str | None, run: str | None, *, until_done: bool, as_json: bool) -> None:
    """Ask for `change` ("4", "+2", "-1") and print what was wanted before and is wanted now."""
    manner, workers = _parsed(change)
    where, run = locate_run(url, run)
    with client_of(as_learner(url, where), run) as client:
        name = pool_of(client.call(client.broker.status.snapshot()), pool).pool
        outcome = client.call(client.broker.pools.scale(name, manner, workers))
        if outcome is None:
            raise BrokerError(GONE.format(name))
        before, wanted = outcome
        if not as_json:
            say(f"Pool {name} of run {run}: {wanted} worker{'s' * (wanted != 1)} wanted, {before} before.")
        found = _await(client, name, wanted) if until_done else None
    if as_json:
        running = {} if found is None else {"pool_now": msgspec.to_builtins(found)}
        say_json({"run": run, "pool": name, "before": before, "wanted": wanted, **running})
    elif found is not None:
        say(f"{found.working} worker{'s run' if found.working != 1 else ' runs'}.")


def _parsed(change: str) -> tuple[Literal["to", "by"], int]:
    if not re.fullmatch(r"[+-]?\d{1,4}", change):
        raise ConfigError(f"{change!r} is no number of workers: give N, +N or -N, such as 4, +2 or -1.")
    return ("by" if change[0] in "+-" else "to"), int(change)


def _await(client: BlockingBroker, name: str, wanted: int) -> PoolInfo:
    """Wait until the wanted workers work and all others have left, and return the pool. Raises BrokerError if its
    supervisor is gone, if another `headway scale` asked for another number meanwhile, or if a worker never will work.
    """
    while True:
        status = client.call(client.broker.status.snapshot())
        found = next((pool for pool in status.pools if pool.pool == name), None)
        if found is None:
            raise BrokerError(GONE.format(name))
        if found.wanted != wanted:
            raise BrokerError(f"Pool {name} was asked for {found.wanted} workers meanwhile, not {wanted}.")
        if found.given_up:
            raise BrokerError(f"Pool {name} gave {found.given_up} workers up: their Headway is of another version.")
        if (found.working, found.running, found.leaving, found.restarting) == (wanted, wanted, 0, 0):
            return found
        time.sleep(LOOK_S)


def send_away(
    workers: Sequence[str], manner: Literal["drain", "quarantine"], url: str | None, run: str | None, *, as_json: bool
) -> None:
    """Ask workers to leave, or let them have no more leases. A part of a name will do if one living worker's name alone
    has it. Raises BrokerError for names that no living worker has, after all others were asked."""
    where, run = locate_run(url, run)
    with client_of(as_learner(url, where), run) as client:
        alive = [info.worker for info in client.call(client.broker.status.workers())]
        meant = {name: _meant(name, alive) for name in workers}
        unknown = [name for name in workers if not client.call(client.broker.status.exclude(meant[name], manner))]
    found = [meant[name] for name in workers if name not in unknown]
    if as_json:
        say_json({"run": run, manner: found, "unknown": unknown})
    elif found:
        say(f"{DISMISSED[manner]}: {', '.join(found)}.")
    if unknown:
        raise BrokerError(
            f"No worker {', '.join(unknown)} is alive in run {run}. Its workers: {', '.join(alive) or 'none'}."
        )


def _meant(name: str, alive: Sequence[str]) -> str:
    """Return the living worker of that name, or the only one whose name has that part; else the name as it is. Raises
    BrokerError for a part of several names."""
    found = [name] if name in alive else [worker for worker in alive if name in worker]
    if len(found) > 1:
        raise BrokerError(f"{name} may be any of {', '.join(found)}: give more of the name. None was asked.")
    return found[0] if found else name
