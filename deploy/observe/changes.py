"""The events in a run between two looks at it, a line for each."""

from collections.abc import Iterator

from headway.broker.schema.status import RunStatus

from .faults import fault_text
from .flat_rewards import flat_reward_text
from .live import STATES, step_line
from .status import version_text


def changes(before: RunStatus | None, now: RunStatus) -> Iterator[str]:
    """Yield the events since the look before; without one, the state alone."""
    if before is None or before.identity != now.identity:
        yield STATES.get(now.state, now.state)
        yield from _faults(None, now)
        return
    if now.state != before.state:
        yield STATES.get(now.state, now.state)
    if now.incarnation != before.incarnation:
        yield f"Another learner took the run over, as incarnation {now.incarnation}."
    yield from _steps(before, now)
    if now.announced != before.announced:
        yield f"Version {version_text(now.announced)} announced."
    yield from _workers(before, now)
    yield from _faults(before, now)
    yield from _pools(before, now)
    yield from _refusals(before, now)


def _steps(before: RunStatus, now: RunStatus) -> Iterator[str]:
    told = {(step.incarnation, step.step) for step in before.recent_steps}
    for step in now.recent_steps:
        if (step.incarnation, step.step) not in told:
            yield step_line(step)
    if (warning := flat_reward_text(now.recent_steps)) and not flat_reward_text(before.recent_steps):
        yield warning


def _workers(before: RunStatus, now: RunStatus) -> Iterator[str]:
    were = {info.worker: info for info in before.workers}
    are = {info.worker: info for info in now.workers}
    for name, info in are.items():
        if name not in were:
            yield f"Worker {name} joined."
        elif info.last_error and info.last_error != were[name].last_error:
            yield f"Worker {name}: {info.last_error}"
    for name in were.keys() - are.keys():
        yield f"Worker {name} left."
    for name in set(now.quarantined) - set(before.quarantined):
        yield f"Worker {name} gets no more leases."


def _faults(before: RunStatus | None, now: RunStatus) -> Iterator[str]:
    told = before.faults if before is not None else ()
    for fault in now.faults:
        if fault not in told:
            yield fault_text(fault)


def _pools(before: RunStatus, now: RunStatus) -> Iterator[str]:
    were = {pool.pool: pool.wanted for pool in before.pools}
    for pool in now.pools:
        if were.get(pool.pool) != pool.wanted:
            yield f"Pool {pool.pool}: {pool.wanted} workers wanted."


def _refusals(before: RunStatus, now: RunStatus) -> Iterator[str]:
    for letter in now.dead_letters:
        if letter not in before.dead_letters:
            yield f"Refused: {letter.tid} of {letter.worker or 'no worker'}: {letter.reason}"
    expired = now.queues.expired_leases - before.queues.expired_leases
    if expired > 0:
        yield f"{expired} lease{'s' * (expired > 1)} expired."
