"""A view of a run from outside, which a test polls until the run has come so far."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headway.broker import BlockingBroker
from headway.broker.errors import RunNotFoundError
from headway.broker.schema import WeightVersion
from headway.broker.schema.status import RunStatus
from headway.deploy.run.run_directory import newest_endpoint

from .terminals import DEADLINE_S, Terminal, Terminals

POLL_S = 0.02


class Watch:
    """Polls a run and remembers every announced version that it saw."""

    def __init__(self, blocking: BlockingBroker, terminals: Terminals) -> None:
        self.blocking = blocking
        self._terminals = terminals
        self.announced: list[WeightVersion] = []

    def status(self) -> RunStatus | None:
        """Return the run's status, or None before a learner has claimed the run."""
        with suppress(RunNotFoundError):
            status = self.blocking.call(self.blocking.broker.status.snapshot(any_identity=True))
            if status.announced is not None and self.announced[-1:] != [status.announced]:
                self.announced.append(status.announced)
            return status
        return None

    def until(self, what: str, is_so: Callable[[RunStatus], bool]) -> RunStatus:
        """Return the first status of which this is so. `what` names it in the message of a failure."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            status = self.status()
            if status is not None and is_so(status):
                return status
            self._terminals.check()
            assert time.monotonic() < deadline, f"waited in vain until {what}; last seen: {status}"
            time.sleep(POLL_S)

    def until_step(self, step: int) -> RunStatus:
        """Wait until the weights of `step` are announced."""
        return self.until(f"step {step} is announced", lambda status: has_announced(status, step))

    def until_durable(self, checkpoint: Path) -> RunStatus:
        """Wait until the checkpoint is whole on the disk, which may be steps later, because the learner trains on."""
        return self.until(f"{checkpoint} is durable", lambda status: checkpoint.exists())


def has_announced(status: RunStatus, step: int) -> bool:
    return status.announced is not None and status.announced.step >= step


@contextmanager
def watching(url: str, run: str, terminals: Terminals) -> Iterator[Watch]:
    blocking = BlockingBroker(url, run)
    try:
        yield Watch(blocking, terminals)
    finally:
        blocking.close()


@contextmanager
def attached(terminals: Terminals, headway: Terminal, run: Path) -> Iterator[Watch]:
    """Find the run's server as `headway status` does, after the warm-up."""
    deadline = time.monotonic() + DEADLINE_S
    while not (run / "broker.json").exists():
        assert headway.exit_code() is None, headway.tail()
        assert time.monotonic() < deadline, headway.tail()
        time.sleep(0.1)
    found = newest_endpoint(run.parent)
    with watching(found.url, found.run, terminals) as watch:
        yield watch
